# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""`ascend-emulator run --time modelled`: events and streams have the times of the laws."""

import csv
import json
import sys

import pytest
from ascend_emulator import chips, laws, tracing
from sanitizers import without_sanitizers

CHIP = chips.chip("Ascend910B1")
LAUNCH = CHIP.launch * 1e3
SIZE = 1024
HEAD = f"""
import json, torch, torch_npu
a = torch.ones({SIZE}, {SIZE}, dtype=torch.bfloat16, device="npu")
b = a @ a
side, main = torch.npu.Stream(), torch.npu.current_stream()
torch.npu.synchronize()
def event(on=None):
    made = torch.npu.Event(enable_timing=True)
    made.record(on or main)
    return made
def elapsed(first, last):
    torch.npu.synchronize()
    return first.elapsed_time(last)
"""


def milliseconds(name, elements, flops=0.0, rows=SIZE):
    """Of an operator in 16 bits, by the law."""
    return 1e3 * laws.laws()[name].seconds(CHIP, 2.0 * elements, flops, rows)


def matmul():
    return milliseconds("matmul", 3 * SIZE**2, 2.0 * SIZE**3)


@pytest.fixture
def ran(run, tmp_path):
    """Runs a program under the modelled clock: what it printed as JSON, its trace, and stderr."""

    def program(body, *options):
        path = tmp_path / "trace.json"
        done = run(
            *("run", "--time", "modelled", *options, "--trace", str(path)),
            *("--", sys.executable, "-c", HEAD + body),
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), tracing.events(path), done.stderr

    return program


def test_a_matmul_takes_what_its_law_says(ran):
    assert matmul() == pytest.approx(
        6.8e-3 + 8.7e-3 + 2 * SIZE**3 / (0.8 * CHIP.cube_flops) * 1e3, rel=1e-6
    )
    result, events, stderr = ran("""
first = event()
for _ in range(10):
    a @ a
print(json.dumps(elapsed(first, event())))
""")
    # The host launches faster than the NPU computes.
    assert result == pytest.approx(LAUNCH + 10 * matmul(), rel=1e-3)
    durations = [event["dur"] for event in events if event["name"] == "aclnnMatmul"]
    assert durations == pytest.approx([matmul() * 1e3] * 11, rel=1e-3)
    assert "times of events, profiles and traces are modelled" in stderr
    assert "modelled time: " in stderr


def test_groups_share_the_rows_in_each_format(ran):
    _, events, _ = ran(f"""
weights = torch.ones(4, {SIZE}, {SIZE}, dtype=torch.bfloat16, device="npu")
counts = torch.tensor([256, 512, 768, {SIZE}]).npu()
for each in (weights, torch_npu.npu_format_cast(weights, 29)):
    torch_npu.npu_grouped_matmul([a], [each], group_list=counts, split_item=3, group_type=0)
print(json.dumps(elapsed(event(), event())))
""")
    durations = [event["dur"] for event in events if "GroupedMatmul" in event["name"]]
    expected = milliseconds("matmul", 6 * SIZE**2, 2.0 * SIZE**3, rows=SIZE / 4) * 1e3
    assert durations == pytest.approx([expected] * 2, rel=1e-3)


def test_small_operators_wait_for_the_host(ran):
    result, _, _ = ran("""
x = torch.ones(16, device="npu")
torch.npu.synchronize()
first = event()
for _ in range(100):
    x.add_(1)
print(json.dumps(elapsed(first, event())))
""")
    assert result == pytest.approx(100 * LAUNCH + milliseconds("elementwise", 32), rel=0.01)


def test_streams_overlap_and_a_wait_orders_them(ran):
    result, _, _ = ran("""
def both(ordered):
    first = event()
    for _ in range(20):
        a @ a
    if ordered:
        side.wait_stream(main)
    with torch.npu.stream(side):
        for _ in range(20):
            a @ a
    main.wait_stream(side)
    return elapsed(first, event())
print(json.dumps([both(False), both(True)]))
""")
    # Without a wait the second stream begins when the host has launched the first one's work.
    assert result[0] == pytest.approx(21 * LAUNCH + 20 * matmul(), rel=1e-3)
    assert result[1] == pytest.approx(LAUNCH + 40 * matmul(), rel=1e-3)


def test_the_host_launches_after_what_it_waits_for(ran):
    result, _, _ = ran("""
first = event()
a @ a
torch.npu.synchronize()
a @ a
print(json.dumps(elapsed(first, event())))
""")
    assert result == pytest.approx(2 * (LAUNCH + matmul()), rel=1e-3)


def test_time_of_the_host_is_not_added(ran):
    result, _, _ = ran("""
import time
first = event()
a @ a
time.sleep(0.2)
a @ a
print(json.dumps(elapsed(first, event())))
""")
    assert result == pytest.approx(LAUNCH + 2 * matmul(), rel=1e-3)


def test_nodes_of_a_graph_overlap_as_captured(ran):
    result, events, _ = ran("""
graph = torch.npu.NPUGraph()
with torch.npu.graph(graph):
    here = torch.npu.current_stream()
    b = a @ a
    side.wait_stream(here)
    with torch.npu.stream(side):
        c = b @ a
    d = b @ a
    here.wait_stream(side)
    e = c @ d
torch.npu.synchronize()
first = event()
graph.replay()
print(json.dumps(elapsed(first, event())))
""")
    assert result == pytest.approx(LAUNCH + 3 * matmul(), rel=1e-3)
    nodes = [event for event in events if event["name"] == "aclnnMatmul"][-4:]
    assert nodes[1]["ts"] == pytest.approx(nodes[2]["ts"])
    assert nodes[1]["tid"] != nodes[2]["tid"]


def test_ai_cpu_operators_have_their_law_and_are_marked(ran, tmp_path):
    _, events, _ = ran("""
torch.arange(64, device="npu").cumsum(0)
torch.arange(64, device="npu", dtype=torch.float32).cumsum(0)
print(json.dumps(elapsed(event(), event())))
""")
    (whole, real) = (event for event in events if "umsum" in event["name"])
    assert (whole["args"]["core"], whole["args"]["law"]) == ("AI CPU", "AI CPU")
    assert whole["dur"] == pytest.approx(35 + 2 * 64 * 8 / (0.005 * CHIP.bandwidth) * 1e6, rel=1e-3)
    assert "core" not in real["args"]
    assert "operator, AI CPU" in tracing.table(tmp_path / "trace.json")


def test_chips_that_compile_by_default_do_so_for_each_new_shape(run, tmp_path):
    """On the modelled clock their operators are computed, and a compilation is the host's time."""
    path = tmp_path / "trace.json"
    program = """
import torch
for size in (4, 4, 8):
    assert torch.ones(size, device="npu").neg_().sum() == -size
"""
    seen = {}
    for soc in ("Ascend310P3", "Ascend910B1"):
        command = ("run", "--soc", soc, "--time", "modelled", "--trace", str(path))
        done = run(*command, "--", sys.executable, "-c", program)
        assert done.returncode == 0, done.stderr
        events = [each for each in tracing.events(path) if each["cat"] == "compilation"]
        path.unlink()
        seen[soc] = [each["name"] for each in events]
        assert all(each["dur"] == 2e6 for each in events)
        assert (f"{len(events)} compilations take {2 * len(events)} s" in done.stderr) == bool(
            events
        )
    assert seen["Ascend310P3"].count("compile aclnnNeg") == 2
    assert seen["Ascend910B1"] == []


def test_operators_without_a_law_are_listed(ran, tmp_path):
    _, _, stderr = ran("""
a.float().cumprod(-1)
print(json.dumps(elapsed(event(), event())))
""")
    # torch_npu's own log may follow.
    assert "1 of them of 1 operators without a law, as elementwise ones: aclnnCumprod 1\n" in stderr
    assert "modelled as elementwise: aclnnCumprod 1" in tracing.table(tmp_path / "trace.json")


def test_wrong_options_are_refused_in_one_line(run):
    done = run("run", "--time", "measured", "--", "true")
    assert "'measured'; supported: modelled and modelled=REPORT" in done.stderr
    done = run("run", "--time", "modelled", "--null", "--", "true")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


RANKS = """
import os, subprocess, sys
import torch.distributed as dist
rank = int(os.environ.get("RANK", "0"))
if rank == 0:
    other = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=os.environ | {"RANK": "1"})
torch.npu.set_device(rank)
a = torch.ones(1024, 1024, dtype=torch.bfloat16, device="npu")
dist.init_process_group("hccl", init_method="file://STORE", rank=rank, world_size=2)
x = torch.ones(1 << 20, dtype=torch.bfloat16, device="npu")
dist.all_reduce(x)
for _ in range(50 * (1 - rank)):
    a @ a
dist.all_reduce(x)
torch.npu.synchronize()
dist.destroy_process_group()
if rank == 0:
    other.wait()
    print(json.dumps(other.returncode))
"""


def test_a_collective_begins_with_its_last_rank(ran, tmp_path):
    result, events, _ = ran(RANKS.replace("STORE", str(tmp_path / "store")), "--npus", "2")
    assert result == 0
    reduced = [event for event in events if event["cat"] == "collective"]
    ranks = [
        [each for each in reduced if each["pid"] == pid] for pid in {e["pid"] for e in reduced}
    ]
    assert [len(each) for each in ranks] == [2, 2]
    first, second = sorted((each[-1] for each in ranks), key=lambda event: event["ts"])
    # Rank 0 computes fifty matmuls, while rank 1 waits.
    assert second["ts"] - first["ts"] == pytest.approx(50 * matmul() * 1e3, rel=0.1)
    assert first["ts"] + first["dur"] == pytest.approx(second["ts"] + second["dur"], abs=0.01)
    law, sent = laws.collectives()["collective"], 2 << 20
    seconds = CHIP.collective + sent / (law.bandwidth * CHIP.link_bandwidth)
    assert second["dur"] == pytest.approx(seconds * 1e6, rel=1e-3)


PROFILE = """
import sys
npu = torch_npu.profiler
with npu.profile(
    activities=[npu.ProfilerActivity.CPU, npu.ProfilerActivity.NPU],
    schedule=npu.schedule(wait=0, warmup=0, active=2, repeat=1),
    on_trace_ready=npu.tensorboard_trace_handler(sys.argv[-1], worker_name="one"),
) as running:
    for _ in range(2):
        (a @ a).sum().item()
        torch.arange(64, device="npu").cumsum(0)
        running.step()
"""


@without_sanitizers("torch_npu forks a process with threads to analyse the data")
def test_profiles_have_modelled_times_and_say_so(run, tmp_path):
    done = run(
        *("run", "--time", "modelled", "--", sys.executable, "-c", HEAD + PROFILE, str(tmp_path))
    )
    assert done.returncode == 0, done.stderr
    (profile,) = tmp_path.glob("one_*")
    with (profile / "ASCEND_PROFILER_OUTPUT" / "kernel_details.csv").open() as file:
        kernels = list(csv.DictReader(file))
    products = [row for row in kernels if row["Type"] in ("Mm", "Matmul")]
    durations = [float(row["Duration(us)"]) for row in products]
    assert durations == pytest.approx([matmul() * 1e3] * 2, rel=1e-3)
    assert [row["Step Id"] for row in kernels] == ["0"] * 4 + ["1"] * 4
    cores = {row["Name"]: row["Accelerator Core"] for row in kernels}
    assert all(core.endswith(" (modelled)") for core in cores.values())
    assert {core for name, core in cores.items() if "umsum" in name} == {"AI_CPU (modelled)"}
    trace = json.loads((profile / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text())
    names = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert "Ascend Hardware (modelled)" in names
    assert all("_MODELLED" in path.name for path in profile.glob("PROF_*"))
