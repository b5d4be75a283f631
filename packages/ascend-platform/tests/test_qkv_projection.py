# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Queries, keys and values as a tensor each, against float64; other readers of the projection."""

import json
from types import SimpleNamespace

import pytest
import torch
from ascend_platform.ops import qkv_projection
from harness.engines.configuration import engine_config
from harness.models import small
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import QKVParallelLinear

HIDDEN, HEADS, KV_HEADS, HEAD, TOKENS = 192, 6, 2, 32, 9
SIZES = [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD]
HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture
def attention(tmp_path, monkeypatch):
    """A model's attention layer with its projection, in a dtype; how many were separated."""
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))

    def make(dtype=torch.bfloat16, bias=False):
        tmp_path.joinpath("config.json").write_text(json.dumps(small.TINY))
        torch.manual_seed(0)
        layer = torch.nn.Module()
        with set_current_vllm_config(engine_config(str(tmp_path))):
            layer.attn = Attention(HEADS, HEAD, 1.0, num_kv_heads=KV_HEADS, prefix="layers.0.attn")
            layer.qkv_proj = QKVParallelLinear(
                HIDDEN, HEAD, HEADS, KV_HEADS, bias=bias, params_dtype=dtype, disable_tp=True
            ).to("npu")
        layer.qkv_proj.weight.data.normal_()
        return layer.qkv_proj, qkv_projection.install(layer)

    return make


def exactly(projection, x):
    return x.cpu().double() @ projection.weight.data.cpu().double().T


def distance(actual, expected):
    return ((actual.cpu().double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_split_returns_contiguous_tensors(attention, dtype):
    projection, separated = attention(dtype)
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype, device="npu")
    product = projection(x)[0]
    assert separated == 1
    parts = product.split(SIZES, dim=-1)
    assert all(type(part) is torch.Tensor and part.is_contiguous() for part in parts)
    for part, expected in zip(parts, exactly(projection, x).split(SIZES, -1), strict=True):
        assert distance(part, expected) < torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "read", [lambda y: y + 0, lambda y: y.clamp_(-99, 99), lambda y: y[:, : SIZES[0]]]
)
def test_another_reader_gets_one_tensor(attention, read):
    """Also what it writes stays in the tensor."""
    projection, _ = attention()
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="npu")
    product, expected = projection(x)[0], exactly(projection, x)
    result = read(product)
    assert type(result) is torch.Tensor
    assert distance(result, expected[:, : result.shape[1]]) < 0.01
    product.zero_()
    assert [part.abs().sum().item() for part in product.split(SIZES, dim=-1)] == [0, 0, 0]
    assert type(projection(x)[0]) is torch.Tensor  # Later steps compute one output.


def test_other_sizes_get_one_tensor(attention):
    projection, _ = attention()
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="npu")
    first, _ = projection(x)[0].split([HEAD, sum(SIZES) - HEAD], dim=-1)
    assert distance(first, exactly(projection, x)[:, :HEAD]) < 0.01


def test_new_weights_are_used(attention):
    """After the parameter has other memory, as after a reload."""
    projection, _ = attention()
    projection.weight.data = torch.randn_like(projection.weight.data)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device="npu")
    parts = projection(x)[0].split(SIZES, dim=-1)
    assert distance(torch.cat(parts, -1), exactly(projection, x)) < 0.01


def test_one_token_and_biases_take_one_product(attention):
    projection, _ = attention()
    one = torch.randn(1, HIDDEN, dtype=torch.bfloat16, device="npu")
    assert type(projection(one)[0]) is torch.Tensor
    assert attention(bias=True)[1] == 0
