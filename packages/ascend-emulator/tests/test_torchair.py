# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""torchair, which torch_npu's wheel contains: its libraries load, graphs of aclgraph compute,
CANN's graph engine refuses."""

import sys

import pytest

# Loads each library of the wheel with all functions resolved, as torchair's libraries are linked.
LOAD = """
import ctypes, os, pathlib, torch, torch_npu, torchair
for path in sorted(pathlib.Path(torch_npu.__file__).parent.rglob("*.so*")):
    try:
        ctypes.CDLL(str(path), os.RTLD_NOW)
        print("loaded", path.name)
    except OSError as error:
        print("failed", error)
"""
COMPILE = """
import torch, torch_npu, torchair
config = torchair.CompilerConfig()
config.mode = "reduce-overhead"
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).npu().eval()
with torch.no_grad():
    compiled = torch.compile(model, backend=torchair.get_npu_backend(compiler_config=config), dynamic=False)
    for _ in range(3):
        x = torch.randn(5, 4).npu()
        print("difference", (compiled(x) - model(x)).abs().max().item())
    torch._dynamo.reset()
    try:
        torch.compile(model, backend="npu", dynamic=False)(x)
    except Exception as error:
        print("refused", *(line for line in str(error).splitlines() if "graph engine" in line))
    print("afterwards", torch.ones(3).npu().sum().item())
"""


@pytest.fixture
def printed_lines(run):
    """``printed_lines(program)``: the lines that it prints, as first word and the rest."""

    def start(program):
        done = run("run", "--", sys.executable, "-c", program)
        assert done.returncode == 0, done.stderr[-2000:]
        words = ("loaded", "failed", "difference", "refused", "afterwards")
        return [
            (first, rest)
            for first, _, rest in (line.partition(" ") for line in done.stdout.splitlines())
            if first in words
        ]

    return start


def test_every_library_of_the_wheel_loads_with_all_its_symbols(printed_lines):
    lines = printed_lines(LOAD)
    assert [rest for first, rest in lines if first == "failed"] == []
    assert {"libtorch_npu.so", "libop_plugin_atb.so", "_torchair.so", "_npu_graph_executor.so"} <= {
        rest for _, rest in lines
    }


def test_graphs_compute_and_the_graph_engine_refuses_by_name(printed_lines):
    lines = printed_lines(COMPILE)
    assert [first for first, _ in lines] == ["difference"] * 3 + ["refused", "afterwards"]
    assert [float(rest) for first, rest in lines[:3]] == [0.0] * 3
    assert (
        " of CANN's graph engine is not emulated; supported: torchair's mode reduce-overhead; fix:"
        " CompilerConfig().mode" in lines[3][1]
    )
    assert lines[4][1] == "3.0"
