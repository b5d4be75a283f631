# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Matrices in FP8, MXFP8 and MXFP4, multiplied as they are, against float32 matmuls of dequantized
weights and inputs; test_float_schemes.py runs these tests on Ascend 950."""

import pytest
import torch
from ascend_quantization.base import Quantized
from ascend_quantization.methods.fp8 import Fp8Format, aligned_matrix
from ascend_quantization.schemes import FP8_BLOCK, SCHEMES
from ascend_quantization.schemes.floats import in_e4m3
from harness.models import floats

EXPERTS, OUT, IN = 3, 192, 320  # Neither is a multiple of a block.
COUNTS = [3, 0, 5]
FP8 = {"FP8 block": FP8_BLOCK, "FP8 tensor": SCHEMES["W8A8FP8_DYNAMIC"]}


def matrices(form, inputs):
    """One for each expert: for the scheme, and their numbers."""
    torch.manual_seed(0)
    weights = torch.randn(EXPERTS, OUT, inputs) * 0.05
    values, scale, numbers = zip(*(floats.WEIGHTS[form](each) for each in weights), strict=True)
    scales = torch.stack(scale)
    if form == "tensor":
        scales = scales.expand(EXPERTS, OUT, 1).contiguous()
    bytes_ = torch.stack([each.view(torch.uint8) for each in values])
    return Quantized(bytes_.npu(), scales.npu()), torch.stack(numbers)


def close(actual, expected, dtype):
    bound = 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert (actual.cpu().float() - expected).abs().max() < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", floats.SCHEMES)
def test_products(name, dtype):
    """Of a linear layer with a bias, and of experts."""
    form, of_inputs = floats.SCHEMES[name]
    scheme = FP8.get(name) or SCHEMES[name]
    matrix, numbers = matrices(form, IN)
    if name == "W4A16_MXFP4" and dtype == torch.float16:
        with pytest.raises(ValueError, match="exceed float16's; fix: --dtype bfloat16"):
            scheme.pack(matrix, dtype)
        return
    x, bias = torch.randn(8, IN).to(dtype), torch.randn(OUT).to(dtype)
    rounded = floats.INPUTS[of_inputs](x.float())
    packed = scheme.pack(Quantized(matrix.weight[0], matrix.scale[0]), dtype)
    expected = rounded @ numbers[0].T + bias.float()
    close(scheme.apply(x.npu(), packed, bias.npu()), expected, dtype)
    packed = scheme.pack_down(matrix, dtype)
    actual = scheme.grouped(x.npu(), packed, torch.tensor(COUNTS).npu())
    rows = zip(rounded.split(COUNTS), numbers, strict=True)
    close(actual, torch.cat([each @ weight.T for each, weight in rows]), dtype)


@pytest.mark.parametrize("name", ["W8A8FP8_DYNAMIC", "W8A8_MXFP8"])
def test_float32_is_refused(name):
    form = floats.SCHEMES[name][0]
    with pytest.raises(ValueError, match=rf"{name} needs inputs in bfloat16 or float16, .*; fix"):
        SCHEMES[name].pack(matrices(form, IN)[0], torch.float32)


def test_each_number_of_e2m1_in_e4m3():
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 256)
    wide = in_e4m3(every.npu()).cpu().view(torch.float8_e4m3fn).float().view(256, 2)
    steps = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = torch.tensor(steps + [-step for step in steps])
    assert torch.equal(wide, torch.stack((values.repeat(16), values.repeat_interleave(16)), 1))


@pytest.mark.parametrize(
    ("inputs", "groups", "experts", "name"),
    [(96, 2, False, "W8A8_MXFP8"), (96, 3, False, "W4A8_MXFP"), (80, 2, True, "W4A4_MXFP4")],
)
def test_rows_that_do_not_fill_groups_are_refused(inputs, groups, experts, name):
    with pytest.raises(ValueError, match=f"{groups} exponents per channel .*; fix: quantize"):
        SCHEMES[name].check_groups(inputs, groups, experts, "x")
    SCHEMES["W4A8_MXFP"].check_groups(96, 3, True, "x")  # Experts are in e4m3.


def test_blocks_of_a_shard():
    """A shard that begins with a block has the checkpoint's; another one is refused."""
    form = Fp8Format("weight_scale_inv", (128, 128))
    values, scale, _ = floats.WEIGHTS["block"](torch.randn(320, 320))
    grid = form.grid([320], 320)
    spread = form.expanded(scale, grid, (320, 320))
    matrix = aligned_matrix(form, values.view(torch.uint8), spread, "x")
    assert torch.equal(matrix.scale, scale)
    with pytest.raises(
        ValueError, match=r"x has 192 outputs .*that begin with a block; fix: lower"
    ):
        aligned_matrix(form, values[64:256].view(torch.uint8), spread[1:4], "x")
