# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""RMSNorm, or SwiGLU, and dynamic quantization as one operator in a model that is not compiled,
against float64."""

from types import SimpleNamespace

import pytest
import torch
from ascend_platform.ops import norm_quant
from ascend_quantization.base import Quantized
from ascend_quantization.methods import linear
from ascend_quantization.schemes import SCHEMES
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

HIDDEN, OUT, TOKENS, EPSILON = 512, 64, 9, 1e-5
HALVES = [torch.float16, torch.bfloat16]


class Linear(torch.nn.Module):
    """A linear layer as vLLM's quantized ones are, of one scheme; int8 weights and their scales."""

    def __init__(self, scheme, dtype, columns=HIDDEN):
        super().__init__()
        self.params_dtype, self.quant_method = dtype, SimpleNamespace(scheme=SCHEMES[scheme])
        self.values, self.scale = torch.randint(-99, 99, (OUT, columns)), torch.rand(OUT, 1) * 1e-2
        matrix = Quantized(self.values.to(torch.int8).npu(), self.scale.npu())
        linear.replace(self, (), SCHEMES[scheme].pack(matrix, dtype))

    def forward(self, x):
        return linear.apply(self.quant_method.scheme, self, x, None)


def decoder_layer(scheme, dtype):
    """A norm and the linear layer that reads it, by the names of vLLM's models, fused if they can
    be."""
    torch.manual_seed(0)
    layer = torch.nn.Module()
    with set_current_vllm_config(VllmConfig()):
        layer.input_layernorm = RMSNorm(HIDDEN, eps=EPSILON, dtype=dtype).to("npu")
        layer.input_layernorm.weight.data.normal_()
        layer.self_attn = torch.nn.Module()
        layer.self_attn.qkv_proj = Linear(scheme, dtype)
    return layer, norm_quant.install(layer)


def inputs(dtype):
    return [(torch.randn(TOKENS, HIDDEN) * 2).to(dtype).npu() for _ in range(2)]


def normed_exactly(norm, x, residual):
    total = x.cpu().double() + residual.cpu().double()
    factor = (total.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    return total * factor * norm.weight.cpu().double()


def distance(actual, expected):
    """Relative error."""
    return ((actual.cpu().double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_linear_layer_reads_the_rows_of_the_norm(dtype):
    layer, fused = decoder_layer("W8A8_DYNAMIC", dtype)
    norm, qkv = layer.input_layernorm, layer.self_attn.qkv_proj
    x, residual = inputs(dtype)
    normed, total = norm(x, residual)
    assert fused == 1
    assert norm_quant.quantized_rows(normed).values.dtype == torch.int8
    exact = normed_exactly(norm, x, residual)
    steps = exact.abs().amax(-1, keepdim=True) / 127
    weight = qkv.values.double() * qkv.scale.double()
    product = qkv(normed)
    assert product.dtype == dtype
    # A value near a tie may be rounded differently.
    assert distance(product, (exact / steps).round() * steps @ weight.T) < 0.01
    assert distance(total, x.cpu().double() + residual.cpu().double()) < torch.finfo(dtype).eps
    assert norm.quantizing is not None


@pytest.mark.parametrize("read", [lambda x: x + 0, lambda x: x[:], lambda x: torch.cat([x, x])[:9]])
def test_another_reader_gets_the_result_in_the_models_dtype(read):
    layer, _ = decoder_layer("W8A8_DYNAMIC", torch.bfloat16)
    norm = layer.input_layernorm
    x, residual = inputs(torch.bfloat16)
    result = read(norm(x, residual)[0])
    assert (type(result), result.dtype, result.shape) == (torch.Tensor, x.dtype, x.shape)
    assert distance(result, normed_exactly(norm, x, residual)) < 0.01
    assert norm.quantizing is None  # Later steps compute the norm for all readers.
    assert type(norm(x, residual)[0]) is torch.Tensor


@pytest.mark.parametrize("scheme", ["W8A16", "W4A8_DYNAMIC"])
def test_norms_before_other_schemes_are_not_fused(scheme):
    assert decoder_layer(scheme, torch.bfloat16)[1] == 0


def mlp(scheme, columns=HIDDEN):
    """An activation and the linear layer that reads it, by the names of vLLM's models."""
    torch.manual_seed(0)
    layer = torch.nn.Module()
    with set_current_vllm_config(VllmConfig()):
        layer.act_fn = SiluAndMul()
        layer.down_proj = Linear(scheme, torch.bfloat16, columns)
    return layer, norm_quant.install(layer)


def activated_exactly(x):
    gate, up = x.cpu().double().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def test_linear_layer_reads_the_rows_of_swiglu():
    layer, fused = mlp("W8A8_DYNAMIC")
    x = torch.randn(TOKENS, 2 * HIDDEN, dtype=torch.bfloat16, device="npu")
    rows = layer.act_fn(x)
    assert fused == 1
    assert norm_quant.quantized_rows(rows).values.dtype == torch.int8
    assert (rows.shape, len(rows), rows.dim()) == ((TOKENS, HIDDEN), TOKENS, 2)
    exact = activated_exactly(x)
    steps = exact.abs().amax(-1, keepdim=True) / 127
    weight = layer.down_proj.values.double() * layer.down_proj.scale.double()
    assert distance(layer.down_proj(rows), (exact / steps).round() * steps @ weight.T) < 0.01
    assert layer.act_fn.quantizing is not None  # Sizes are those of the rows.


@pytest.mark.parametrize("columns", [96, 128, 192, 480])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_short_rows_are_quantized_on_their_own(rows, columns):
    """The fused operator is not known to quantize them right; the emulator refuses it."""
    layer, fused = mlp("W8A8_DYNAMIC", columns)
    assert fused == 1
    x = torch.randn(rows, 2 * columns, dtype=torch.bfloat16, device="npu")
    actual = layer.act_fn(x)
    assert type(actual) is torch.Tensor
    assert layer.act_fn.quantizing is None
    exact = activated_exactly(x)
    steps = exact.abs().amax(-1, keepdim=True) / 127
    weight = layer.down_proj.values.double() * layer.down_proj.scale.double()
    assert distance(layer.down_proj(actual), (exact / steps).round() * steps @ weight.T) < 0.02


def test_another_reader_of_swiglu_gets_the_models_dtype():
    layer, _ = mlp("W8A8_DYNAMIC")
    x = torch.randn(TOKENS, 2 * HIDDEN, dtype=torch.bfloat16, device="npu")
    result = layer.act_fn(x) + 0
    assert (type(result), result.dtype) == (torch.Tensor, torch.bfloat16)
    assert distance(result, activated_exactly(x)) < 0.01
    assert type(layer.act_fn(x)) is torch.Tensor


def test_swiglu_before_other_schemes_or_in_float16_is_not_fused():
    assert mlp("W8A16")[1] == 0
    layer, _ = mlp("W8A8_DYNAMIC")
    x = torch.randn(TOKENS, 2 * HIDDEN, dtype=torch.float16, device="npu")
    assert type(layer.act_fn(x)) is torch.Tensor  # The operator takes bfloat16 and int32.
