# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Matmuls in formats of eight and four bits, against dequantized float64;
test_ascend950.py runs these tests on that chip."""

import narrow_formats as formats
import pytest
import torch
import torch_npu

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NUMBERS = {"e2m1": formats.E2M1, "e1m2": formats.E1M2, "hif8": formats.HIF8}
OUTPUTS = [torch.bfloat16, torch.float16, torch.float32]


def codes_of(kind, *sizes):
    """Random finite values as codes, a byte for each or for two."""
    known = formats.table(kind)
    small = [code for code, value in known.items() if abs(value) <= 8]
    return torch.tensor(small)[torch.randint(len(small), sizes)].to(torch.uint8)


def matrix(kind, *sizes):
    """A tensor as torch_npu takes it, and its values in float64."""
    codes = codes_of(kind, *sizes)
    if kind in ("e2m1", "e1m2"):
        given = formats.packed(codes)
        return given, formats.values_of(given, kind)
    return codes.view(TYPES.get(kind, torch.uint8)), formats.values_of(codes, kind)


def numbers(left, right):
    """The dtypes that torch_npu is told of in numbers."""
    given = {"x1_dtype": NUMBERS.get(left), "x2_dtype": NUMBERS.get(right)}
    return {name: number for name, number in given.items() if number}


def exponents(*sizes):
    """Random shared exponents: codes, and their values in float64."""
    codes = torch.randint(118, 132, sizes).to(torch.uint8)
    return codes, 2.0 ** (codes.double() - 127)


def spread(factors, times, size, dim):
    return factors.repeat_interleave(times, dim).narrow(dim, 0, size)


def close(actual, expected):
    bound = max(torch.finfo(actual.dtype).eps, 1e-5)
    error = (actual.cpu().double() - expected).abs()
    assert float((error - bound * expected.abs()).max()) <= 1e-5 * float(expected.abs().max())


def mx_matrices(left, right, m, k, n):
    """Arguments of a matmul with shared exponents, and its result in float64."""
    (x, a), (w, b) = matrix(left, m, k), matrix(right, n, k)
    pairs = -(-k // 64)
    (x_scale, c), (w_scale, d) = exponents(m, pairs, 2), exponents(n, pairs, 2)
    a = a * spread(c.flatten(1), 32, k, 1)
    b = b * spread(d.flatten(1), 32, k, 1)
    return (x, w, x_scale, w_scale), a @ b.t()


def mx_product(x, w, x_scale, w_scale, kinds, **options):
    """With the weight and its exponents as views of ``[n, k]``."""
    return torch_npu.npu_quant_matmul(
        x.npu(),
        w.npu().t(),
        w_scale.npu().transpose(0, 1),
        pertoken_scale=x_scale.npu(),
        scale_dtype=formats.E8M0,
        pertoken_scale_dtype=formats.E8M0,
        **numbers(*kinds),
        **options,
    )


PAIRS = [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e2m1", "e2m1"), ("e1m2", "e1m2")]


@pytest.mark.parametrize("out", OUTPUTS, ids=str)
@pytest.mark.parametrize(
    ("kinds", "k"),
    [
        *((kinds, k) for kinds in PAIRS for k in (64, 128, 480)),
        *((("e4m3", "e2m1"), k) for k in (64, 128)),
    ],
    ids=str,
)
def test_shared_exponents(kinds, k, out):
    arguments, expected = mx_matrices(*kinds, 9, k, 20)
    close(mx_product(*arguments, kinds, output_dtype=out), expected)


@pytest.mark.parametrize("group_sizes", [None, [1, 1, 32]])
def test_shared_exponents_with_bias(group_sizes):
    kinds = ("e4m3", "e4m3")
    arguments, expected = mx_matrices(*kinds, 9, 96, 20)
    bias = torch.randn(20)
    actual = mx_product(
        *arguments, kinds, bias=bias.npu(), output_dtype=torch.float32, group_sizes=group_sizes
    )
    close(actual, expected + bias)


def test_shared_exponents_of_a_weight_that_is_not_a_view():
    (x, a), (w, b) = matrix("e4m3", 5, 96), matrix("e4m3", 96, 24)
    (x_scale, c), (w_scale, d) = exponents(5, 2, 2), exponents(2, 24, 2)
    actual = torch_npu.npu_quant_matmul(
        x.npu(),
        w.npu(),
        w_scale.npu(),
        pertoken_scale=x_scale.npu(),
        scale_dtype=formats.E8M0,
        pertoken_scale_dtype=formats.E8M0,
        output_dtype=torch.float32,
    )
    d = d.permute(0, 2, 1).flatten(0, 1)  # They are [pairs, n, 2], in the order of groups.
    close(actual, (a * spread(c.flatten(1), 32, 96, 1)) @ (b * spread(d, 32, 96, 0)))


def test_quantized_activations_times_quantized_weights():
    """As a linear layer calls it."""
    x, w = torch.randn(6, 200).bfloat16(), torch.randn(24, 200).bfloat16()
    kind = {"dst_type": torch.float8_e4m3fn}
    (y, y_scale), (v, v_scale) = (torch_npu.npu_dynamic_mx_quant(t.npu(), **kind) for t in (x, w))
    actual = torch_npu.npu_quant_matmul(
        y,
        v.t(),
        v_scale.transpose(0, 1),
        pertoken_scale=y_scale,
        scale_dtype=formats.E8M0,
        pertoken_scale_dtype=formats.E8M0,
        output_dtype=torch.bfloat16,
    )
    wide = []
    for each in (x, w):
        values, codes = formats.quantized(each, "e4m3", 0)
        wide.append(values * spread(2.0 ** (codes.double() - 127), 32, 200, 1))
    close(actual, wide[0] @ wide[1].t())
    assert (actual.cpu().double() - x.double() @ w.double().t()).abs().max() < 4


@pytest.mark.parametrize("out", OUTPUTS, ids=str)
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize(
    "kinds", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e5m2"), ("hif8", "hif8")], ids="-".join
)
@pytest.mark.parametrize(("rows", "columns"), [(7, 24), (1, 24), (7, 1), (1, 1), (None, 24)])
def test_scales_of_rows_and_columns(kinds, rows, columns, view, out):
    """Of all, of each row and of each column."""
    (x, a), (w, b) = matrix(kinds[0], 7, 40), matrix(kinds[1], 24, 40)
    scale, row_scale = torch.rand(columns), torch.rand(rows) if rows else None
    right = w.npu().t() if view else w.t().contiguous().npu()
    actual = torch_npu.npu_quant_matmul(
        x.npu(),
        right,
        scale.npu(),
        pertoken_scale=None if row_scale is None else row_scale.npu(),
        output_dtype=out,
        **numbers(*kinds),
    )
    if row_scale is None:  # torch_npu's 64-bit scale has 19 bits of the number.
        scale = ((scale.view(torch.int32) >> 13) << 13).view(torch.float32)
    expected = (a @ b.t()) * scale.double()
    close(actual, expected if row_scale is None else expected * row_scale.double()[:, None])


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("sizes", [(130, 200, 260), (5, 256, 128), (3, 100, 60)])
def test_scales_of_blocks(sizes, rows):
    m, k, n = sizes
    (x, a), (w, b) = matrix("e4m3", m, k), matrix("e4m3", n, k)
    x_scale, w_scale = (
        torch.rand(-(-m // rows), -(-k // 128)),
        torch.rand(-(-n // 128), -(-k // 128)),
    )
    actual = torch_npu.npu_quant_matmul(
        x.npu(),
        w.npu().t(),
        w_scale.npu().t(),
        pertoken_scale=x_scale.npu(),
        output_dtype=torch.float32,
        group_sizes=[rows, 128, 128],
    )
    c = spread(spread(x_scale.double(), rows, m, 0), 128, k, 1)
    d = spread(spread(w_scale.double(), 128, n, 0), 128, k, 1)
    close(actual, (a * c) @ (b * d).t())


def test_each_value_of_a_format_is_multiplied():
    """By one, also infinity and NaN; e8m0 as a scale of one."""
    for kind in ("e4m3", "e5m2", "hif8", "e8m0"):
        codes = torch.arange(256).to(torch.uint8)
        x = torch.zeros(256, 32, dtype=torch.uint8)
        one = next(code for code, value in formats.table("e4m3").items() if value == 1)
        w = torch.zeros(32, 1, dtype=torch.uint8).fill_(one)
        x[:, 0] = one if kind == "e8m0" else codes
        scales = torch.full((256, 1, 2), 127, dtype=torch.uint8)
        if kind == "e8m0":
            scales[:, 0, 0] = codes
        dtype = TYPES.get(kind, torch.float8_e4m3fn)
        if kind == "hif8":
            one = next(code for code, value in formats.table(kind).items() if value == 1)
            given = {"x1_dtype": formats.HIF8, "x2_dtype": formats.HIF8}
            actual = torch_npu.npu_quant_matmul(
                x.npu(),
                w.fill_(one).npu(),
                torch.ones(1).npu(),
                pertoken_scale=torch.ones(256).npu(),
                output_dtype=torch.float32,
                **given,
            )
        else:
            actual = torch_npu.npu_quant_matmul(
                x.view(dtype).npu(),
                w.view(torch.float8_e4m3fn).npu(),
                torch.full((1, 1, 2), 127, dtype=torch.uint8).npu(),
                pertoken_scale=scales.npu(),
                scale_dtype=formats.E8M0,
                pertoken_scale_dtype=formats.E8M0,
                output_dtype=torch.float32,
            )
        expected = torch.tensor([formats.table(kind)[code] for code in range(256)])
        torch.testing.assert_close(
            actual.cpu()[:, 0], expected.float(), atol=0, rtol=0, equal_nan=True
        )


def test_grouped_products_with_shared_exponents():
    for kind in ("e4m3", "e2m1"):
        m, k, n, counts = 12, 128, 24, [5, 0, 4]
        (x, a), (w, b) = matrix(kind, m, k), matrix(kind, 3, n, k)
        (x_scale, c), (w_scale, d) = exponents(m, 2, 2), exponents(3, n, 2, 2)
        given = {name: NUMBERS[kind] for name in ("x_dtype", "weight_dtype") if kind in NUMBERS}
        (actual,) = torch_npu.npu_grouped_matmul(
            [x.npu()],
            [w.npu().transpose(1, 2)],
            scale=[w_scale.npu().transpose(1, 2)],
            per_token_scale=[x_scale.npu()],
            group_list=torch.tensor(counts).npu(),
            split_item=3,
            group_type=0,
            group_list_type=1,
            output_dtype=torch.bfloat16,
            scale_dtype=formats.E8M0,
            per_token_scale_dtype=formats.E8M0,
            **given,
        )
        a, b = a * spread(c.flatten(1), 32, k, 1), b * spread(d.flatten(2), 32, k, 2)
        close(actual[:5], a[:5] @ b[0].t())
        close(actual[5:9], a[5:9] @ b[2].t())


@pytest.mark.parametrize("blocks", [False, True])
def test_grouped_products_with_scales_in_float32(blocks):
    m, k, n = 9, 200, 24
    (x, a), (w, b) = matrix("e4m3", m, k), matrix("e4m3", 2, n, k)
    row, column = (
        torch.rand(m, 2 if blocks else 1),
        torch.rand(2, 1, 2) if blocks else torch.rand(2, n),
    )
    (actual,) = torch_npu.npu_grouped_matmul(
        [x.npu()],
        [w.npu().transpose(1, 2)],
        scale=[column.npu().transpose(1, 2) if blocks else column.npu()],
        per_token_scale=[row.npu() if blocks else row[:, 0].npu()],
        group_list=torch.tensor([4, 9]).npu(),
        split_item=3,
        group_type=0,
        group_list_type=0,
        output_dtype=torch.bfloat16,
    )
    left = a * spread(row.double(), 128 if blocks else k, k, 1)
    for group, rows in enumerate((slice(0, 4), slice(4, 9))):
        each = column[group].double()
        right = (
            b[group] * spread(spread(each, 128, n, 0), 128, k, 1)
            if blocks
            else b[group] * each[:, None]
        )
        close(actual[rows], left[rows] @ right.t())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rowwise", [False, True])
def test_scaled_mm_of_pytorch(rowwise, bias):
    """Its results are those of the CPU's kernel for scales of the whole matrices."""
    x, w = (torch.rand(n, 64).to(torch.float8_e4m3fn) for n in (7, 16))
    scales = (torch.rand(7, 1), torch.rand(1, 16)) if rowwise else (torch.rand(1), torch.rand(1))
    add = torch.randn(16).bfloat16() if bias else None
    actual = torch._scaled_mm(
        x.npu(),
        w.npu().t(),
        *(scale.npu() for scale in scales),
        bias=None if add is None else add.npu(),
        out_dtype=torch.bfloat16,
    )
    expected = (x.double() @ w.double().t()) * scales[0].double() * scales[1].double()
    close(actual, expected if add is None else expected + add.double())


def test_scaled_grouped_mm_of_pytorch():
    x, w = (
        torch.rand(256, 64).to(torch.float8_e4m3fn),
        torch.rand(4, 64, 32).to(torch.float8_e4m3fn),
    )
    row, column = torch.rand(256), torch.rand(4, 32)
    ends = torch.tensor([64, 100, 192, 256], dtype=torch.int32)
    actual = torch._scaled_grouped_mm(
        x.npu(), w.npu(), row.npu(), column.npu(), ends.npu(), None, None, torch.bfloat16, False
    )
    first = 0
    for group, last in enumerate(ends.tolist()):
        expected = (x[first:last].double() @ w[group].double()) * column[group].double()
        close(actual[first:last], expected * row[first:last].double()[:, None])
        first = last


def refuse(rule, left, right, scale, row_scale, **options):
    with pytest.raises(RuntimeError, match=rf"\(rule {rule}, "):
        torch_npu.npu_quant_matmul(
            left.npu(),
            right.npu(),
            scale.npu(),
            pertoken_scale=row_scale if row_scale is None else row_scale.npu(),
            output_dtype=torch.float32,
            **options,
        )


def test_limits_of_products():
    x, w = matrix("e4m3", 7, 64)[0], matrix("e4m3", 64, 16)[0]
    bytes_of = x.view(torch.uint8), w.view(torch.uint8)
    ones, rows = torch.ones(16), torch.ones(7)
    coded = {"scale_dtype": formats.E8M0, "pertoken_scale_dtype": formats.E8M0}
    one, many = torch.ones(1, 16, 2).byte(), torch.ones(7, 1, 2).byte()
    four, hif8 = (
        {"x1_dtype": NUMBERS[kind], "x2_dtype": NUMBERS[kind]} for kind in ("e2m1", "hif8")
    )
    refuse("float_product.columns", x, matrix("e4m3", 32, 16)[0], ones, rows)
    refuse("float_product.scale-sizes", x, w, torch.ones(5), rows)
    refuse("float_product.scale-sizes", x, w, ones, torch.ones(5))
    refuse("float_product.formats", x, bytes_of[1], ones, rows, x2_dtype=formats.HIF8)
    refuse("float_product.exponent-sizes", x, w, one[:, :8], many, **coded)
    refuse("float_product.exponent-sizes", x, w, one, many[:5], **coded)
    refuse("float_product.scales-alike", x, w, one, rows, scale_dtype=formats.E8M0)
    refuse("float_product.hif8-scales", *bytes_of, one, many, **coded, **hif8)
    refuse(
        "float_product.exponents-needed",
        bytes_of[0],
        bytes_of[1].t().contiguous().t(),
        ones,
        rows,
        **four,
    )
    refuse("float_product.block-sizes", x, w, torch.ones(2, 2), torch.ones(7, 1))
    wide = matrix("e4m3", 7, 200)[0], matrix("e4m3", 200, 16)[0]
    refuse("float_product.block-bias", *wide, torch.ones(2, 1), torch.ones(7, 2), bias=ones.npu())
    refuse("quant_matmul.dtypes-950", x.float(), w, ones, rows)
    narrow = matrix("e2m1", 16, 32)[0].npu().t()
    column = torch.ones(16, 1, 2).byte().npu().transpose(0, 1)
    given = coded | {"x2_dtype": formats.E2M1}
    refuse("float_product.mixed-columns", matrix("e4m3", 7, 32)[0], narrow, column, many, **given)


def test_what_is_not_emulated_is_named():
    packed = torch.zeros(4, 64, dtype=torch.uint8).npu()
    coded = {"scale_dtype": formats.E8M0, "pertoken_scale_dtype": formats.E8M0}
    scales = torch.ones(3, 2, 2).byte()
    with pytest.raises(RuntimeError, match="at offset 64 of its storage is not emulated"):
        torch_npu.npu_quant_matmul(
            packed[1:],
            packed[1:].t(),
            scales.npu().transpose(0, 1),
            pertoken_scale=scales.npu(),
            output_dtype=torch.float32,
            **coded,
            **numbers("e2m1", "e2m1"),
        )


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", OUTPUTS[:2], ids=str)
def test_batches_behind_rows_with_shared_exponents(dtype, turned):
    torch.manual_seed(0)
    m, batches, k, n = 5, 3, 128, 48
    (x, a), (w, b) = matrix("e4m3", m, batches, k), matrix("e4m3", batches, n, k)
    (x_scale, c), (w_scale, d) = exponents(m, batches, 2, 2), exponents(batches, n, 2, 2)
    a, b = a * spread(c.flatten(2), 32, k, 2), b * spread(d.flatten(2), 32, k, 2)
    e8m0 = torch.float8_e8m0fnu
    if not turned:
        w, w_scale = w.transpose(1, 2).contiguous(), w_scale.transpose(1, 2).contiguous()
    y = torch_npu.npu_transpose_quant_batchmatmul(
        x.npu(),
        w.npu(),
        dtype=dtype,
        x1_scale=x_scale.view(e8m0).npu(),
        x2_scale=w_scale.view(e8m0).npu(),
        group_sizes=[0, 0, 32],
        perm_x1=[1, 0, 2],
        perm_x2=[0, 2, 1] if turned else [0, 1, 2],
        perm_y=[1, 0, 2],
    )
    close(y, torch.einsum("mbk,bnk->mbn", a, b))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "hif8"])
def test_batches_behind_rows_with_scales(kind):
    torch.manual_seed(0)
    k, n = (64, 48) if kind == "hif8" else (512, 128)
    (x, a), (w, b) = matrix(kind, 5, 3, k), matrix(kind, 3, k, n)
    x_scale, w_scale = torch.rand(1 if kind == "hif8" else 5), torch.rand(n)
    y = torch_npu.npu_transpose_quant_batchmatmul(
        x.npu(),
        w.npu(),
        dtype=torch.bfloat16,
        x1_scale=x_scale.npu(),
        x2_scale=w_scale.npu(),
        **numbers(kind, kind),
    )
    expected = torch.einsum("mbk,bkn->mbn", a, b) * w_scale.double()
    close(y, expected * x_scale.double()[:, None, None])


def test_limits_of_batches_behind_rows():
    x, w = torch.ones(5, 3, 64).to(TYPES["e4m3"]).npu(), torch.ones(3, 64, 16).to(TYPES["e4m3"])
    for rule, options in (
        ("float8", {"x1_scale": torch.ones(5).npu(), "x2_scale": torch.ones(16).npu()}),
        ("scales", {"x1_scale": torch.ones(5).npu()}),
        ("permutations", {"perm_y": [0, 1, 2]}),
    ):
        with pytest.raises(RuntimeError, match=f"rule transpose_quant_matmul.{rule}, documented"):
            torch_npu.npu_transpose_quant_batchmatmul(x, w.npu(), dtype=torch.float16, **options)
