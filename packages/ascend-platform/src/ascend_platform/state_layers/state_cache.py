# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Caches of states, of linear attention and state-space layers, beside the pages of attention
layers.

KV cache groups share memory, and a block belongs to one group at a time. As the keys of all blocks
come before the values (``kv_cache.py``), a block of states is cut in the same way: its largest
state, as the recurrent one, takes the place of the keys, or of the latents of latent attention,
and the others, such as that of the convolution, that of the values, or of the rotated keys. The
block size of attention follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    iter_layer_specs,
)

from ascend_platform.attention import kv_cache

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ALIGNMENT = 64
"""Alignment of a state within its block, in bytes."""

STEP = 128
"""Tokens by which the block size of attention grows, as CANN's kernels have blocks of 128."""


class LayerStates(tuple[torch.Tensor, ...]):
    """The states of one layer, each ``[blocks, *shape]``."""

    @property
    def device(self) -> torch.device:
        """As of ``kv_cache.KVCachePair``."""
        return self[0].device


class BlockZeroer:
    """Zeroes new blocks of attention layers, which may hold the states of other layers; the kernel
    of vLLM's KVBlockZeroer takes addresses."""

    def __init__(self, caches: Iterable[Iterable[torch.Tensor]], num_blocks: int) -> None:
        pages = (each for each in caches if not isinstance(each, LayerStates))
        self._pages = [each.view(num_blocks, -1) for each in kv_cache.distinct_tensors(pages)]

    def zero_block_ids(self, block_ids: list[int]) -> None:
        """Zero blocks in all layers that have pages."""
        blocks = torch.tensor(block_ids).pin_memory()
        for pages in self._pages:
            blocks = blocks.to(pages.device, non_blocking=True)
            pages[blocks] = 0

    def warmup(self, num_kv_blocks: int) -> None:
        """No-op: there is no kernel to compile."""


def parts(spec: FullAttentionSpec, latent: int) -> tuple[int, int]:
    """Bytes of a block's keys and values; of its latents and rotated keys, where a latent has
    elements."""
    widths = (latent or spec.head_size), spec.head_size + spec.head_size_v
    keys = spec.page_size_bytes * widths[0] // widths[1]
    return keys, spec.page_size_bytes - keys


def place(states: Sequence[int], bytes_of_parts: Sequence[int]) -> list[tuple[int, int]] | None:
    """The part and offset of each state, given their sizes in bytes; None if they do not fit."""
    taken = [0] * len(bytes_of_parts)
    found: dict[int, tuple[int, int]] = {}
    for index in sorted(range(len(states)), key=lambda each: -states[each]):
        for part, size in enumerate(bytes_of_parts):
            if taken[part] + states[index] <= size:
                found[index] = (part, taken[part])
                taken[part] += -(-states[index] // ALIGNMENT) * ALIGNMENT
                break
        else:
            return None
    return [found[index] for index in range(len(states))]


def sizes(shapes: Iterable[Sequence[int]], dtypes: Iterable[torch.dtype]) -> list[int]:
    """Bytes of each state of a layer."""
    return [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]


def align_block_size(vllm_config: VllmConfig) -> None:
    """Enlarge the block size of attention until the states fit into the parts of a block."""
    from vllm.model_executor.models import ModelRegistry

    cache = vllm_config.cache_config
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    model_class: Any = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)[0]
    states = sizes(
        model_class.get_mamba_state_shape_from_config(vllm_config),
        model_class.get_mamba_state_dtype_from_config(vllm_config),
    )
    one = (MLAAttentionSpec if model.use_mla else FullAttentionSpec)(
        block_size=1,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=cast(torch.dtype, model.dtype),
    )
    of_token = parts(one, model.hf_text_config.kv_lora_rank if model.use_mla else 0)
    block_size = cache.block_size
    while place(states, [size * block_size for size in of_token]) is None:
        block_size = (block_size // STEP + 1) * STEP
    if block_size != cache.block_size:
        cache.block_size = block_size
        if cache.mamba_cache_mode == "align":
            cache.mamba_block_size = block_size
    page = block_size * sum(of_token)
    cache.mamba_page_size_padded = None if page == sum(states) else page


def bind(
    layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor], config: KVCacheConfig
) -> dict[str, Any]:
    """Split the regions that vLLM has bound to layers, and bind the parts instead.

    Returns:
        The parts by layer. Those of layers with states come first: of a state and the pages in the
        same memory, ``kv_cache.distinct_tensors`` lists the pages, because they are whole blocks.
    """
    states = split(layers, caches, config)
    for name, split_states in states.items():
        layers[name].kv_cache = split_states
    return states | kv_cache.bind_parts(layers, [name for name in caches if name not in states])


def split(
    layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor], config: KVCacheConfig
) -> dict[str, LayerStates]:
    """The states of the layers that have some, each ``[blocks, *shape]``, as views of vLLM's region
    of the layer."""
    specs = {
        name: spec
        for group in config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
        for name in group.layer_names
    }
    paged = (
        parts(spec, getattr(layers[name], "kv_lora_rank", 0))
        for name, spec in specs.items()
        if isinstance(spec, FullAttentionSpec)
    )
    pages = next(paged, None)
    states = {name: spec for name, spec in specs.items() if isinstance(spec, MambaSpec)}
    return {name: _split(caches[name], spec, pages) for name, spec in states.items()}


def _split(region: torch.Tensor, spec: MambaSpec, pages: tuple[int, ...] | None) -> LayerStates:
    blocks, page, states = region.shape[0], region.stride(0), sizes(spec.shapes, spec.dtypes)
    pages = pages or (*states, page - sum(states))
    placed = place(states, pages)
    if placed is None or sum(pages) != page:
        blocks_of = f"the parts of a block, {pages} of {page} bytes"
        raise NotImplementedError(f"states of {states} bytes do not fit into {blocks_of}")
    views = []
    each = zip(placed, spec.shapes, spec.dtypes, states, strict=True)
    for (part, offset), shape, dtype, size in each:
        start = region.storage_offset() + blocks * sum(pages[:part]) + offset
        bytes_ = region.as_strided((blocks, size), (pages[part], 1), start)
        views.append(bytes_.view(dtype).view(blocks, *shape))
    return LayerStates(views)


def copy(layers: Mapping[str, Any], names: Iterable[str], source: int, target: int) -> None:
    """Copy a block of states of these layers to another block."""
    for name in names:
        for state in layers[name].kv_cache:
            state[target] = state[source]


def clear(layers: Mapping[str, Any], names: Iterable[str], block: int) -> None:
    """Zero a block of states of these layers."""
    for name in names:
        for state in layers[name].kv_cache:
            state[block] = 0
