# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Triton's kernels on emulated NPUs against torch on the CPU, with ascend-emulator[triton]
(tools/check triton)."""

import os
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("ascendnpuir", reason="ascend-emulator[triton] is not installed")

import triton
import triton_kernels as kernels

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)
REAL = DTYPES[:3]


def values(*shape, dtype=torch.float32):
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(-1000, 1000, shape, dtype=dtype)


def same(out, expected, tolerance=1e-5):
    """Equal to what was computed in float32, within a rounding of the dtype."""
    rounding = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(out.dtype, tolerance)
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 100, 4099])
def test_addition_of_a_length_that_is_no_multiple(dtype, n):
    x, y = values(n, dtype=dtype), values(n, dtype=dtype)
    out = torch.zeros(n + 7, dtype=dtype, device="npu")
    kernels.add[(triton.cdiv(n, 128),)](x.npu(), y.npu(), out, n, BLOCK=128)
    assert torch.equal(out.cpu(), torch.cat([x + y, torch.zeros(7, dtype=dtype)]))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_constants_choose_what_is_computed(dtype, gated):
    x = values(300, dtype=dtype)
    out = torch.empty(300, dtype=dtype, device="npu")
    kernels.activate[(3,)](x.npu(), out, 300, 0.5, GATED=gated, BLOCK=128)
    wide = x.float()
    same(out, 0.5 * (torch.nn.functional.silu(wide) if gated else wide.expm1().maximum(wide)))


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize("columns", [1, 77, 256])
def test_reductions_of_rows(dtype, columns):
    x = values(9, columns, dtype=dtype)
    total, largest = torch.empty(2, 9, device="npu")
    where = torch.empty(9, dtype=torch.int32, device="npu")
    kernels.reduce_rows[(9,)](x.npu(), total, largest, where, columns, BLOCK=256)
    same(total, x.float().sum(-1), 1e-4)
    assert torch.equal(largest.cpu(), x.float().amax(-1))
    assert torch.equal(x.float().gather(1, where.cpu().long()[:, None])[:, 0], x.float().amax(-1))


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_softmax(dtype):
    x = values(20, 100, dtype=dtype)
    out = torch.empty(20, 100, device="npu")
    kernels.softmax[(20,)](x.npu(), out, 100, BLOCK=128)
    same(out, x.float().softmax(-1))


@pytest.mark.parametrize("dtype", REAL, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 64), (40, 30, 50), (1, 17, 33)])
def test_matrix_product(dtype, m, n, k):
    a, b = values(m, k, dtype=dtype), values(k, n, dtype=dtype)
    out = torch.empty(m, n, dtype=dtype, device="npu")
    grid = (triton.cdiv(m, 16), triton.cdiv(n, 16))
    kernels.matmul[grid](a.npu(), b.npu(), out, m, n, k, BM=16, BN=16, BK=16)
    same(out, a.float() @ b.float(), 1e-4)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_gather(index):
    x, at = values(500), torch.randint(0, 500, (200,), dtype=index)
    out = torch.empty(200, device="npu")
    kernels.gather[(4,)](at.npu(), x.npu(), out, 200, BLOCK=64)
    assert torch.equal(out.cpu(), x[at.long()])


def test_atomic_additions_of_many_programs():
    x = torch.randint(0, 100, (1000,), dtype=torch.int32)
    out = torch.zeros(8, dtype=torch.int32, device="npu")
    kernels.count[(16,)](x.npu(), out, 1000, BINS=7, BLOCK=64)
    expected = torch.zeros(8, dtype=torch.int32).index_add(0, x % 7, x)
    expected[7] = x.sum()
    assert torch.equal(out.cpu(), expected)


def test_loop_whose_length_is_an_argument():
    x = values(50).abs()
    out = torch.empty(50, device="npu")
    for times in (1, 2, 5):
        kernels.powers[(1,)](x.npu(), out, times, 50, BLOCK=64)
        same(out, x**times, 1e-4)


def test_transposition_by_blocks():
    x = values(37, 21)
    out = torch.empty(21, 37, device="npu")
    kernels.transpose[(3, 2)](x.npu(), out, 37, 21, BR=16, BC=16)
    assert torch.equal(out.cpu(), x.T)


def test_addresses_in_memory():
    parts = [values(30).npu() for _ in range(3)]
    addresses = torch.tensor([part.data_ptr() for part in parts]).npu()
    out = torch.empty(3, 30, device="npu")
    kernels.copy_by_address[(3,)](addresses, out, 30, BLOCK=32)
    assert torch.equal(out.cpu(), torch.stack(parts).cpu())


@pytest.mark.parametrize("kernel", [kernels.tuned_add, kernels.chosen_add])
def test_autotuning_and_heuristics(kernel):
    x, y = values(700), values(700)
    out = torch.empty(700, device="npu")
    kernel[lambda given: (triton.cdiv(700, given["BLOCK"]),)](x.npu(), y.npu(), out, 700)
    assert torch.equal(out.cpu(), x + y)


def test_views_and_strides_of_a_storage():
    whole = values(1000).npu()
    out = torch.zeros(1000, device="npu")
    kernels.add[(1,)](whole[100:], whole[200:], out[300:], 50, BLOCK=64)
    expected = torch.zeros(1000)
    expected[300:350] = (whole[100:150] + whole[200:250]).cpu()
    assert torch.equal(out.cpu(), expected)


def test_order_with_operators_of_the_stream():
    x, n = torch.ones(1 << 16, device="npu"), 1 << 16
    for _ in range(20):
        x = x * 2
        kernels.add[(64,)](x, x, x, n, BLOCK=1024)
        x = x / 4
    assert x.cpu().eq(1).all()


def test_launches_of_a_stream_wait_for_an_event():
    x = torch.zeros(1 << 16, device="npu")
    side = torch.npu.Stream()
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        kernels.add[(64,)](x.add_(1), x, x, 1 << 16, BLOCK=1024)
    torch.npu.current_stream().wait_stream(side)
    assert (x + 1).cpu().eq(3).all()


def test_graph_with_a_kernel():
    x, y = values(200).npu(), values(200).npu()
    out = torch.zeros(200, device="npu")
    kernels.add[(2,)](x, y, out, 200, BLOCK=128)
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        kernels.add[(2,)](x * 2, y, out, 200, BLOCK=128)
    x.fill_(3)
    out.zero_()
    graph.replay()
    assert torch.equal(out.cpu(), 6 + y.cpu())


def test_grid_beyond_the_limit():
    x = torch.zeros(16, device="npu")
    with pytest.raises(RuntimeError, match="grid should be less than 65536"):
        kernels.add[(65536,)](x, x, x, 16, BLOCK=16)


def test_grid_beyond_the_limit_by_choice(monkeypatch):
    monkeypatch.setenv("TRITON_ALL_BLOCKS_PARALLEL", "1")
    x = torch.ones(70000, device="npu")
    kernels.add[(70000,)](x, x, x, 70000, BLOCK=1)
    assert x.cpu().eq(2).all()


def test_tensor_of_the_host():
    x = torch.zeros(16, device="npu")
    with pytest.raises(ValueError, match=r"argument y is on cpu; supported: npu; fix: y\.npu\(\)"):
        kernels.add[(1,)](x, x.cpu(), x, 16, BLOCK=16)


def test_device_properties_are_the_chip():
    properties = triton.runtime.driver.active.utils.get_device_properties(0)
    assert (properties["num_aicore"], properties["num_vectorcore"]) == (24, 48)
    assert triton.runtime.driver.active.get_current_target().arch == "Ascend910B1"


ERRORS = """
import sys
import torch, torch_npu
sys.path.insert(0, sys.argv[1])
import triton_kernels as kernels
x, y = torch.zeros(1000).npu(), torch.zeros(1000).npu()
{body}
torch.npu.synchronize()
print("computed")
"""
READ = "kernels.add_without_mask[(8,)](x, y, torch.zeros(1024).npu(), BLOCK=128)"
WRITE = (
    "kernels.add_without_mask[(8,)](torch.zeros(1024).npu(), torch.zeros(1024).npu(), y, BLOCK=128)"
)
INDEX = "kernels.gather[(1,)](torch.full((8,), 1000).npu(), x, y, 8, BLOCK=8)"
SHORT = "kernels.add[(1,)](x, torch.zeros(3).npu().bfloat16(), y, 8, BLOCK=8)"


def program(body, *options):
    command = (sys.executable, "-m", "ascend_emulator.cli", "run", "--memory", "256MiB", *options)
    text = ERRORS.format(body=body)
    directory = os.path.dirname(__file__)
    return subprocess.run(
        [*command, "--", sys.executable, "-c", text, directory], capture_output=True, text=True
    )


def line_of(text):
    with open(kernels.__file__) as lines:
        return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.parametrize(
    ("body", "does", "line", "where"),
    [
        (READ, "reads 512 bytes", "total = tl.load", "after the end of|across the end of x"),
        (WRITE, "writes 512 bytes", "tl.store(out + at, total)", "across the end of out"),
        (INDEX, "reads 4 bytes", "tl.load(x + chosen", "0 bytes after the end of x"),
        (SHORT, "reads 16 bytes", "inside = at < n", "across the end of y"),
    ],
)
def test_access_outside_of_the_tensors(body, does, line, where):
    done = program(body)
    assert done.returncode
    assert f"{does} at 0x" in done.stderr, done.stderr
    assert re.search(where, done.stderr), done.stderr
    assert "(rule triton.bounds, inferred: " in done.stderr
    number = line_of(line) + (line == "inside = at < n")
    assert f", line {number}, in program (" in done.stderr, done.stderr


def test_allowed_access_within_the_allocation():
    assert "computed" in program(READ, "--allow", "triton.bounds").stdout


def test_dtype_that_the_chip_lacks():
    body = "kernels.add[(1,)](*torch.zeros(3, 8, dtype=torch.bfloat16).npu(), 8, BLOCK=8)"
    done = program(body, "--soc", "Ascend310P3")
    assert (
        "x has the dtype bf16, which Ascend310P3 does not compute (rule triton.dtype" in done.stderr
    )


def test_programs_of_a_grid_have_a_random_order_with_the_adversary():
    body = """out = torch.zeros(1, dtype=torch.int32, device="npu")
for _ in range(5):
    kernels.last_writer[(100,)](out)
    print(out.item(), end=" ")
"""
    assert program(body).stdout.split() == [*["99"] * 5, "computed"]
    first, second, third = (program(body, "--adversary", seed).stdout for seed in "112")
    assert first == second != third
    assert "99 99 99" not in first
