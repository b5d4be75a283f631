# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Matrix products."""

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch_npu
from torch.nn import functional as F

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# Shapes of operands, and the result. Values are small whole numbers, so that sums are exact in
# float32 and results rounded once.
PRODUCTS = {
    "mm": ([(5, 16), (16, 7)], torch.mm),
    "mm of transposed": ([(5, 16), (7, 16)], lambda a, b: a @ b.t()),
    "mm with both transposed": ([(16, 5), (7, 16)], lambda a, b: torch.mm(a.t(), b.t())),
    "mm of one row": ([(1, 64), (96, 64)], lambda a, b: a @ b.t()),
    "mm of few rows": ([(8, 256), (512, 256)], lambda a, b: a @ b.t()),
    "mm of nothing": ([(0, 16), (16, 7)], torch.mm),
    "mm over nothing": ([(5, 0), (0, 7)], torch.mm),
    "mm over nothing, transposed": ([(5, 0), (7, 0)], lambda a, b: a @ b.t()),
    "mm of nothing, transposed": ([(5, 16), (0, 16)], lambda a, b: a @ b.t()),
    "matmul": ([(3, 5, 16), (16, 7)], torch.matmul),
    "matmul of vectors": ([(16,), (16,)], torch.matmul),
    "matmul with a vector": ([(3, 5, 16), (16,)], torch.matmul),
    "matmul, broadcast": ([(3, 1, 5, 16), (4, 16, 7)], torch.matmul),
    "matmul of four dimensions": (
        [(2, 3, 5, 16), (2, 3, 7, 16)],
        lambda a, b: a @ b.transpose(-1, -2),
    ),
    "bmm": ([(3, 5, 16), (3, 16, 7)], torch.bmm),
    "bmm, broadcast": ([(1, 5, 16), (3, 16, 7)], torch.matmul),
    "bmm of transposed": (
        [(3, 16, 5), (3, 7, 16)],
        lambda a, b: torch.bmm(a.transpose(1, 2), b.transpose(1, 2)),
    ),
    "mv": ([(5, 16), (16,)], torch.mv),
    "dot": ([(16,), (16,)], torch.dot),
    "vdot": ([(16,), (16,)], torch.vdot),
    "outer": ([(5,), (7,)], torch.outer),
    "linear of a slice": ([(5, 40), (7, 16)], lambda a, b: F.linear(a[:, 8:24], b)),
    "linear with rows of a wider weight": (
        [(5, 16), (96, 40)],
        lambda a, b: F.linear(a, b[:, 8:24]),
    ),
    "linear with bias of one row": ([(1, 64), (96, 64), (96,)], F.linear),
    "linear": ([(3, 16), (7, 16)], F.linear),
    "linear of three dimensions": ([(2, 3, 16), (7, 16)], F.linear),
    "linear with bias": ([(3, 16), (7, 16), (7,)], F.linear),
    "linear of three dimensions with bias": ([(2, 3, 16), (7, 16), (7,)], F.linear),
    "addmm": ([(5, 7), (5, 16), (16, 7)], lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=3)),
    "addmm in place": ([(5, 7), (5, 16), (16, 7)], lambda c, a, b: c.addmm_(a, b, beta=2, alpha=3)),
    "addmm of a bias": ([(7,), (5, 16), (16, 7)], torch.addmm),
    "addmm of a bias, few rows": ([(96,), (8, 256), (256, 96)], torch.addmm),
    "addbmm": (
        [(5, 7), (3, 5, 16), (3, 16, 7)],
        lambda c, a, b: torch.addbmm(c, a, b, beta=2, alpha=3),
    ),
    "baddbmm": (
        [(3, 5, 7), (3, 5, 16), (3, 16, 7)],
        lambda c, a, b: torch.baddbmm(c, a, b, beta=2, alpha=3),
    ),
    "baddbmm in place": (
        [(3, 5, 7), (3, 5, 16), (3, 16, 7)],
        lambda c, a, b: c.baddbmm_(a, b, beta=2, alpha=3),
    ),
    "baddbmm in place, broadcast": (
        [(1, 1, 7), (3, 5, 16), (3, 16, 7)],
        lambda c, a, b: torch.baddbmm(c, a, b),
    ),
    "addmv": ([(5,), (5, 16), (16,)], lambda c, a, b: torch.addmv(c, a, b, beta=2, alpha=3)),
    "addr": ([(5, 7), (5,), (7,)], lambda c, a, b: torch.addr(c, a, b, beta=2, alpha=3)),
    "einsum": ([(2, 5, 3, 16), (2, 7, 3, 16)], lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b)),
}


def whole(shape, dtype):
    return torch.randint(-3, 4, shape).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_product(agree, name, dtype):
    shapes, function = PRODUCTS[name]
    agree(function, *(whole(shape, dtype) for shape in shapes), ulps=1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_strided_operands_and_output(agree, dtype):
    def call(a, b):
        out = torch.zeros(6, 18, dtype=dtype if a.dtype == dtype else a.dtype, device=a.device)
        torch.mm(a, b, out=out[:, ::2])
        return out

    agree(call, whole((6, 20), dtype)[:, ::2], whole((10, 18), dtype)[:, 1::2], ulps=1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_long_sums_of_fractions(agree, rows, dtype):
    """Sums are taken in float32: the error does not grow with the length in a narrow type."""
    a, b = torch.randn(rows, 1024, dtype=dtype), torch.randn(96, 1024, dtype=dtype)
    agree(lambda a, b: (a @ b.t()) / 32, a, b, ulps=3 if dtype != torch.float32 else 16)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shapes", [[(5,), (5, 6)], [(3, 4), (4,)], [(2, 3, 4), (4,)]], ids=str)
def test_gradients_of_products_with_vectors(agree_backward, shapes, dtype):
    agree_backward(torch.matmul, *(torch.randint(-3, 4, shape).to(dtype) for shape in shapes))


def products(a, b, c, vector):
    return (
        a @ b,
        torch.addmm(c, a, b),
        torch.mv(a, vector),
        torch.addmv(c[:, 0].contiguous(), a, vector),
        torch.bmm(a[None], b[None]),
        torch.baddbmm(c[None], a[None], b[None]),
        torch.addbmm(c, a[None], b[None]),
        c.clone().addmm_(a, b),
    )


def hf32(x):
    """Rounded to 11 bits of mantissa, ties to even, in float64 (CANN's documentation of
    ENABLE_HF32_EXECUTION)."""
    fraction, exponent = torch.frexp(x.double())
    return torch.ldexp((fraction * 2**12).round(), exponent - 12)


def test_float32_is_multiplied_in_hf32_where_it_is_allowed():
    a, b, c, vector = torch.randn(5, 64), torch.randn(64, 7), torch.randn(5, 7), torch.randn(64)
    given = [x.npu() for x in (a, b, c, vector)]
    exact = products(*(x.double() for x in (a, b, c, vector)))
    torch.npu.matmul.allow_hf32 = True
    rounded = products(*given)
    torch.npu.matmul.allow_hf32 = False  # the default
    for ours, plain, wide, narrow in zip(
        rounded,
        products(*given),
        exact,
        products(hf32(a), hf32(b), c.double(), hf32(vector)),
        strict=True,
    ):
        torch.testing.assert_close(plain.cpu().double(), wide, atol=2e-5, rtol=0)
        torch.testing.assert_close(ours.cpu().double(), narrow, atol=2e-5, rtol=0)
        assert (ours.cpu() - wide).abs().max() > 2e-4


def test_cube_math_type():
    a, b = torch.tensor([[70000.0, 1 + 2**-11]]).npu(), torch.eye(2).npu()
    kinds = torch_npu.npu.CubeMathType
    # 1 + 2**-11 is a tie in float16, and exact in HF32.
    expected = {
        kinds.KEEP_DTYPE: [70000, 1 + 2**-11],
        kinds.USE_FP16: [torch.inf, 1],
        kinds.USE_HF32: [70016, 1 + 2**-11],
    }
    for kind, values in expected.items():
        torch.npu.matmul.cube_math_type = kind
        ours = a[:, :1] @ b[:1, :1], a[:, 1:] @ b[1:, 1:]
        torch_npu._C._npu_setOption({"CUBE_MATH_TYPE": ""})
        assert [x.item() for x in ours] == values


ON_310P = """
    import torch, torch_npu
    torch_npu.npu.set_compile_mode(jit_compile=False)
    a, b = torch.randn(5, 64), torch.randn(64, 7)
    def close(ours, theirs):
        torch.testing.assert_close(ours.cpu(), theirs, atol=2e-5, rtol=1e-5)
    close(a.npu() @ b.npu(), a.half().float() @ b.half().float())
    assert (torch.tensor([[70000.0]]).npu() @ torch.ones(1, 1).npu()).item() == torch.inf
    torch.npu.matmul.cube_math_type = torch_npu.npu.CubeMathType.KEEP_DTYPE
    print(a.npu() @ b.npu())
"""


def test_on_310p_float32_is_multiplied_in_float16(run):
    done = run("run", "--soc", "Ascend310P3", "--", sys.executable, "-c", textwrap.dedent(ON_310P))
    assert "AssertionError" not in done.stderr
    assert (
        "aclnnMatmul: cubeMathType is 0 for float32; Ascend310P3 has no float32 matmuls,"
        " so it must be 1 or 2" in done.stderr
    )


# Rows in place up to 8 and 64, packed above, six in a tile; 96 or 64 columns in a block, 32 values
# in a step.
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 64, 65, 71, 130])
@pytest.mark.parametrize(
    ("width", "columns"), [(1, 1), (31, 63), (32, 64), (33, 97), (256, 200), (2305, 129)]
)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("biased", [False, True])
def test_edges_of_bfloat16_blocks(agree, rows, width, columns, transposed, biased):
    a, b, bias = (
        torch.randn(size).bfloat16() / width**0.25
        for size in ((rows, width), (columns, width), (columns,))
    )
    b = b if transposed else b.t().contiguous()
    agree(
        lambda a, b, c: (
            torch.addmm(c, a, b.t() if transposed else b)
            if biased
            else a @ (b.t() if transposed else b)
        ),
        a,
        b,
        bias,
        ulps=2,
    )


def test_bfloat16_products_in_parts_of_larger_tensors(agree):
    a, b, out = (
        torch.randn(70, 200).bfloat16(),
        torch.randn(150, 300).bfloat16(),
        torch.ones(70, 400).bfloat16(),
    )

    def call(a, b, out):
        torch.mm(a[:, 7:104], b[10:110, 50:147].t(), out=out[:, 200:300])
        torch.mm(a[:5, 7:104], b[10:110, 50:147].t(), out=out[:5, :100])
        return out

    agree(lambda a, b, out: call(a / 8, b, out), a, b, out, ulps=2)


@pytest.mark.parametrize("limit", ["ATEN_CPU_CAPABILITY=avx2", "ONEDNN_MAX_CPU_ISA=AVX512_CORE"])
def test_processors_without_bfloat16_instructions(limit):
    """The same matmuls and attention by vectors of the compiler."""
    name, value = limit.split("=")
    files = [__file__, Path(__file__).parent / "test_bf16_attention.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *files, "-k", "edges or parts or fractions or odd"],
        env=os.environ | {name: value},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:]


PROMOTED = {
    "mm": lambda a, b: torch.mm(a, b),
    "matmul": lambda a, b: a[None, None] @ b[None],
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "vector": lambda a, b: a[0] @ b,
    "mv": lambda a, b: torch.mv(a, b[0]),
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "addmm of others": lambda a, b: torch.addmm(a, b, b, beta=0.5, alpha=2),
    "addmm_": lambda a, b: a.clone().addmm_(b, a),
    "addmv": lambda a, b: torch.addmv(a[0], a, b[0]),
    "baddbmm": lambda a, b: torch.baddbmm(a[None], a[None], b[None]),
    "addbmm": lambda a, b: torch.addbmm(a, a[None], b[None]),
    "linear": lambda a, b: F.linear(a, b, a[0]),
}
MIXED = list(itertools.permutations(FLOATS, 2))


@pytest.mark.parametrize("name", PROMOTED)
@pytest.mark.parametrize(("dtype", "other"), MIXED, ids=str)
def test_matrices_of_two_dtypes_are_promoted(name, dtype, other):
    """The result has the dtype that op-plugin gives it: that of the first, except for two."""
    call, (a, b) = PROMOTED[name], (torch.randn(16, 16).to(each) for each in (dtype, other))
    actual = call(a.npu(), b.npu())
    assert actual.dtype == {"addmv": torch.float32, "mv": other}.get(name, dtype)
    expected = call(a.double(), b.double())
    bound = 4 * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=bound, atol=4 * bound)


@pytest.mark.parametrize("shapes", [[(1, 7, 10), (5, 10, 15)], [(8, 75, 16), (16, 43)]], ids=str)
@pytest.mark.parametrize(("dtype", "other"), MIXED, ids=str)
def test_gradients_of_matrices_of_two_dtypes(shapes, dtype, other):
    """As op-plugin's test_matmul.py, test_matmul_backward_shape_diff_input_types."""
    given = [
        torch.randn(shape).to(each) for shape, each in zip(shapes, (dtype, other), strict=True)
    ]
    ours, wide = (
        [each.requires_grad_() for each in leaves]
        for leaves in ([each.npu() for each in given], [each.double() for each in given])
    )
    for a, b in (ours, wide):
        (a @ b).sum().backward()
    for each, expected in zip(ours, wide, strict=True):
        assert each.grad.dtype == each.dtype
        error = (each.grad.cpu().double() - expected.grad).abs().max() / expected.grad.abs().max()
        assert error < 2e-2


def test_matmuls_of_two_dtypes_keep_limits_of_cubes_and_outputs():
    half, single = torch.ones(4, 4, dtype=torch.half).npu(), torch.ones(4, 4).npu()
    with pytest.raises(RuntimeError, match=r"rule batch_matmul\.out-dtype"):
        torch.bmm(half[None], single[None], out_dtype=torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.dot(half[0], single[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_product_of_16_bits_can_be_of_float32(dtype):
    a, b = torch.randn(5, 4096).to(dtype), torch.randn(7, 4096).to(dtype)
    result = torch.mm(a.npu(), b.npu().t(), out_dtype=torch.float32).cpu()
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), a.double() @ b.double().t(), rtol=1e-5, atol=1e-3)
    with pytest.raises(RuntimeError, match=r"rule batch_matmul\.out-dtype"):
        torch.bmm(a[None].npu(), b.t()[None].npu(), out_dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sum_over_a_batch_is_rounded_once(dtype):
    c, a, b = torch.zeros(8, 8), torch.randn(64, 8, 64), torch.randn(64, 64, 8)
    c, a, b = (each.to(dtype) for each in (c, a, b))
    exact = torch.addbmm(c.double(), a.double(), b.double())
    actual = torch.addbmm(c.npu(), a.npu(), b.npu()).cpu()
    assert (actual.double() - exact).abs().max() <= 0.51 * torch.finfo(
        dtype
    ).eps * exact.abs().max()
