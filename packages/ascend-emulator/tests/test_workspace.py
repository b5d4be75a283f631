# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Workspaces of operators, which torch_npu allocates on the device."""

import sys
import textwrap

import pytest
import torch
import torch_npu

MIB = 1 << 20


def peak(call):
    """Bytes that a call allocated at most, beyond what it was given and what it returned."""
    torch.npu.synchronize()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    result = call()
    kept = torch.npu.memory_allocated() - before
    torch.npu.synchronize()
    del result
    return torch.npu.max_memory_allocated() - before - kept


def test_cube_operators_need_the_system_workspace():
    x = torch.ones(64, 64, dtype=torch.float16, device="npu")
    assert 16 * MIB <= peak(lambda: x @ x) < 17 * MIB
    assert 16 * MIB <= peak(lambda: torch.nn.functional.linear(x, x, x[0])) < 17 * MIB
    image, weight = torch.ones(1, 3, 8, 8, device="npu"), torch.ones(4, 3, 3, 3, device="npu")
    assert 16 * MIB <= peak(lambda: torch.nn.functional.conv2d(image, weight)) < 17 * MIB
    heads = x.view(1, 64, 1, 64)
    fused = torch_npu.npu_fused_infer_attention_score
    assert (
        16 * MIB
        <= peak(lambda: fused(heads, heads, heads, num_heads=1, input_layout="BSND", scale=1.0)[0])
        < 18 * MIB
    )


def test_element_wise_operators_need_none():
    x = torch.ones(64, 64, device="npu")
    assert peak(lambda: torch.exp(x)) == 0


def test_sorting_of_long_rows_needs_buffers():
    short, long = (torch.rand(4, size, device="npu") for size in (1000, 100_000))
    rows = 4 * 100_000 * 16
    assert peak(lambda: torch.sort(short)) < MIB
    assert rows <= peak(lambda: torch.sort(long)) < rows + MIB


def test_gradients_of_attention_are_added_in_float32():
    def backward():
        query, key, value = (
            torch.rand(1, 2, 512, 128, dtype=torch.bfloat16, device="npu", requires_grad=True)
            for _ in range(3)
        )
        out = torch_npu.npu_fusion_attention(query, key, value, 2, "BNSD", scale=0.1)[0]
        torch.npu.synchronize()
        return peak(lambda: torch.autograd.grad(out.float().sum(), (query, key, value)))

    assert backward() >= 16 * MIB + 3 * 2 * 512 * 128 * 4


def test_a_chip_with_an_unknown_size_needs_none(run):
    script = """
        import torch, torch_npu
        torch_npu.npu.set_compile_mode(jit_compile=False)
        x = torch.ones(64, 64, dtype=torch.float16, device="npu")
        x @ x
        torch.npu.synchronize()
        print(torch.npu.max_memory_allocated() >> 20)
    """
    done = run(
        "run",
        "--soc",
        "Ascend310P3",
        "--memory",
        "1GiB",
        "--",
        sys.executable,
        "-c",
        textwrap.dedent(script),
    )
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize("level", ["0", "1"])
def test_a_graph_is_captured_and_replayed_with_workspaces(run, level):
    script = """
        import torch, torch_npu
        x, graph = torch.ones(64, 64, device="npu"), torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            y = (x @ x) @ x
        x.fill_(2)
        graph.replay()
        torch.npu.synchronize()
        print(y[0, 0].item())
    """
    done = run(
        "run",
        "--memory",
        "1GiB",
        "--",
        sys.executable,
        "-c",
        textwrap.dedent(script),
        TASK_QUEUE_ENABLE=level,
    )
    assert done.stdout == "32768.0\n", done.stderr


def test_workspaces_have_an_allocator_of_their_own(run):
    """With TASK_QUEUE_ENABLE=2: one block per stream, which stays."""
    script = """
        import torch, torch_npu
        x = torch.ones(64, 64, device="npu")
        torch.npu.synchronize()
        before, _ = torch.npu.mem_get_info()
        print(((x @ x) @ x)[0, 0].item(), before - torch.npu.mem_get_info()[0] >> 20)
    """
    done = run(
        "run",
        "--memory",
        "1GiB",
        "--",
        sys.executable,
        "-c",
        textwrap.dedent(script),
        TASK_QUEUE_ENABLE="2",
    )
    assert done.stdout == "4096.0 18\n", done.stderr
