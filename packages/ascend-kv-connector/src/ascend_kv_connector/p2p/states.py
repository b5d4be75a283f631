# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""States of linear attention and state-space layers beside the pages of a KV cache.

A KV cache group of such layers has one block a request, with the states after its last computed
token. In the block tables of this package, where all groups have equally many columns, it stands in
the column of that token, behind null blocks. For packing and reading, a state is one token whose
heads are parts of the state's bytes, so that its rank has all of them.

States are of whole prompts: a decode instance that computes the last token needs the states before
it, so that a prefill instance leaves that token out, as with vLLM's NIXL connector
(``nixl/base_scheduler.py``, ``_truncate_request_for_prefill``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from ascend_platform import extension

LAST_STATE = -1
"""Replaces a group's window: its layers have states."""


def state_parts(
    states: Sequence[torch.Tensor], dtype: torch.dtype, heads: int
) -> dict[str, torch.Tensor]:
    """Views of a layer's states, each ``[blocks, *shape]``, as ``[blocks, 1, heads, size]`` of the
    pages' dtype.

    The names have dtype and shape, so that only equal states are transferred.

    Raises:
        RefusedError: a state's bytes cannot be divided so.
    """
    parts = {}
    for number, state in enumerate(states):
        size = prod(state.shape[1:]) * state.element_size()
        if size % (heads * dtype.itemsize):
            raise extension.RefusedError(
                f"KV connector: a state of {size} bytes cannot be transferred as {heads} heads of"
                f" {dtype}; fix: remove the connector"
            )
        name = (
            f"state {number}: {str(state.dtype).removeprefix('torch.')}"
            f" {'x'.join(map(str, state.shape[1:]))}"
        )
        parts[name] = state.flatten(1).view(dtype).unflatten(1, (1, heads, -1))
    return parts


def list_regions(kv_caches: Mapping[str, Any], heads: int) -> list[tuple[str, str, torch.Tensor]]:
    """Layer, part and cache of each region of :class:`~ascend_kv_connector.p2p.paged_cache.PagedCache`.

    ``kv_caches`` are vLLM's caches by layer: of states a tuple of tensors, else what
    ``extension.cache_parts`` takes. Parts of several dtypes, such as int8 latents and 16-bit keys
    of an indexer, are all viewed as bytes.

    Raises:
        RefusedError: only states, as a pipeline stage may have.
    """
    pages = {
        layer: extension.cache_parts(held)
        for layer, held in kv_caches.items()
        if hasattr(held, "_asdict")
    }
    if not pages:
        raise extension.RefusedError(
            "KV connector: a pipeline stage without attention layers is not supported; fix: lower"
            " --pipeline-parallel-size"
        )
    dtypes = {cache.dtype for parts in pages.values() for cache in parts.values()}
    if len(dtypes) > 1:
        pages = {
            layer: {part: as_bytes(cache) for part, cache in parts.items()}
            for layer, parts in pages.items()
        }
        dtypes = {torch.int8}
    (dtype,) = dtypes
    states = {
        layer: state_parts(held, dtype, heads)
        for layer, held in kv_caches.items()
        if layer not in pages
    }
    return [
        (layer, part, cache)
        for layer in kv_caches
        for part, cache in (pages | states)[layer].items()
    ]


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """A view of a part ``[blocks, block_size, heads, ...]``, int8 ``[blocks, block_size, heads,
    bytes]``."""
    return cache.view(*cache.shape[:3], -1).view(torch.int8)


def draft_blocks(groups: Iterable[Any]) -> int:
    """Blocks that vLLM's KVCacheGroupSpecs keep for the states after draft tokens."""
    return max(getattr(group.kv_cache_spec, "num_speculative_blocks", 0) for group in groups)


def join_tables(
    tables: Sequence[Sequence[int]],
    windows: Sequence[int],
    draft_blocks: int,
    tokens: int,
    block_size: int,
) -> list[int]:
    """The groups' block tables one behind the other; with states equally long, for ``tokens``
    tokens.

    The table of a group with states ends with the block of the current ones and ``draft_blocks``
    for those after draft tokens (``vllm/v1/core/single_type_kv_cache_manager.py``, MambaManager).
    """
    if LAST_STATE not in windows:
        return [block for table in tables for block in table]
    columns, joined = -(-tokens // block_size), list[int]()
    for table, window in zip(tables, windows, strict=True):
        if window == LAST_STATE and columns:
            current = table[: len(table) - draft_blocks][-1:] or [0]
            table = [0] * (columns - 1) + list(current)
        joined += table[:columns]
    return joined


def leave_last_token(request: Any) -> bool:
    """Let a prefill instance's request, of vLLM's scheduler, end before its prompt's last token;
    whether it does.

    Not a prompt of one token, nor one that a decode instance computes whole, for its
    log-probabilities.
    """
    if request.num_prompt_tokens < 2 or request.get_skip_reading_prefix_cache():
        return False
    if request.prompt_token_ids is not None:
        del request.prompt_token_ids[-1:]
    elif request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-1]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    return True
