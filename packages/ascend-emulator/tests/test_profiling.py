"""torch_npu's profiler on the emulator: the host's side of what a program does."""

import json
import sys
import textwrap

import torch
import torch_npu
from sanitizers import without_sanitizers


@without_sanitizers("torch_npu forks a process with threads to analyse the data, and their malloc may be locked then")
def test_the_host_s_side_is_recorded(tmp_path):
    npu = torch_npu.profiler
    ready = npu.tensorboard_trace_handler(str(tmp_path), worker_name="one")
    with npu.profile(activities=[npu.ProfilerActivity.CPU, npu.ProfilerActivity.NPU], on_trace_ready=ready):
        x = torch.ones(4, 4).npu()
        (x @ x).sum().item()
    (trace,) = tmp_path.glob("one_*/ASCEND_PROFILER_OUTPUT/trace_view.json")
    names = {event["name"] for event in json.loads(trace.read_text())}
    assert {"aten::matmul", "aten::sum"} <= names


def test_the_missing_device_data_is_said_once(run, tmp_path):
    script = """
        import sys, torch, torch_npu
        npu = torch_npu.profiler
        for _ in range(2):
            with npu.profile(activities=[npu.ProfilerActivity.NPU], on_trace_ready=lambda _: None):
                torch.ones(4).npu()
    """
    done = run("run", "--", sys.executable, "-c", textwrap.dedent(script), str(tmp_path), ASCEND_WORK_PATH=str(tmp_path))
    assert done.stderr.count("ascend-emulator: profiling: the profile will have no device data") == 1, done.stderr
