# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""torch_npu's profiler on the emulator: operators on the host and on the NPU, per step."""

import csv
import importlib.metadata
import json
from collections import Counter

import pytest
import torch
import torch_npu
from sanitizers import without_sanitizers

ANALYSIS = (
    "torch_npu forks a process with threads to analyse the data, and their malloc may be locked"
    " then"
)


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Directory of the profile of two steps: a matmul on one stream, a sum on another."""
    path = tmp_path_factory.mktemp("profile")
    npu = torch_npu.profiler
    x, side = torch.ones(64, 32, device="npu"), torch.npu.Stream()
    weight = torch.ones(32, 16, device="npu")
    activities = [npu.ProfilerActivity.CPU, npu.ProfilerActivity.NPU]
    ready = npu.tensorboard_trace_handler(str(path), worker_name="one")
    schedule = npu.schedule(wait=0, warmup=0, active=2, repeat=1)
    with npu.profile(
        activities=activities, schedule=schedule, on_trace_ready=ready, record_shapes=True
    ) as running:
        for _ in range(2):
            product = x @ weight
            with torch.npu.stream(side):
                side.wait_stream(torch.npu.default_stream())
                product.sum().item()
            running.step()
    (result,) = path.glob("one_*")
    return result


@pytest.fixture(scope="module")
def kernels(profile):
    with (profile / "ASCEND_PROFILER_OUTPUT" / "kernel_details.csv").open() as file:
        return list(csv.DictReader(file))


@without_sanitizers(ANALYSIS)
def test_kernel_details_has_the_operators_of_each_step(kernels):
    counts = Counter((row["Step Id"], row["Name"]) for row in kernels)
    assert counts["0", "aclnnMm"] + counts["0", "aclnnMatmul"] == 1
    assert counts["1", "aclnnMm"] + counts["1", "aclnnMatmul"] == 1
    assert counts["0", "aclnnReduceSum"] == counts["1", "aclnnReduceSum"] == 1
    product = next(row for row in kernels if row["Type"] in ("Mm", "Matmul"))
    # whose kernel_details.csv has no arguments
    if not importlib.metadata.version("torch-npu").startswith("2.10."):
        assert product["Input Shapes"] == '"64,32;32,16;64,16"'
        assert product["Input Data Types"] == "FLOAT;FLOAT;FLOAT"
    assert product["Accelerator Core"] == "AI_CORE"
    assert all(float(row["Duration(us)"]) > 0 for row in kernels)


@without_sanitizers(ANALYSIS)
def test_timeline_joins_host_and_npu_operators(profile):
    trace = json.loads((profile / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text())
    named = {event["name"]: event for event in trace if event.get("ph") == "X"}
    assert {"aten::matmul", "aten::sum", "aclnnReduceSum"} <= named.keys()
    host, device = named["aten::sum"], named["aclnnReduceSum"]
    assert float(host["ts"]) <= float(device["ts"])
    arrows = [event for event in trace if event.get("cat") == "async_npu"]
    started = {event["id"]: event for event in arrows if event["ph"] == "s"}
    ended = [
        event
        for event in arrows
        if event["ph"] == "f" and float(event["ts"]) == float(device["ts"])
    ]
    assert ended
    assert all(float(started[event["id"]]["ts"]) <= float(event["ts"]) for event in ended)


@without_sanitizers(ANALYSIS)
def test_streams_are_separate_rows(profile):
    trace = json.loads((profile / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text())
    (device,) = {
        event["pid"] for event in trace if event.get("args", {}).get("name") == "Ascend Hardware"
    }
    streams: dict[str, set[int]] = {}
    for event in trace:
        if event["ph"] == "X" and event["pid"] == device:
            streams.setdefault(event["name"], set()).add(event["tid"])
    assert len(streams["aclnnReduceSum"]) == 1
    assert not streams["aclnnReduceSum"] & (
        streams.get("aclnnMm", set()) | streams.get("aclnnMatmul", set())
    )


def test_what_msprof_cannot_is_refused_in_one_line(run, tmp_path):
    done = run("run", "--", "msprof", "--export=on", "--type=db", f"--output={tmp_path}")
    assert done.returncode == 2
    assert "msprof of ascend-emulator cannot --export=on --type=db" in done.stderr
    done = run("run", "--", "msprof", "--export=on", f"--output={tmp_path}")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        f"msprof of ascend-emulator: no profile of the emulator in {tmp_path}",
    )
