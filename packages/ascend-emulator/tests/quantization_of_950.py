# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantization to formats of eight and four bits, against float64; test_ascend950.py runs these
tests on that chip."""

import narrow_formats as formats
import pytest
import torch
import torch_npu
from cann_calls import DTYPES, Calls

TYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": formats.E2M1,
    "e1m2": formats.E1M2,
    "hif8": formats.HIF8,
}
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
CASES = [*formats.cases()]


def same(actual, expected):
    torch.testing.assert_close(actual.double(), expected.double(), atol=0, rtol=0)


def random_groups(rows, columns, dtype, axis=-1):
    """Rows of 32 values whose magnitudes differ by many binades, zeros and single values among
    them."""
    torch.manual_seed(0)
    values = torch.randn(rows, columns).to(dtype)
    powers = torch.randint(-12, 12, (rows, -(-columns // formats.GROUP)))
    powers = powers.repeat_interleave(formats.GROUP, -1)[:, :columns]
    values = (values * 2.0**powers).to(dtype)
    values[:: rows // 8] = 0
    values[1 :: rows // 8, 1:] = 0
    values[2 :: rows // 8] = 6  # This is the largest value of e2m1, in each binade of a row.
    return values


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("kind", "rule"), CASES)
def test_mx_quantization_of_10000_groups(kind, rule, dtype):
    x = random_groups(2000, 5 * formats.GROUP, dtype)
    y, scale = torch_npu.npu_dynamic_mx_quant(x.npu(), dst_type=TYPES[kind], scale_alg=rule)
    values, codes = formats.quantized(x, kind, rule)
    assert (scale.shape, scale.dtype) == ((2000, 3, 2), torch.uint8)
    stored = formats.in_groups(scale, -1)
    assert not stored[:, 5].any()  # behind an odd number of groups
    same(stored[:, :5], codes)
    same(formats.values_of(y, kind), values)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [(kind, mode) for kind in ("e2m1", "e1m2") for mode in ("rint", "floor", "round")],
)
def test_roundings_of_four_bits(kind, mode):
    x = torch.arange(-128, 128).float().div(16).reshape(8, 32)
    x[:, 0] = 7.5  # The scale is 1 or 4.
    y, scale = torch_npu.npu_dynamic_mx_quant(x.npu(), dst_type=TYPES[kind], round_mode=mode)
    values, codes = formats.quantized(x, kind, 0, mode)
    same(formats.in_groups(scale, -1)[:, :1], codes)
    same(formats.values_of(y, kind), values)


@pytest.mark.parametrize("bound", [6.0, 6.5, 7.0, 12.0])
def test_another_largest_value_of_e2m1(bound):
    x = random_groups(64, 96, torch.bfloat16)
    y, scale = torch_npu.npu_dynamic_mx_quant(
        x.npu(), dst_type=formats.E2M1, scale_alg=2, dst_type_max=bound
    )
    values, codes = formats.quantized(x, "e2m1", 2, bound=bound)
    same(formats.in_groups(scale, -1)[:, :3], codes)
    same(formats.values_of(y, "e2m1"), values)


def test_least_magnitude_of_a_group():
    x = torch.full((1, 64), 2.0**-20)
    _, scale = torch_npu.npu_dynamic_mx_quant(
        x.npu(), dst_type=torch.float8_e4m3fn, scale_alg=1, max_low_bound=448.0
    )
    assert scale.tolist() == [[[127, 127]]]


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("kind", ["e4m3", "e2m1"])
def test_axes_and_sizes_of_groups(kind, axis, size):
    """Groups of the last one are cut off where the axis ends."""
    x = torch.randn(40, 200, 70).bfloat16()
    y, scale = torch_npu.npu_dynamic_mx_quant(
        x.npu(), axis=axis, dst_type=TYPES[kind], block_size=size
    )
    values, codes = formats.quantized(x.movedim(axis, -1), kind, 0, size=size)
    count = codes.shape[-1]
    assert scale.shape[axis % 3] == (count + 1) // 2
    same(formats.in_groups(scale, axis)[..., :count], codes)
    same(formats.values_of(y, kind).movedim(axis, -1), values)


def test_strided_input():
    x = torch.randn(64, 96).bfloat16()
    y, scale = torch_npu.npu_dynamic_mx_quant(x.npu().t(), dst_type=torch.float8_e4m3fn)
    values, codes = formats.quantized(x.t(), "e4m3", 0)
    same(formats.in_groups(scale, -1), codes)
    same(formats.values_of(y, "e4m3"), values)


@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_groups_with_infinity_or_nan_have_no_scale(special):
    x = torch.ones(1, 96)
    x[0, 40] = special
    _, scale = torch_npu.npu_dynamic_mx_quant(x.npu(), dst_type=torch.float8_e4m3fn)
    assert scale.flatten().tolist() == [119, 255, 119, 0]


def test_both_axes():
    x = torch.randn(3, 70, 96).half()
    first, scale, second, other = torch_npu.npu_dynamic_mx_quant_with_dual_axis(
        x.npu(), dst_type=torch.float8_e5m2
    )
    for axis, y, scales in ((-1, first, scale), (-2, second, other)):
        values, codes = formats.quantized(x.movedim(axis, -1), "e5m2", 0)
        same(formats.in_groups(scales, axis)[..., : codes.shape[-1]], codes)
        same(formats.values_of(y, "e5m2").movedim(axis, -1), values)


def test_groups_of_rows():
    x, ends = torch.randn(200, 6).bfloat16(), torch.tensor([70, 70, 200], dtype=torch.int32)
    y, scale = torch_npu.npu_grouped_dynamic_mx_quant(
        x.npu(), ends.npu(), dst_type=torch.float8_e4m3fn
    )
    assert scale.shape == (200 // 64 + 3, 6, 2)
    for group, (first, last) in enumerate(((0, 70), (70, 70), (70, 200))):
        values, codes = formats.quantized(x[first:last].t(), "e4m3", 0)
        same(formats.values_of(y[first:last], "e4m3"), values.t())
        place, count = first // 64 + group, codes.shape[-1]
        same(formats.in_groups(scale[place : place + (count + 1) // 2], 0)[:, :count], codes)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "e2m1", "e1m2"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_values_of_codes_and_exponents(kind, axis):
    x = torch.randn(80, 96).bfloat16()
    y, scale = torch_npu.npu_dynamic_mx_quant(x.npu(), axis=axis, dst_type=TYPES[kind])
    back = torch_npu.npu_anti_mx_quant(
        y, scale, axis=axis, dst_type=torch.float32, src_type=TYPES[kind]
    )
    values, codes = formats.quantized(x.movedim(axis, -1), kind, 0)
    factors = 2.0 ** (codes.double() - 127).repeat_interleave(32, -1)[..., : values.shape[-1]]
    same(back.cpu().movedim(axis, -1), values * factors)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "hif8"])
@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_dynamic_quantization_of_rows(dtype, kind):
    x, smooth = torch.randn(7, 5, 64).to(dtype), torch.rand(64).to(dtype)
    x[0, 0] = 0
    y, scale = torch_npu.npu_dynamic_quant(
        x.npu(), smooth_scales=smooth.npu(), dst_type=TYPES[kind]
    )
    wide = x.float() * smooth.float()
    step = wide.abs().amax(-1) / float(formats.magnitudes(kind)[-1])
    torch.testing.assert_close(scale.cpu(), step)
    quotient = torch.where(step[..., None] > 0, wide / scale.cpu()[..., None], torch.zeros(()))
    same(formats.values_of(y, kind), formats.rounded(quotient, kind))


@pytest.mark.parametrize(("mode", "dims"), [("perchannel", -2), ("pertensor", None)])
def test_dynamic_quantization_by_columns_and_as_a_whole(mode, dims):
    x = torch.randn(7, 64).half()
    y, scale = torch_npu.npu_dynamic_quant(x.npu(), dst_type=torch.float8_e4m3fn, quant_mode=mode)
    largest = x.abs().max() if dims is None else x.abs().amax(dims)
    torch.testing.assert_close(scale.cpu(), largest.float().reshape(scale.shape) / 448)
    same(formats.values_of(y, "e4m3"), formats.rounded(x.float() / scale.cpu(), "e4m3"))


@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (128, 128)])
@pytest.mark.parametrize("kind", ["e4m3", "hif8", "int8"])
@pytest.mark.parametrize("shape", [(130, 200), (2, 129, 140)])
def test_quantization_of_blocks(shape, kind, rows, columns):
    x = torch.randn(shape).bfloat16()
    x[..., :1, :128] = 0
    y, scale = torch_npu.npu_dynamic_block_quant(
        x.npu(),
        dst_type=1 if kind == "int8" else TYPES[kind],
        row_block_size=rows,
        col_block_size=columns,
        round_mode="round" if kind == "hif8" else "rint",
    )
    top = 127 if kind == "int8" else float(formats.magnitudes(kind)[-1])
    each = scale.cpu().repeat_interleave(rows, -2)[..., : shape[-2], :]
    each = each.repeat_interleave(columns, -1)[..., : shape[-1]]
    for row in range(0, shape[-2], rows):
        for column in range(0, shape[-1], columns):
            block = x[..., row : row + rows, column : column + columns].float().abs()
            stored = scale.cpu()[..., row // rows, column // columns]
            torch.testing.assert_close(stored, block.amax((-2, -1)) / top)
    quotient = torch.where(each > 0, x.float() / each, torch.zeros(()))
    if kind == "int8":
        same(y.cpu(), quotient.round())
    else:
        same(formats.values_of(y, kind), formats.rounded(quotient, kind))


def test_earlier_versions_give_the_same():
    calls, e4m3, e8m0 = Calls(), torch.float8_e4m3fn, torch.float8_e8m0fnu
    number, x = DTYPES[e4m3], torch.randn(64, 128).bfloat16().npu()
    ends = torch.tensor([30, 64], dtype=torch.int32).npu()
    one = torch_npu.npu_dynamic_mx_quant(x, dst_type=e4m3)
    two = torch_npu.npu_dynamic_mx_quant_with_dual_axis(x, dst_type=e4m3)
    groups = torch_npu.npu_grouped_dynamic_mx_quant(x, ends, dst_type=e4m3)
    rows = torch_npu.npu_dynamic_quant(x, dst_type=e4m3)
    blocks = torch_npu.npu_dynamic_block_quant(x, dst_type=e4m3)
    for name, arguments, results in (
        ("DynamicMxQuant", (x, -1, "rint", number, 32, 0), one),
        ("DynamicMxQuantV2", (x, -1, "rint", number, 32, 0, 0.0), one),
        ("DynamicMxQuantWithDualAxis", (x, "rint", number, 0), two),
        ("GroupedDynamicMxQuant", (x, ends, "rint", number, 32), groups),
        ("DynamicQuantV3", (x, None, None, number, True, "pertoken"), rows),
        ("DynamicBlockQuant", (x, 0.0, "rint", number, 1, 128), blocks),
    ):
        outputs = [torch.zeros_like(each) for each in results]
        given = [each.view(e8m0) if each.dtype == torch.uint8 else each for each in outputs]
        status, message = calls.run(
            name, *arguments, *given, *([None] * (name == "DynamicQuantV3"))
        )
        assert status == 0, message
        for output, result in zip(outputs, results, strict=True):
            assert torch.equal(output.cpu().view(torch.uint8), result.cpu().view(torch.uint8))


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("scale-alg-of-float8", {"dst_type": torch.float8_e4m3fn, "scale_alg": 2}),
        ("scale-alg-of-e2m1", {"dst_type": formats.E2M1, "scale_alg": 1}),
        ("scale-alg-of-e1m2", {"dst_type": formats.E1M2, "scale_alg": 2}),
        ("round-mode-of-float8", {"dst_type": torch.float8_e5m2, "round_mode": "floor"}),
        ("round-mode", {"round_mode": "ceil"}),
        ("block-size", {"block_size": 64, "scale_alg": 2}),
        ("dst-type-max", {"dst_type_max": 5.0}),
        ("dst-type-max", {"dst_type": torch.float8_e5m2, "dst_type_max": 6.0}),
        ("max-low-bound", {"max_low_bound": 1.0}),
    ],
)
def test_limits_of_mx_quantization(rule, options):
    with pytest.raises(RuntimeError, match=rf"rule dynamic_mx_quant.{rule}, documented: torch_npu"):
        torch_npu.npu_dynamic_mx_quant(torch.ones(4, 64).bfloat16().npu(), **options)


def test_other_inputs_of_mx_quantization_are_refused():
    quantize = torch_npu.npu_dynamic_mx_quant
    with pytest.raises(RuntimeError, match=r"rule dynamic_mx_quant.input, documented"):
        quantize(torch.ones(4, 64, dtype=torch.float64).npu())
    with pytest.raises(RuntimeError, match=r"rule dynamic_mx_quant.float32-axis, documented"):
        quantize(torch.ones(4, 64).npu(), axis=0)
    with pytest.raises(RuntimeError, match=r"rule dynamic_mx_quant.block-size, documented"):
        quantize(torch.ones(4, 64).npu(), dst_type=torch.float8_e5m2, block_size=64)
    with pytest.raises(RuntimeError, match=r"rule dynamic_quant.mode, inferred"):
        torch_npu.npu_dynamic_quant(torch.ones(4, 64).half().npu(), quant_mode="other")


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "hif8"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (128, 64)])
def test_blocks_of_groups_of_rows(kind, rows, columns):
    torch.manual_seed(0)
    x, ends = torch.randn(2, 300, 200).half(), torch.tensor([130, 130, 300], dtype=torch.int32)
    y, scale = torch_npu.npu_grouped_dynamic_block_quant(
        x.npu(),
        ends.npu(),
        dst_type=TYPES[kind],
        row_block_size=rows,
        col_block_size=columns,
        round_mode="round" if kind == "hif8" else "rint",
    )
    assert scale.shape == (2, 300 // rows + 3, -(-200 // columns))
    values, scale = formats.values_of(y, kind), scale.cpu()
    top = float(formats.magnitudes(kind)[-1])
    for group, (first, last) in enumerate(((0, 130), (130, 130), (130, 300))):
        for start in range(first, last, rows):
            place = first // rows + group + (start - first) // rows
            end = min(start + rows, last)
            for column in range(0, 200, columns):
                block = x[:, start:end, column : column + columns].float()
                step = scale[:, place, column // columns]
                torch.testing.assert_close(step, block.abs().amax((-2, -1)) / top)
                quotient = formats.rounded(block / step[:, None, None], kind)
                same(values[:, start:end, column : column + columns], quotient)


def test_the_earlier_version_of_grouped_blocks_gives_the_same():
    x, ends = torch.randn(7, 128).half().npu(), torch.tensor([3, 7], dtype=torch.int32).npu()
    outputs = torch_npu.npu_grouped_dynamic_block_quant(x, ends, dst_type=TYPES["e4m3"])
    again = [torch.zeros_like(each) for each in outputs]
    number = DTYPES[TYPES["e4m3"]]
    status, message = Calls().run(
        "GroupedDynamicBlockQuant", x, ends, 0.0, "rint", number, 1, 128, 0, *again
    )
    assert status == 0, message
    for one, other in zip(outputs, again, strict=True):
        assert torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


@pytest.mark.parametrize(
    ("rule", "call"),
    [
        (
            "grouped_block_quant.blocks, documented",
            lambda x, w: torch_npu.npu_grouped_dynamic_block_quant(
                x, torch.tensor([5], dtype=torch.int32).npu(), row_block_size=2
            ),
        ),
    ],
)
def test_limits_of_grouped_blocks(rule, call):
    with pytest.raises(RuntimeError, match=f"rule {rule}"):
        call(torch.ones(5, 64).bfloat16().npu(), torch.ones(64).npu())


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "hif8"])
@pytest.mark.parametrize("ends", [None, [3, 3, 10]])
def test_largest_magnitude_beside_values_in_another_format(kind, ends):
    torch.manual_seed(0)
    x = torch.randn(10, 4, 16).bfloat16()
    scale = torch.rand(1 if ends is None else len(ends)) * 4
    y, amax = torch_npu.npu_quant_max(
        x.npu(),
        scale.npu(),
        dst_dtype=TYPES[kind],
        round_mode="round" if kind == "hif8" else "rint",
        group_list=None if ends is None else torch.tensor(ends).npu(),
    )
    each, largest, first = torch.ones(10), [], 0
    for group, end in enumerate(ends or [10]):
        each[first:end] = scale[group]
        part = x[first:end].abs().flatten()
        largest.append(float(part.max()) if len(part) else 0.0)
        first = end
    assert amax.cpu().tolist() == largest
    same(formats.values_of(y, kind), formats.rounded(x.float() * each[:, None, None], kind))


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_gelu_and_quantization(mode, approximate, kind):
    torch.manual_seed(0)
    x, scale, offset = torch.randn(5, 7, 64).half(), torch.rand(64).half(), torch.rand(64).half()
    y, steps = torch_npu.npu_gelu_quant(
        x.npu(),
        input_scale=scale.npu(),
        input_offset=offset.npu() if mode == "static" else None,
        approximate=approximate,
        quant_mode=mode,
        dst_type=torch.int8 if kind == "int8" else TYPES[kind],
    )
    wanted = torch.nn.functional.gelu(x.double(), approximate=approximate) * scale.double()
    if mode == "static":
        wanted = wanted + offset.double()
    else:
        top = 127 if kind == "int8" else 448
        torch.testing.assert_close(steps.cpu().double(), wanted.abs().amax(-1) / top)
        wanted = wanted / steps.cpu().double()[..., None]
    if kind == "int8":
        assert float((y.cpu().double() - wanted).abs().max()) < 0.501
    else:
        values = formats.values_of(y, kind)
        rounded = formats.rounded(wanted, kind)
        assert float((values != rounded).double().mean()) < 0.005
        torch.testing.assert_close(values, rounded, rtol=0.13, atol=1e-4)


def test_factors_of_rows_beside_scales_of_columns():
    torch.manual_seed(0)
    x, smooth = torch.randn(2, 8, 32).bfloat16(), torch.rand(8).bfloat16()
    y, scale = torch_npu.npu_dynamic_quant(
        x.npu(), smooth_scales=smooth.npu(), dst_type=torch.int8, quant_mode="perchannel"
    )
    wide = x.float() * smooth.float()[:, None]
    torch.testing.assert_close(scale.cpu().view(2, 32), wide.abs().amax(-2) / 127)
    same(y.cpu(), (wide / scale.cpu().view(2, 1, 32)).round())
    with pytest.raises(RuntimeError, match=r"rule dynamic_quant.smooth-size-950, inferred"):
        torch_npu.npu_dynamic_quant(
            x.npu(),
            smooth_scales=torch.ones(32).bfloat16().npu(),
            dst_type=torch.int8,
            quant_mode="perchannel",
        )


def test_casts_to_hif8_and_back():
    values = torch.tensor([*formats.hif8().values()]).float()
    values = values[~values.isnan()]
    codes = torch_npu.npu_dtype_cast(values.npu(), TYPES["hif8"])
    same(formats.values_of(codes, "hif8"), values)
    back = torch_npu.npu_dtype_cast(codes, torch.float32, input_dtype=TYPES["hif8"])
    same(back.cpu(), values)
    x = torch.randn(1000)
    codes = torch_npu.npu_dtype_cast(x.npu(), TYPES["hif8"])
    same(formats.values_of(codes, "hif8"), formats.rounded(x, "hif8"))


def test_padding_of_four_and_eight_bits():
    x = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    four = torch_npu.npu_dynamic_mx_quant(torch.randn(2, 64).bfloat16().npu())[0]
    packed = four.view(torch.float4_e2m1fn_x2)
    padded = torch.constant_pad_nd(packed, (2, 4, 0, 1)).view(torch.uint8)
    assert padded.shape == (3, 35)
    assert torch.equal(padded[:2, 1:33].cpu(), four.view(torch.uint8).cpu())
    assert not padded[2].any()
    assert not padded[:, 33:].any()
    eight = x.view(torch.float8_e4m3fn).npu()
    wide = torch.constant_pad_nd(eight, (1, 2)).cpu().view(torch.uint8)
    assert torch.equal(wide, torch.constant_pad_nd(x, (1, 2)))
    with pytest.raises(RuntimeError, match="numbers below 0 are not allowed"):
        torch.constant_pad_nd(eight, (-1, 0))
