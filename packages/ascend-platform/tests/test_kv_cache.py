# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Split of the KV cache into keys and values: views of the same memory."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ascend_platform import extension
from ascend_platform.attention import kv_cache
from ascend_platform.worker import worker
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace

BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 6, 16, 2, 32


def spec(cls=FullAttentionSpec, **extra):
    return cls(
        block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float16, **extra
    )


def config(layers=("a", "b"), groups=1, kind=None):
    kind = kind or spec()
    page = kind.page_size_bytes
    tensor = KVCacheTensor(
        size=page * BLOCKS * len(layers),
        layers=list(layers),
        layer_stride=page * BLOCKS,
        block_stride=page,
    )
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(list(layers), kind) for _ in range(groups)],
    )


@pytest.fixture
def caches():
    """vLLM's allocation on the device and the views that layers get."""
    return allocate_kv_cache(config(), torch.device("npu"), kv_cache.LAYOUT)


def test_split_is_two_contiguous_views(caches):
    views = {name: kv_cache.split_kv_cache(cache, HEAD_SIZE) for name, cache in caches.items()}
    for name, (key, value) in views.items():
        assert key.shape == value.shape == (BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)
        assert key.is_contiguous()
        assert value.is_contiguous()
        assert key.data_ptr() == caches[name].data_ptr()
        assert value.data_ptr() == key.data_ptr() + key.numel() * key.element_size()
    every = [tensor for view in views.values() for tensor in view]
    for number, tensor in enumerate(every):
        tensor.fill_(number)
    assert [tensor.unique().tolist() for tensor in every] == [[0.0], [1.0], [2.0], [3.0]]


def test_layer_of_latent_attention_has_latents_and_rotated_keys():
    kind = MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=96 + 32, dtype=torch.float16
    )
    allocated = allocate_kv_cache(config(["a"], kind=kind), torch.device("npu"), kv_cache.LAYOUT)[
        "a"
    ]
    layer = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(layer)
    # as MLAAttention.bind_kv_cache does
    layer.kv_lora_rank, layer.kv_cache = 96, allocated.squeeze(1)
    parts = kv_cache.split_layer(layer)
    assert {name: part.shape for name, part in extension.cache_parts(parts).items()} == {
        "latent": (BLOCKS, BLOCK_SIZE, 1, 96),
        "rope": (BLOCKS, BLOCK_SIZE, 1, 32),
    }
    assert all(part.is_contiguous() for part in parts)
    assert parts.latent.data_ptr() == allocated.data_ptr()
    assert parts.rope.data_ptr() == allocated.data_ptr() + parts.latent.nbytes
    kv_cache.check(config(["a"], kind=kind))


def test_indexer_has_a_cache_of_its_keys():
    kind = MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=128, dtype=torch.float16
    )
    layer = kv_cache.IndexCache("a", 128, SimpleNamespace(impl="impl", attn_backend="backend"))
    layer.bind_kv_cache(
        allocate_kv_cache(config(["a"], kind=kind), torch.device("npu"), kv_cache.LAYOUT)["a"]
    )
    parts = extension.cache_parts(kv_cache.split_layer(layer))
    assert {name: part.shape for name, part in parts.items()} == {
        "index": (BLOCKS, BLOCK_SIZE, 1, 128)
    }
    assert parts["index"].is_contiguous()
    assert (layer.impl, layer.get_attn_backend()) == ("impl", "backend")


def test_int8_indexer_has_a_scale_for_each_key():
    attention = SimpleNamespace(impl="impl", attn_backend="backend")
    layer = kv_cache.IndexCache("a", 128, attention, is_int8=True)
    kind = layer.get_kv_cache_spec(VllmConfig(cache_config=CacheConfig(block_size=BLOCK_SIZE)))
    allocated = allocate_kv_cache(config(["a"], kind=kind), torch.device("npu"), kv_cache.LAYOUT)
    layer.bind_kv_cache(allocated["a"])
    parts = extension.cache_parts(kv_cache.split_layer(layer))
    assert {name: (part.dtype, part.shape) for name, part in parts.items()} == {
        "index": (torch.int8, (BLOCKS, BLOCK_SIZE, 1, 128)),
        "scale": (torch.float16, (BLOCKS, BLOCK_SIZE, 1)),
    }
    assert all(part.is_contiguous() for part in parts.values())
    ends = [part.data_ptr() + part.nbytes for part in parts.values()]
    assert ends[0] == parts["scale"].data_ptr()
    assert ends[1] - parts["index"].data_ptr() == BLOCKS * kind.page_size_bytes


def test_int8_latents_are_one_part_with_their_scales():
    layer = object.__new__(kv_cache.QuantizedLatentAttention)
    torch.nn.Module.__init__(layer)
    values = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_size": 576, "sliding_window": None}
    values |= {"kv_cache_dtype": "auto", "indexer": None, "non_causal_multi_token_decode": False}
    vars(layer).update(values)
    model = SimpleNamespace(dtype=torch.bfloat16)
    of = SimpleNamespace(cache_config=CacheConfig(block_size=BLOCK_SIZE), model_config=model)
    kind = layer.get_kv_cache_spec(of)
    assert kind.page_size_bytes == BLOCK_SIZE * (512 + 64 * 2 + 4 * 4)
    allocated = allocate_kv_cache(config(["a"], kind=kind), torch.device("npu"), kv_cache.LAYOUT)
    layer.kv_cache = allocated["a"].squeeze(1)  # as vLLM's bind_kv_cache does
    ((name, part),) = extension.cache_parts(kv_cache.split_layer(layer)).items()
    assert (name, part.dtype, part.shape) == ("packed", torch.int8, (BLOCKS, BLOCK_SIZE, 1, 656))
    assert part.is_contiguous()


def test_latents_and_index_keys_are_one_group():
    """Groups of other attention divide the memory by the blocks of the smallest."""
    latents, index = (
        MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=size, dtype=torch.float16)
        for size in (576, 128)
    )
    assert worker._block_bytes([latents, index, latents]) == BLOCK_SIZE * (2 * 576 + 128) * 2
    assert (
        worker._block_bytes([spec(), spec(), spec(SlidingWindowSpec, sliding_window=8)])
        == spec().page_size_bytes
    )


def test_copy_of_kv_cache_blocks(caches):
    every = [
        tensor for cache in caches.values() for tensor in kv_cache.split_kv_cache(cache, HEAD_SIZE)
    ]
    for number, tensor in enumerate(every):
        tensor.copy_(torch.arange(BLOCKS).view(-1, 1, 1, 1) + 10 * number)
    copy_kv_cache_blocks_inplace(every, BLOCKS, [(1, 4), (2, 0)])
    for number, tensor in enumerate(every):
        assert tensor[:, 0, 0, 0].tolist() == [10 * number + b for b in (2, 1, 2, 3, 1, 5)]


def test_other_layouts_are_refused():
    other = allocate_kv_cache(config(), torch.device("npu"), KVCacheLayout.LBHNC)["a"]
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT or set it to LBNHC"):
        kv_cache.split_kv_cache(other, HEAD_SIZE)


def groups(*kinds):
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([], kind) for kind in kinds],
    )


def test_groups_with_different_block_shapes_are_refused():
    window, cross = spec(SlidingWindowSpec, sliding_window=64), spec(CrossAttentionSpec)
    kv_cache.check(groups(spec(), spec()))
    kv_cache.check(groups(window, spec(), window))
    kv_cache.check(groups(spec(ChunkedLocalAttentionSpec, attention_chunk_size=64), spec()))
    kv_cache.check(groups(cross, spec(), spec(EncoderOnlyAttentionSpec)))
    wider = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=2 * HEAD_SIZE, dtype=torch.float16
    )
    kv_cache.check(groups(wider))
    # As vLLM makes the blocks of unequal heads equally large.
    kv_cache.check(groups(replace(window, block_size=2 * BLOCK_SIZE), wider))
    padded = replace(window, page_size_padded=wider.page_size_bytes)
    with pytest.raises(
        extension.RefusedError,
        match=r"blocks of different shapes.*--disable-hybrid-kv-cache-manager",
    ):
        kv_cache.check(groups(padded, wider))
    with pytest.raises(extension.RefusedError, match="KV cache spec RSWASpec is not supported"):
        kv_cache.check(groups(spec(RSWASpec, rswa_window=64)))


def test_groups_share_memory_by_block():
    """Writes of one group to its blocks do not change the blocks of another group."""
    page = spec().page_size_bytes
    shared = {"size": page * BLOCKS * 2, "layer_stride": page * BLOCKS, "block_stride": page}
    both = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(layers=["a", "b"], **shared),
            KVCacheTensor(layers=["c", "d"], **shared),
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(["a", "b"], spec()),
            KVCacheGroupSpec(["c", "d"], spec(SlidingWindowSpec, sliding_window=64)),
        ],
    )
    caches = allocate_kv_cache(both, torch.device("npu"), kv_cache.LAYOUT)
    views = {name: kv_cache.split_kv_cache(cache, HEAD_SIZE) for name, cache in caches.items()}
    assert views["a"].key.data_ptr() == views["c"].key.data_ptr()
    for number, name in enumerate("abcd"):
        for part in range(2):
            views[name][part][:3] = 10 * number + part if name in "ab" else views[name][part][:3]
            views[name][part][3:] = 10 * number + part if name in "cd" else views[name][part][3:]
    for number, name in enumerate("abcd"):
        rows = slice(0, 3) if name in "ab" else slice(3, None)
        assert [views[name][part][rows].unique().tolist() for part in range(2)] == [
            [10.0 * number],
            [10.0 * number + 1],
        ]
