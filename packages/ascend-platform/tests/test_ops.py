"""Fused operators behind vLLM's layers, compared with float64 on the CPU."""

import pytest
import torch
from ascend_platform.ops import activation, layernorm, rotary_embedding  # noqa: F401  (registers them)
from vllm import ir
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import Llama3RotaryEmbedding, RotaryEmbedding

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def current_config():
    config = VllmConfig()
    with set_current_vllm_config(config), config.kernel_config.ir_op_priority.set_priority():
        yield


def close(actual, expected, ulps=4):
    """Equal within a few units in the last place of the dtype, relative to the largest value."""
    bound = ulps * torch.finfo(actual.dtype).eps * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual.cpu().double(), expected, atol=bound, rtol=0)


def rms(x, weight, epsilon):
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 5, 128), (33, 1024)])
def test_rms_norm(dtype, shape):
    layer = RMSNorm(shape[-1], eps=1e-5, dtype=dtype)
    layer.weight.data.normal_()
    x = torch.randn(shape, dtype=dtype)
    expected = rms(x.double(), layer.weight.double(), 1e-5)
    assert ir.ops.rms_norm.dispatch(x, layer.weight.data, 1e-5) is ir.ops.rms_norm.impls["npu"]
    close(layer.to("npu")(x.npu()), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_rms_norm(dtype):
    layer = RMSNorm(256, eps=1e-6, dtype=dtype)
    layer.weight.data.normal_()
    x, residual = torch.randn(2, 9, 256, dtype=dtype)
    total = x.double() + residual.double()
    normed, left = layer.to("npu")(x.npu(), residual.npu())
    close(normed, rms(total, layer.weight.cpu().double(), 1e-6))
    close(left, total, ulps=1)


def test_partial_rms_norm_falls_back_to_native():
    layer = RMSNorm(64, var_hidden_size=32, dtype=torch.float32)
    x = torch.randn(3, 64)
    close(layer.to("npu")(x.npu()), x.double() / (x[:, :32].double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 128), (5, 96), (3, 4, 64)])
def test_silu_and_mul(dtype, shape):
    layer = SiluAndMul()
    assert type(layer) is activation.NPUSiluAndMul
    x = torch.randn(shape, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    close(layer(x.npu()), gate * gate.sigmoid() * up)


def rotated(x, positions, inverse_frequencies, neox, head_size):
    """Rotate each pair (a, b) of a head by position times frequency; pairs are halves (neox) or neighbours."""
    turned = x.double().reshape(len(positions), -1, head_size).clone()
    angles = positions.double()[:, None] * inverse_frequencies.double()
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    width = 2 * len(inverse_frequencies)
    first = slice(0, width // 2) if neox else slice(0, width, 2)
    second = slice(width // 2, width) if neox else slice(1, width, 2)
    a, b = turned[..., first].clone(), turned[..., second].clone()
    turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
    return turned.reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (128, 64), (80, 80)])  # 80 is no multiple of 32
def test_rotary_embedding(dtype, neox, head_size, rotary_dim):
    layer = RotaryEmbedding(head_size, rotary_dim, 512, 10000.0, neox, dtype).to("npu")
    positions = torch.randint(0, 512, (11,))
    query, key = torch.randn(11, 4 * head_size, dtype=dtype), torch.randn(11, 2 * head_size, dtype=dtype)
    joined = torch.cat([query, key], -1).npu()  # as the model has them: slices of one projection
    got_query, got_key = layer(positions.npu(), *joined.split([4 * head_size, 2 * head_size], -1))
    frequencies = 10000.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    # vLLM computes the angles in float32: up to 512 * 2^-24 off
    close(got_query, rotated(query, positions, frequencies, neox, head_size), ulps=300 if dtype is torch.float32 else 4)
    close(got_key, rotated(key, positions, frequencies, neox, head_size), ulps=300 if dtype is torch.float32 else 4)


def test_rotary_subclasses_are_fused():
    layer = Llama3RotaryEmbedding(64, 64, 512, 10000.0, True, torch.float32, 8.0, 1.0, 4.0, 256)
    assert isinstance(layer, rotary_embedding.NPURotaryMixin)
    layer = layer.to("npu")
    positions = torch.arange(200, 230)
    query, key = torch.randn(2, 30, 128)
    got, _ = layer(positions.npu(), query.npu(), key.npu())
    close(got, rotated(query, positions, layer._compute_inv_freq(10000.0).cpu(), True, 64), ulps=300)
