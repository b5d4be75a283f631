# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Latent attention of long prompts and chunks, over keys and values expanded from the latents.

A pair of a query and a key costs ``128 + 64 + 128`` multiplications a head in this form, and ``512
+ 64 + 512`` in the absorbed one, but the keys and values of the context have to be expanded again
in each step. npu_fused_infer_attention_score_v2 takes the new tokens with a causal mask, and then
the context in chunks of a bounded number of tokens; npu_attention_update merges the results by
their softmax_lse. Limits of the kernels are those of ``torch_npu/_op_plugin_docs.py`` in the
torch_npu wheel.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch_npu

from ascend_attention.context import Chunk, chunk_of, cut_context, merge
from ascend_attention.metadata import to_script_list

LATENT, ROPE = 512, 64
"""Elements of a latent and of the rotated part of a key."""

HEAD = 128
"""Elements of a head of the expanded keys, besides the rotated part, and values."""

MAX_ABSORBED_TOKENS = 2 * LATENT * HEAD // (2 * LATENT - 2 * HEAD)
"""Query tokens up to which the absorbed form costs less for a long context: an expanded token costs
``2 * LATENT * HEAD`` multiplications a head, and each pair with a query that much less than the
absorbed one."""


class Prefills:
    """The requests of a step whose keys and values are expanded.

    Attributes:
        ends: cumulative numbers of query tokens.
        block_table: int32 ``[requests, blocks]``.
        mask: int8 ``[2048, 2048]``, 1 above the diagonal.
    """

    def __init__(
        self,
        ends: list[int],
        context_lens: Callable[[], list[int]],
        block_table: torch.Tensor,
        mask: torch.Tensor,
        chunk_size: int,
    ) -> None:
        """Take the cumulative query lengths, a function for the sequence lengths of the context,
        and the most tokens of a chunk."""
        self.ends, self.block_table, self.mask = ends, block_table, mask
        self._context_lens, self._chunk_size = context_lens, chunk_size

    @functools.cached_property
    def lengths(self) -> Any:
        return to_script_list(self.ends)

    @functools.cached_property
    def chunks(self) -> list[Chunk]:
        chunks = cut_context(self._context_lens(), self._chunk_size)
        return [chunk_of(pieces, self.ends, self.block_table) for pieces in chunks]


def serves(layers: list[Any], dtype: torch.dtype) -> bool:
    """Whether the kernel supports the expanded head sizes of these ``MLAAttention``."""
    return (
        bool(layers)
        and dtype == torch.bfloat16
        and all(layer.qk_nope_head_dim == layer.v_head_dim == HEAD for layer in layers)
    )


def attend(
    query: torch.Tensor,
    latents: torch.Tensor,
    ropes: torch.Tensor,
    kv_cache: Any,
    prefills: Prefills,
    expand: Callable[[torch.Tensor], torch.Tensor],
    scale: float,
) -> torch.Tensor:
    """Compute attention of the queries to their own tokens, and to the context in the KV cache.

    Args:
        query: ``[tokens, heads, 192]``.
        latents: of the new tokens, ``[tokens, 512]``.
        ropes: of the new tokens, ``[tokens, 1, 64]``.
        kv_cache: the layer's latents and rotated keys.
        expand: computes keys and values ``[tokens, heads, 256]`` from latents.

    Returns:
        ``[tokens, heads, 128]``, in float32 where parts were merged.
    """
    parts = [part.contiguous() for part in query.split((HEAD, ROPE), -1)]
    chunks = prefills.chunks

    def fused(
        rows: slice,
        latents: torch.Tensor,
        ropes: torch.Tensor,
        lengths: tuple[Any, Any],
        **mask: Any,
    ) -> Any:
        heads = query.shape[1]
        key, value = (
            part.contiguous() for part in expand(latents).view(-1, heads, 2 * HEAD).split(HEAD, -1)
        )
        return torch_npu.npu_fused_infer_attention_score_v2(
            parts[0][rows],
            key,
            value,
            query_rope=parts[1][rows],
            key_rope=ropes.expand(-1, heads, -1).contiguous(),
            actual_seq_qlen=lengths[0],
            actual_seq_kvlen=lengths[1],
            num_query_heads=heads,
            num_key_value_heads=heads,
            input_layout="TND",
            softmax_scale=scale,
            return_softmax_lse=bool(chunks),
            **mask,
        )

    own_lengths = prefills.lengths, prefills.lengths
    output, softmax_lse = fused(
        slice(None), latents, ropes, own_lengths, atten_mask=prefills.mask, sparse_mode=3
    )
    output = output.float() if chunks else output
    pages = [cache.view(-1, 1, cache.shape[-1]) for cache in kv_cache]
    for chunk in chunks:
        latents, ropes = (page.index_select(0, chunk.slots) for page in pages)
        fused_output = fused(chunk.rows, latents.squeeze(1), ropes, chunk.lengths)
        both = (output[chunk.rows], softmax_lse[chunk.rows]), fused_output
        merged, lse = merge(
            [each.flatten() for _, each in both], [each.flatten(0, 1) for each, _ in both]
        )
        output[chunk.rows] = merged.view_as(fused_output[0])
        softmax_lse[chunk.rows] = lse.view_as(fused_output[1])
    return output
