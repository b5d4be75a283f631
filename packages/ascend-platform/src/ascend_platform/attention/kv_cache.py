# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Paged KV cache in the layout of CANN's kernels: each part of a layer, such as its keys, is one
contiguous tensor.

vLLM makes one backing allocation and views each layer as ``[blocks, kv_heads, block_size, K|V]``
(``vllm/v1/worker/utils.py``, ``allocate_kv_cache``). In the layout LBNHC a layer is one contiguous
region, whose first part becomes the keys and whose second part becomes the values: same bytes, same
block numbers, different order within the region. Code that needs the address of a block (attention,
block copies, KV connectors, offloading) starts from :class:`KVCachePair`: a block of one layer is
the two contiguous runs ``key[block]`` and ``value[block]``. Latent attention has a
:class:`PagedLatent` or :class:`QuantizedLatent` instead, and an indexer a :class:`PagedIndex` or
:class:`QuantizedIndex`.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    iter_layer_specs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from ascend_platform.errors import RefusedError

LAYOUT = KVCacheLayout.LBNHC
"""vLLM's KV cache layout in which a layer is contiguous; our attention backends request it."""

LATENT_TILE = 128
"""Latents of a :class:`QuantizedLatent` with one scale."""

SUPPORTED_SPECS = (
    FullAttentionSpec,
    SlidingWindowSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    MambaSpec,
)


class KVCachePair(NamedTuple):
    """Keys and values of one layer.

    Attributes:
        key: ``[blocks, block_size, kv_heads, head_size]``, contiguous.
        value: ``[blocks, block_size, kv_heads, head_size_v]``, contiguous.
    """

    key: torch.Tensor
    value: torch.Tensor

    @property
    def device(self) -> torch.device:
        """By which vLLM's V2 runner tells the caches on the NPU."""
        return self.key.device


class PagedLatent(NamedTuple):
    """Latents and rotated keys of one layer with multi-head latent attention.

    Attributes:
        latent: ``[blocks, block_size, 1, kv_lora_rank]``, contiguous.
        rope: ``[blocks, block_size, 1, qk_rope_head_dim]``, contiguous.
    """

    latent: torch.Tensor
    rope: torch.Tensor

    @property
    def device(self) -> torch.device:
        """As of :class:`KVCachePair`."""
        return self.latent.device


class QuantizedLatent(NamedTuple):
    """Int8 latents of one layer with sparse latent attention.

    Attributes:
        packed: int8 ``[blocks, block_size, 1, 656]``, contiguous: of each token 512 latents, 64
            rotated elements in 16 bits, and a float32 scale for each 128 latents, as
            ``npu_kv_quant_sparse_flash_attention`` reads them.
    """

    packed: torch.Tensor

    @property
    def device(self) -> torch.device:
        """As of :class:`KVCachePair`."""
        return self.packed.device


class PagedIndex(NamedTuple):
    """Keys of one layer's indexer (sparse latent attention).

    Attributes:
        index: ``[blocks, block_size, 1, index_head_dim]``, contiguous.
    """

    index: torch.Tensor  # type: ignore[assignment]  # tuple.index is not used

    @property
    def device(self) -> torch.device:
        """As of :class:`KVCachePair`."""
        return self.index.device


class QuantizedIndex(NamedTuple):
    """Int8 keys of one layer's indexer.

    Attributes:
        index: int8 ``[blocks, block_size, 1, index_head_dim]``, contiguous.
        scale: of each key, float16 ``[blocks, block_size, 1]``, contiguous.
    """

    index: torch.Tensor  # type: ignore[assignment]  # tuple.index is not used
    scale: torch.Tensor

    @property
    def device(self) -> torch.device:
        """As of :class:`KVCachePair`."""
        return self.index.device


class QuantizedLatentAttention(MLAAttention):
    """vLLM's MLAAttention with a :class:`QuantizedLatent` as KV cache."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        latents, scales = self.kv_lora_rank, self.kv_lora_rank // LATENT_TILE
        packed = latents + self.qk_rope_head_dim * 2 + scales * torch.float32.itemsize
        spec: Any = super().get_kv_cache_spec(vllm_config)
        return dataclasses.replace(spec, head_size=packed, dtype=torch.int8)


class IndexCache(torch.nn.Module, AttentionLayerBase):
    """KV cache layer of an indexer's keys, in the model's dtype, or int8 with a scale each. Its
    backend is that of the attention that it selects for."""

    def __init__(self, prefix: str, head_size: int, attention: Any, is_int8: bool = False) -> None:
        super().__init__()
        self.is_int8 = is_int8
        self.prefix, self.head_size, self.impl = prefix, head_size, attention.impl
        self.attn_backend = attention.attn_backend
        self.kv_cache: Any = torch.tensor([])

    def get_attn_backend(self) -> Any:
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=self.head_size + self.is_int8 * torch.float16.itemsize,
            # The model's is resolved by now.
            dtype=torch.int8 if self.is_int8 else cast(torch.dtype, vllm_config.model_config.dtype),
            cache_role=SparseCacheRole.INDEXER,
        )


def bind_parts(layers: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Split the regions that vLLM has bound to these attention layers, and bind the parts in their
    place: bind_kv_cache of MLAAttention takes a single tensor."""
    parts = {name: split_layer(layers[name]) for name in names}
    for name, split in parts.items():
        layers[name].kv_cache = split
        if bind := getattr(getattr(layers[name], "impl", None), "bind", None):
            bind(split)
    return parts


def distinct_tensors(caches: Iterable[Iterable[torch.Tensor]]) -> list[torch.Tensor]:
    """The parts of layers' caches, in which a runner copies blocks by vLLM's block numbers.

    KV cache groups share memory. Of parts at one address the last is listed.
    """
    return list({part.data_ptr(): part for parts in caches for part in parts}.values())


def split_layer(layer: Any) -> Any:
    """Split the region that vLLM has bound to an attention layer into its parts, as views: a
    KVCachePair, PagedLatent or another tuple of tensors ``[blocks, ...]``.

    A layer of another wheel splits its own by ``split_kv_cache()``.
    """
    if own := getattr(layer, "split_kv_cache", None):
        return own()
    if isinstance(layer, IndexCache):
        keys, scales = _split(layer.kv_cache, layer.head_size)
        if layer.is_int8:
            return QuantizedIndex(keys, scales.view(torch.float16).squeeze(-1))
        return PagedIndex(keys)
    if isinstance(layer, MLAAttention):  # vLLM binds it without the head dimension.
        cache = layer.kv_cache.unsqueeze(1)
        if isinstance(layer, QuantizedLatentAttention):
            return QuantizedLatent(_split(cache, cache.shape[-1])[0])
        return PagedLatent(*_split(cache, layer.kv_lora_rank))
    return split_kv_cache(layer.kv_cache, layer.head_size)


def split_kv_cache(cache: torch.Tensor, head_size: int) -> KVCachePair:
    """Split one layer's region into keys and values, as views.

    Args:
        cache: vLLM's view ``[blocks, kv_heads, block_size, head_size + head_size_v]`` in layout
            LBNHC.
        head_size: elements of a key per head.

    Raises:
        RefusedError: the region is not contiguous (another layout, or padded blocks).
    """
    return KVCachePair(*_split(cache, head_size))


def _split(cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks, heads, block_size, width = cache.shape
    region = cache.transpose(1, 2)
    if not region.is_contiguous():
        raise RefusedError(
            f"the KV cache of a layer is not contiguous (shape {tuple(cache.shape)}, strides"
            f" {cache.stride()}); fix: unset VLLM_KV_CACHE_LAYOUT or set it to {LAYOUT.name}"
        )
    key, value = region.view(-1).split(
        [blocks * block_size * heads * w for w in (head_size, width - head_size)]
    )
    return key.view(blocks, block_size, heads, head_size), value.view(
        blocks, block_size, heads, width - head_size
    )


def check(config: KVCacheConfig) -> None:
    """Raise for KV caches that cannot be split.

    KV cache groups share memory, and a block belongs to one group at a time. With keys and values
    in separate tensors this holds only if all groups divide a block's bytes in the same way.

    Raises:
        RefusedError: a compressed cache, or groups with different block shapes.
    """
    # vLLM's runner adds a group for encoder-only layers, which have no KV cache.
    groups = [
        group
        for group in config.kv_cache_groups
        if not isinstance(group.kv_cache_spec, EncoderOnlyAttentionSpec)
    ]
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    others = {type(spec).__name__ for spec in specs if type(spec) not in SUPPORTED_SPECS}
    if others:
        supported = ", ".join(spec.__name__ for spec in SUPPORTED_SPECS)
        raise RefusedError(
            f"KV cache spec {', '.join(sorted(others))} is not supported; {supported} are; fix:"
            " serve another model"
        )
    # States use a block as it is, see state_cache.py.
    paged = [spec for spec in specs if not isinstance(spec, MambaSpec)]
    divisions = {_division(spec) for spec in paged}
    if len(groups) > 1 and len(divisions) > 1:
        raise RefusedError(
            "the model's KV cache groups share memory but have blocks of different shapes"
            f" ({', '.join(sorted(divisions))}); fix: --disable-hybrid-kv-cache-manager"
        )


def _division(spec: Any) -> str:
    """How a block is divided; vLLM gives groups with fewer heads larger blocks. Blocks of rows, for
    which vLLM has ``model_version``, are one part."""
    if getattr(spec, "model_version", None):
        return f"{spec.page_size_bytes} bytes of rows"
    if isinstance(spec, MLAAttentionSpec):
        return f"{spec.block_size} latents of {spec.head_size} {spec.dtype}"
    rows = spec.block_size * spec.num_kv_heads * spec.dtype.itemsize
    return f"{rows * spec.head_size} bytes of keys and {rows * spec.head_size_v} of values"
