# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Conversion of FP8 weights: bit for bit against torch's own float8, and through vLLM's loaders on
emulated NPUs."""

import math

import pytest
import torch
from ascend_quantization.methods import fp8
from ascend_quantization.methods.fp8 import Fp8Format, dequantized, requantized
from harness.models import fp8 as fp8_models

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def drawn(out, inputs, rows, columns, seed=0):
    torch.manual_seed(seed)
    weight = torch.randn(out, inputs) * torch.rand(out, 1) * 0.1
    return fp8_models.in_blocks(weight, rows, columns)


def same_bits(actual, expected):
    kind = {2: torch.int16, 4: torch.int32}[expected.element_size()]
    return torch.equal(actual.cpu().view(kind), expected.view(kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantized_bit_for_bit(dtype, monkeypatch):
    stored, scale, numbers = drawn(384, 256, 128, 128)
    monkeypatch.setattr(fp8, "CHUNK", 128 * 256)  # several chunks
    assert same_bits(
        dequantized(stored.view(torch.uint8).npu(), scale.npu(), dtype), numbers.to(dtype)
    )
    both = dequantized(
        stored.view(torch.uint8).expand(2, -1, -1).contiguous().npu(),
        torch.stack([scale, scale * 2]).npu(),
        dtype,
    )
    assert same_bits(both[1], (numbers * 2).to(dtype))  # of experts


def test_each_of_the_values():
    every = torch.arange(256, dtype=torch.uint8)
    actual = fp8.values_of(torch.device("npu"))
    expected = every.view(torch.float8_e4m3fn).float()
    assert torch.equal(actual.cpu().nan_to_num(9e9), expected.nan_to_num(9e9))
    assert int(actual.isnan().sum()) == 2


def test_error_of_int8():
    """Relative error of the matrix: int8 per output channel against e4m3 in blocks, for normally
    distributed weights."""
    torch.manual_seed(0)
    weight = torch.randn(512, 1024) * 0.02
    stored, scale, numbers = fp8_models.in_blocks(weight, 128, 128)
    converted = requantized(stored.view(torch.uint8).npu(), scale.npu(), torch.bfloat16)
    restored = converted.weight.cpu().double() * converted.scale.cpu().double()
    error = ((restored - numbers.double()).norm() / numbers.double().norm()).item()
    stored_error = ((numbers - weight).norm() / weight.norm()).item()
    print(f"int8 {error:.4f}, e4m3 {stored_error:.4f}")
    assert 0.004 < error < 0.012 < stored_error  # e4m3's own error is larger
    assert ((restored - numbers.double()).abs() <= converted.scale.cpu().double() * 0.5001).all()
    with pytest.raises(ValueError, match="need --dtype bfloat16 or float16"):
        requantized(stored.view(torch.uint8).npu(), scale.npu(), torch.float32)


@pytest.mark.parametrize(("rows", "inputs", "ranks"), [(576, 320, 2), (192, 96, 2), (320, 256, 5)])
def test_shards_that_do_not_begin_at_blocks(rows, inputs, ranks):
    stored, scale, numbers = drawn(rows, inputs, 128, 128)
    form, shard_rows = Fp8Format("weight_scale_inv", (128, 128)), rows // ranks
    grid = form.grid([shard_rows], inputs)
    assert shard_rows % grid[0] == 0 == inputs % grid[1]
    expanded = form.expanded(scale, grid, (rows, inputs))
    assert expanded.shape == (rows // grid[0], inputs // grid[1])
    for rank in range(ranks):
        bytes_ = stored.view(torch.uint8)[rank * shard_rows : (rank + 1) * shard_rows]
        factors = expanded[rank * shard_rows // grid[0] : (rank + 1) * shard_rows // grid[0]]
        actual = dequantized(bytes_.npu(), factors.contiguous().npu(), torch.float32)
        assert same_bits(actual, numbers[rank * shard_rows : (rank + 1) * shard_rows])


def test_scales_in_e8m0():
    form = Fp8Format("weight_scale_inv", (128, 128))
    scale = torch.tensor([[0.25, 2.0], [4.0, 0.5]])
    assert torch.equal(form.expanded(scale.to(torch.float8_e8m0fnu), (128, 128), (256, 256)), scale)
    assert math.prod(form.expanded(scale, (64, 128), (192, 256)).shape) == 6
