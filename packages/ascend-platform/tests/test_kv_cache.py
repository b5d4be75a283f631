"""Taking keys and values apart: same memory, another view of it."""

import pytest
import torch
from ascend_platform import kv_cache
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, copy_kv_cache_blocks_inplace

BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 6, 16, 2, 32


def spec(cls=FullAttentionSpec, **extra):
    return cls(block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float16, **extra)


def config(layers=("a", "b"), groups=1, kind=None):
    kind = kind or spec()
    page = kind.page_size_bytes
    tensor = KVCacheTensor(size=page * BLOCKS * len(layers), layers=list(layers), layer_stride=page * BLOCKS, block_stride=page)
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(list(layers), kind) for _ in range(groups)],
    )


@pytest.fixture
def caches():
    """vLLM's own allocation on the device, with the views it hands to layers."""
    return allocate_kv_cache(config(), torch.device("npu"), kv_cache.LAYOUT)


def test_keys_and_values_are_contiguous_halves_of_the_layer_s_region(caches):
    views = {name: kv_cache.take_apart(cache, HEAD_SIZE) for name, cache in caches.items()}
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


def test_vllm_copies_blocks_of_keys_and_values(caches):
    every = [tensor for cache in caches.values() for tensor in kv_cache.take_apart(cache, HEAD_SIZE)]
    for number, tensor in enumerate(every):
        tensor.copy_(torch.arange(BLOCKS).view(-1, 1, 1, 1) + 10 * number)
    copy_kv_cache_blocks_inplace(every, BLOCKS, [(1, 4), (2, 0)])
    for number, tensor in enumerate(every):
        assert tensor[:, 0, 0, 0].tolist() == [10 * number + b for b in (2, 1, 2, 3, 1, 5)]


def test_other_layouts_are_refused_with_the_one_that_fits():
    other = allocate_kv_cache(config(), torch.device("npu"), KVCacheLayout.LBHNC)["a"]
    with pytest.raises(ValueError, match="VLLM_KV_CACHE_LAYOUT or set it to LBNHC"):
        kv_cache.take_apart(other, HEAD_SIZE)


def test_one_group_of_full_attention_is_taken_and_others_are_refused():
    kv_cache.check(config())
    with pytest.raises(NotImplementedError, match="2 of kind FullAttentionSpec"):
        kv_cache.check(config(groups=2))
    with pytest.raises(NotImplementedError, match="1 of kind SlidingWindowSpec"):
        kv_cache.check(config(kind=spec(SlidingWindowSpec, sliding_window=64)))
