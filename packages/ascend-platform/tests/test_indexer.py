# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Indexers of sparse latent attention: their replacement in a model, and the rotation of their
queries and keys."""

from types import SimpleNamespace

import pytest
import torch
from ascend_platform.attention import indexer
from ascend_platform.attention.kv_cache import IndexCache
from ascend_platform.config import features
from ascend_platform.ops import rotary_embedding  # noqa: F401
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.deepseek_v2 import Indexer


def layer(with_indexer: bool):
    attention = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(attention)
    attention.use_sparse, attention.impl, attention.attn_backend, attention.indexer = (
        True,
        "impl",
        "backend",
        None,
    )
    if with_indexer:
        attention.indexer = Indexer.__new__(Indexer)
        torch.nn.Module.__init__(attention.indexer)
        attention.indexer.head_dim, attention.indexer.k_cache = 128, torch.nn.Module()
        attention.indexer.k_cache.prefix = "0.indexer.k_cache"
    return attention


def test_indexer_and_its_cache_are_replaced():
    layers = {
        "0.attn": layer(True),
        "0.indexer.k_cache": "vLLM's, in float8",
        "1.attn": layer(False),
        "1.mlp": object(),
    }
    indexer.install(layers)
    indexer.install(layers)
    replaced, cache = layers["0.attn"].indexer, layers["0.indexer.k_cache"]
    assert type(replaced) is indexer.NPUIndexer
    assert type(cache) is IndexCache
    assert replaced.k_cache is cache
    assert (cache.prefix, cache.head_size, cache.impl, cache.attn_backend) == (
        "0.indexer.k_cache",
        128,
        "impl",
        "backend",
    )


def test_stage_that_begins_with_a_shared_selection_is_refused():
    with pytest.raises(
        ValueError,
        match=(
            r"2\.attn uses the tokens that .* another pipeline stage; fix: VLLM_PP_LAYER_PARTITION"
        ),
    ):
        indexer.install({"2.attn": layer(False), "3.attn": layer(True)})


def test_decode_context_parallelism_is_refused():
    model = SimpleNamespace(use_mla=True, hf_text_config=SimpleNamespace(index_topk=2048))
    config = SimpleNamespace(
        model_config=model, parallel_config=SimpleNamespace(decode_context_parallel_size=2)
    )
    refused = [
        feature.name
        for feature in features.rows()
        if "sparse latent attention" in feature.name and feature.asked(config)
    ]
    assert len(refused) == 1
    del model.hf_text_config.index_topk
    assert not any(
        feature.asked(config)
        for feature in features.rows()
        if "sparse latent attention" in feature.name
    )


@pytest.mark.parametrize("neox", [True, False])
def test_first_elements_of_heads_are_rotated(neox):
    """By one operator, like vLLM's rotation of these elements only."""
    with set_current_vllm_config(VllmConfig()):
        rotary = get_rope(
            64, 128, is_neox_style=neox, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
        )
    rotary = rotary.npu()
    positions = torch.tensor([5, 0, 99]).npu()
    query, key = torch.randn(3, 4, 128).npu(), torch.randn(3, 128).npu()
    replaced = SimpleNamespace(rope_dim=64, head_dim=128)
    actual = indexer.NPUIndexer._rotate(replaced, positions, query, key, rotary)
    plain = rotary.forward_native
    expected = indexer.NPUIndexer._rotate(
        replaced, positions, query, key, lambda p, q, k: plain(p, q.contiguous(), k.contiguous())
    )
    for one, other, whole in zip(actual, expected, (query, key), strict=True):
        assert one.shape == whole.shape
        torch.testing.assert_close(one.cpu(), other.cpu())
        assert torch.equal(one[..., 64:].cpu(), whole[..., 64:].cpu())
