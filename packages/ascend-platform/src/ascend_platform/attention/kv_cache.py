"""The paged KV cache as CANN's kernels want it: keys and values in two contiguous tensors per layer.

vLLM makes one backing allocation and views each layer as ``[blocks, kv_heads, block_size, K|V]``
(``vllm/v1/worker/utils.py``, ``allocate_kv_cache``). In the layout LBNHC one layer is one contiguous region, so its
first half can serve as keys and its second half as values: same bytes, same block numbers, another order inside.
Whatever needs the address of a block (attention, copies of blocks, later connectors and offloading) starts from
:class:`KVCachePair`; a block of one layer is two contiguous runs, ``key[block]`` and ``value[block]``.
"""

from typing import NamedTuple

import torch
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    SlidingWindowSpec,
    iter_layer_specs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

LAYOUT = KVCacheLayout.LBNHC
"""The layout in which a layer is contiguous; the attention backends ask vLLM for it."""

KINDS = (FullAttentionSpec, SlidingWindowSpec, CrossAttentionSpec)


class KVCachePair(NamedTuple):
    """Keys and values of one layer.

    key: ``[blocks, block_size, kv_heads, head_size]``, contiguous.
    value: ``[blocks, block_size, kv_heads, head_size_v]``, contiguous.
    """

    key: torch.Tensor
    value: torch.Tensor


def split_kv_cache(cache: torch.Tensor, head_size: int) -> KVCachePair:
    """Reinterpret one layer's region as keys and values, without a copy.

    Args:
        cache: vLLM's view ``[blocks, kv_heads, block_size, head_size + head_size_v]`` in layout LBNHC.
        head_size: elements of a key per head.

    Raises:
        ValueError: the region is not contiguous (another layout, or padded pages).
    """
    blocks, heads, block_size, width = cache.shape
    region = cache.transpose(1, 2)
    if not region.is_contiguous():
        raise ValueError(
            f"the KV cache of a layer is not contiguous (shape {tuple(cache.shape)}, strides {cache.stride()}); "
            f"unset VLLM_KV_CACHE_LAYOUT or set it to {LAYOUT.name}"
        )
    key, value = region.view(-1).split([blocks * block_size * heads * w for w in (head_size, width - head_size)])
    return KVCachePair(key.view(blocks, block_size, heads, head_size), value.view(blocks, block_size, heads, width - head_size))


def check(config: KVCacheConfig) -> None:
    """Refuse the caches that cannot be taken apart.

    Groups overlay each other in memory, and a block belongs to one group at a time; with keys and values apart that
    holds while all groups cut a block's bytes the same way.

    Raises:
        NotImplementedError: a state cache, a compressed cache, chunks, or groups whose blocks have different shapes.
    """
    # vLLM's runner adds a group for layers of an encoder, which have no cache
    groups = [group for group in config.kv_cache_groups if not isinstance(group.kv_cache_spec, EncoderOnlyAttentionSpec)]
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    if others := sorted({type(spec).__name__ for spec in specs if type(spec) not in KINDS}):
        raise NotImplementedError(
            f"KV caches of kind {', '.join(others)} are not served; {', '.join(kind.__name__ for kind in KINDS)} are"
        )
    shapes = {(spec.block_size, spec.num_kv_heads, spec.head_size, spec.head_size_v, str(spec.dtype)) for spec in specs}
    if len(groups) > 1 and len(shapes) > 1:
        raise NotImplementedError(
            f"the model's groups of KV caches share memory and have blocks of different shapes, {sorted(shapes)}; "
            "--disable-hybrid-kv-cache-manager makes one group of them"
        )
