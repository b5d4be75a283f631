# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fused operators behind vLLM's layers, compared with float64 on the CPU."""

import types

import pytest
import torch
import torch.nn.functional as F
import torch_npu
from ascend_platform import host
from ascend_platform.ops import (
    activation,
    gemma_layernorm,
    layernorm,  # noqa: F401
    rotary_embedding,
    tensor_parallel,
)
from ascend_platform.overrides import guard
from ascend_platform.worker import loading, rotary_tables
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding as rotary_of_vllm
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.activation import (
    FastGELU,
    GeluAndMul,
    NewGELU,
    QuickGELU,
    SiluAndMul,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm, RMSNormGated
from vllm.model_executor.layers.rotary_embedding import (
    Llama3RotaryEmbedding,
    MRotaryEmbedding,
    RotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

guard.install("common", "ops.tensor_parallel")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def current_config():
    with set_current_vllm_config(VllmConfig()):
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
    assert layer.is_fused
    layer.weight.data.normal_()
    x = torch.randn(shape, dtype=dtype)
    expected = rms(x.double(), layer.weight.double(), 1e-5)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "form", [{}, {"activation": "sigmoid"}, {"norm_before_gate": False}, {"group_size": 64}]
)
def test_gated_rms_norm(dtype, form):
    layer = RMSNormGated(128, eps=1e-6, dtype=dtype, **({"norm_before_gate": True} | form))
    layer.weight.data.normal_()
    x, z = torch.randn(2, 9, 4, 128, dtype=dtype)
    weight, gate = (
        layer.weight.double(),
        torch.sigmoid(z.double()) * (1 if form.get("activation") else z.double()),
    )
    groups = (-1, form.get("group_size", 128))
    normed = (
        rms(
            (x * gate if "norm_before_gate" in form else x).double().unflatten(-1, groups), 1, 1e-6
        ).flatten(-2)
        * weight
    )
    close(
        layer.to("npu")(x.npu(), z.npu()), normed if "norm_before_gate" in form else normed * gate
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chip", ["Ascend910B1", "Ascend950PR_9599"])
def test_gemma_rms_norm(dtype, chip, monkeypatch):
    """By npu_gemma_rms_norm, or by npu_rms_norm on a chip without it."""
    monkeypatch.setattr(host, "chip", lambda: chip)
    layer = GemmaRMSNorm(128, eps=1e-6).to(dtype)
    assert type(layer) is gemma_layernorm.NPUGemmaRMSNorm
    assert layer.is_fused == (chip == "Ascend910B1")
    assert layer.has_norm
    layer.weight.data.normal_()
    expected_weight = layer.weight.double() + 1
    layer = layer.to("npu")
    x, residual = torch.randn(2, 9, 256, dtype=dtype)
    # Like the queries of Gemma 3: rows of a wider tensor.
    heads = x.npu()[:, :128].unflatten(-1, (1, 128))
    close(layer(heads)[:, 0], rms(x[:, :128].double(), expected_weight, 1e-6))
    x, residual = x[:, :128], residual[:, :128]
    normed, left = layer(x.npu(), residual.npu())
    close(left, x.double() + residual.double(), ulps=1)
    close(normed, rms((x + residual).double(), expected_weight, 1e-6))


def test_rms_norm_falls_back_if_the_weight_dtype_differs():
    layer = RMSNorm(64, dtype=torch.bfloat16)
    layer.weight.data.normal_()
    x = torch.randn(3, 64)
    assert layer.is_fused
    close(
        layer.to("npu")(x.npu()), rms(x.double(), layer.weight.cpu().double(), 1e-6), ulps=1 << 16
    )


def test_disabled_rms_norm_falls_back_to_vllm():
    x = torch.randn(3, 64)
    config = VllmConfig(compilation_config={"custom_ops": ["none"]})
    with set_current_vllm_config(config):
        layer = RMSNorm(64, dtype=torch.float32).to("npu")
        assert layer._forward_method == layer.forward_native
        close(layer(x.npu()), rms(x.double(), torch.ones(64).double(), 1e-6))


def test_partial_rms_norm_falls_back_to_native():
    layer = RMSNorm(64, var_hidden_size=32, dtype=torch.float32)
    x = torch.randn(3, 64)
    close(
        layer.to("npu")(x.npu()),
        x.double() / (x[:, :32].double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt(),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 128), (5, 96), (3, 4, 64)])
def test_silu_and_mul(dtype, shape):
    layer = SiluAndMul()
    assert type(layer) is activation.NPUSiluAndMul
    x = torch.randn(shape, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    close(layer(x.npu()), gate * gate.sigmoid() * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_mul(dtype, approximate):
    layer = GeluAndMul(approximate)
    x = torch.randn(5, 2400, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    close(layer(x.npu()), F.gelu(gate, approximate=approximate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forms_of_gelu(dtype):
    x = torch.randn(5, 96, dtype=dtype)
    for layer in (NewGELU(), FastGELU()):
        close(layer(x.npu()), F.gelu(x.double(), approximate="tanh"))
    close(QuickGELU()(x.npu()), x.double() * (1.702 * x.double()).sigmoid())


def rotated(x, positions, inverse_frequencies, neox, head_size):
    """Rotate each pair (a, b) of a head by position times frequency, or the token's; pairs are
    halves (neox) or neighbours."""
    turned = x.double().reshape(len(positions), -1, head_size).clone()
    angles = positions.double()[:, None] * inverse_frequencies.double()
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    width = 2 * inverse_frequencies.shape[-1]
    first = slice(0, width // 2) if neox else slice(0, width, 2)
    second = slice(width // 2, width) if neox else slice(1, width, 2)
    a, b = turned[..., first].clone(), turned[..., second].clone()
    turned[..., first], turned[..., second] = a * cos - b * sin, b * cos + a * sin
    return turned.reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
# 80 is no multiple of 32
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (128, 64), (80, 80), (80, 32)])
def test_rotary_embedding(dtype, neox, head_size, rotary_dim):
    layer = RotaryEmbedding(head_size, rotary_dim, 512, 10000.0, neox, dtype).to("npu")
    positions = torch.randint(0, 512, (11,))
    query, key = (
        torch.randn(11, 4 * head_size, dtype=dtype),
        torch.randn(11, 2 * head_size, dtype=dtype),
    )
    joined = torch.cat([query, key], -1).npu()  # As in the model: slices of one projection.
    got_query, got_key = layer(positions.npu(), *joined.split([4 * head_size, 2 * head_size], -1))
    frequencies = 10000.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    # vLLM computes the angles in float32, with an error of up to 512 * 2^-24.
    close(
        got_query,
        rotated(query, positions, frequencies, neox, head_size),
        ulps=300 if dtype is torch.float32 else 4,
    )
    close(
        got_key,
        rotated(key, positions, frequencies, neox, head_size),
        ulps=300 if dtype is torch.float32 else 4,
    )


LONGROPE = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}


def with_rotary_table(length, scaling=None):
    """A model with one layer of attention and a rotary table for `length` positions."""
    attention = torch.nn.Module()
    config = VllmConfig()
    config.model_config = types.SimpleNamespace(max_model_len=length)  # for LongRoPE
    with set_current_vllm_config(config):
        attention.rotary_emb = rotary_of_vllm.get_rope(
            64, length, True, {"rope_theta": 10000.0, **(scaling or {})}, torch.float32
        )
    attention.attn = Attention.__new__(Attention)
    torch.nn.Module.__init__(attention.attn)
    return torch.nn.Sequential(attention)


@pytest.mark.parametrize(
    ("scaling", "rows"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        (
            {"rope_type": "deepseek_yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            128,
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mrope_section": [16, 8, 8],
            },
            512,
        ),  # 4 times
        (
            {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 32}
            | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            256,
        ),
        ({"rope_type": "longrope", "original_max_position_embeddings": 32} | LONGROPE, 256),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_requests_longer_than_the_rotary_table_are_refused(scaling, rows):
    """vLLM's limit of a request is max_position_embeddings for each of these."""
    model = with_rotary_table(256, scaling)
    rotary_tables.check(model, rows)
    with pytest.raises(
        ValueError,
        match=(
            rf"has {rows} positions .* --max-model-len is {rows + 1}; fix: --max-model-len"
            rf" {rows}, or"
        ),
    ):
        rotary_tables.check(model, rows + 1)
    # Without a KV cache: positions of an image.
    vision = torch.nn.Sequential(torch.nn.Sequential(model[0].rotary_emb))
    rotary_tables.check(vision, rows + 1)


@pytest.mark.parametrize("is_v2", [False, True], ids=["V1", "V2"])
def test_drafters_may_have_shorter_contexts_with_v1(is_v2):
    """V2 drafts at each position of the target."""
    runner = types.SimpleNamespace(max_model_len=512, get_model=lambda: with_rotary_table(512))
    drafter = types.SimpleNamespace(model=with_rotary_table(128))
    if is_v2:
        runner.speculator = drafter
        with pytest.raises(ValueError, match="the drafter's rotary embedding has 128 positions"):
            loading.ModelMixin._check_positions(runner)
        return
    runner.drafter, runner.effective_drafter_max_model_len = drafter, 128
    assert len(loading.ModelMixin._check_positions(runner)) == 2
    runner.effective_drafter_max_model_len = 129
    with pytest.raises(ValueError, match="the drafter's rotary embedding has 128 positions"):
        loading.ModelMixin._check_positions(runner)


def test_rotary_subclasses_are_fused():
    layer = Llama3RotaryEmbedding(64, 64, 512, 10000.0, True, torch.float32, 8.0, 1.0, 4.0, 256)
    assert isinstance(layer, rotary_embedding.NPURotaryMixin)
    layer = layer.to("npu")
    positions = torch.arange(200, 230)
    query, key = torch.randn(2, 30, 128)
    got, _ = layer(positions.npu(), query.npu(), key.npu())
    close(
        got, rotated(query, positions, layer._compute_inv_freq(10000.0).cpu(), True, 64), ulps=300
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(
    ("section", "turns", "fused"),
    [
        ([16, 24, 24], False, True),
        ([24, 20, 20], True, True),
        ([8, 12, 12], False, True),
        ([11, 11, 10], True, False),
    ],
)
def test_mrope(section, turns, fused, neox, dtype, monkeypatch):
    """The models' sections: of Qwen2.5-VL, Qwen3-VL, GLM-4V, and of Qwen3.5, which npu_mrope does
    not support."""
    head_size, rotary = 128, 2 * sum(section)
    layer = MRotaryEmbedding(head_size, rotary, 128, 10000.0, neox, dtype, section, turns).to("npu")
    calls = []
    operator = torch_npu.npu_mrope
    monkeypatch.setattr(
        torch_npu,
        "npu_mrope",
        lambda *x, **options: calls.append(options) or operator(*x, **options),
    )
    owners = [row for row, count in enumerate(section) for _ in range(count)]
    if turns:
        owners = [i % 3 if i < 3 * section[i % 3] else 0 for i in range(rotary // 2)]
    positions = torch.randint(0, 512, (3, 11))
    query, key = (
        torch.randn(11, 4 * head_size, dtype=dtype),
        torch.randn(11, 2 * head_size, dtype=dtype),
    )
    joined = torch.cat([query, key], -1).npu()
    got = layer(positions.npu(), *joined.split([4 * head_size, 2 * head_size], -1))
    frequencies = 10000.0 ** -(torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angles = torch.stack([positions[row] * frequencies[i] for i, row in enumerate(owners)], -1)
    for x, result in zip((query, key), got, strict=True):
        close(
            result,
            rotated(x, torch.ones(11), angles, neox, head_size),
            ulps=300 if dtype is torch.float32 else 4,
        )
    layer(positions[0].npu(), *joined.split([4 * head_size, 2 * head_size], -1))  # Only text.
    assert len(calls) == 1 + fused


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("shape", [(2, 7, 3, 80), (7, 3, 72)])
def test_rotary_embedding_of_vision_encoders(dtype, neox, shape, monkeypatch):
    # Also of the class that vLLM uses where ours is not registered.
    monkeypatch.setattr(ApplyRotaryEmb, "forward_native", None)
    layer = ApplyRotaryEmb(enforce_enable=True, is_neox_style=neox)
    x, angles = torch.randn(shape, dtype=dtype), torch.randn(shape[-3], shape[-1] // 2)
    got = layer(x.npu(), angles.cos().to(dtype).npu(), angles.sin().to(dtype).npu())
    tokens = x.transpose(0, 1).reshape(7, -1) if x.dim() == 4 else x.reshape(7, -1)
    expected = rotated(tokens, torch.ones(7), angles, neox, shape[-1])
    expected = expected.view(7, 2, 3, 80).transpose(0, 1) if x.dim() == 4 else expected.view(shape)
    close(got, expected, ulps=8)


# Tokens added to the vocabulary, of this rank.
@pytest.mark.parametrize("added", [(20, 20), (22, 24)])
@pytest.mark.parametrize("shard", [(0, 7), (7, 14), (14, 20), (20, 20)])
def test_rows_and_mask_of_a_vocabulary_shard(shard, added):
    ids, ranges = torch.arange(26, dtype=torch.int32), (*shard, 2, *added)
    rows, masked = vocab_parallel_embedding.get_masked_input_and_mask(ids.npu(), *ranges)
    expected, outside = tensor_parallel._native(ids, *ranges)
    assert (
        vocab_parallel_embedding.get_masked_input_and_mask
        is tensor_parallel.get_masked_input_and_mask
    )
    assert torch.equal(masked.cpu(), outside)
    assert torch.equal(rows.cpu()[~outside], expected[~outside])
    assert rows.cpu().min() >= 0
    assert rows.cpu().max() <= expected.max()
