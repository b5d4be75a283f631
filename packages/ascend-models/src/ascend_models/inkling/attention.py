# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Inkling's attention: a bias for each head and distance, which the token's hidden state chooses.

Keys and values of a token are one row of a KV cache layer.
"""

from itertools import pairwise
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.models.inkling.nvidia import attention

from ascend_models.common.rows import RowCache, RowsMetadata
from ascend_models.common.sparse_attention import gather
from ascend_models.inkling.short_conv import model_page_bytes

MAX_ELEMENTS = 1 << 24
"""Upper bound of the elements of the keys and values, or of the scores, of one chunk of tokens."""


class NPUInklingAttention(attention.InklingAttention):
    """Attention of one layer, to a window or to all tokens, with the parameters of vLLM."""

    def __init__(self, config: Any, **named: Any) -> None:
        super().__init__(config, **named)
        vllm_config = get_current_vllm_config()
        del vllm_config.compilation_config.static_forward_context[self.prefix]
        dtype: Any = vllm_config.model_config.dtype
        self.kv_rows = RowCache(
            self.prefix,
            2 * self.num_kv_heads * self.head_dim,
            dtype,
            model_page_bytes(),
            window=self.local_extent,
        )

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        log_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention.

        Args:
            positions: int64 ``[tokens]``.
            hidden_states: ``[tokens, hidden_size]``.
            log_scaling: float32 ``[tokens]``, by which scores of all but windows are scaled.

        Returns:
            ``[tokens, hidden_size]``, of this rank's heads; in a run without metadata, as vLLM's
            profiling run, the values have no meaning.
        """
        projected, _ = self.qkvr(hidden_states)
        attended = projected.new_zeros(len(projected), self.num_heads * self.head_dim)
        metadata: Any = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            meta: RowsMetadata = metadata[self.prefix]
            if meta.num_tokens:
                scaling = None if self.is_local else log_scaling
                self._attend(projected, positions, scaling, meta, attended)
        return self.wo_ud(attended)[0]

    def _attend(
        self,
        projected: torch.Tensor,
        positions: torch.Tensor,
        log_scaling: torch.Tensor | None,
        meta: RowsMetadata,
        output: torch.Tensor,
    ) -> None:
        tokens, groups = meta.num_tokens, self.num_heads // self.num_kv_heads
        kv = self.num_kv_heads * self.head_dim
        sizes = [self.num_heads * self.head_dim, kv, kv, self.num_heads * self.d_rel]
        query, key, value, relative = projected[:tokens].split(sizes, -1)
        key = self.k_norm(self.k_sconv(key, positions).reshape(-1, self.head_dim)).view(tokens, kv)
        value = self.v_sconv(value, positions)
        self.kv_rows.rows.index_copy_(0, meta.slot_mapping, torch.cat((key, value), -1))
        query = self.q_norm(query.reshape(-1, self.head_dim)).view(tokens, self.num_heads, -1)
        biases = relative.reshape(tokens, self.num_heads, self.d_rel) @ self.rel_logits_proj.proj
        if log_scaling is not None:
            factor = log_scaling[:tokens].view(-1, 1, 1)
            query = (query.float() * factor).to(query.dtype)
            biases = (biases.float() * factor).to(biases.dtype)
        query = query.reshape(tokens, self.num_kv_heads, groups, self.head_dim)
        biases = biases.view(tokens, self.num_kv_heads, groups, self.rel_extent)
        at = positions[:tokens]
        is_one_each = tokens == len(meta.query_start_loc) - 1
        if self.is_local or meta.is_static or is_one_each:
            result = self._attend_back(query, biases, at, meta)
        else:
            result = self._attend_requests(query, biases, at, meta)
        output[:tokens] = result.reshape(tokens, -1)

    def _attend_back(
        self, query: torch.Tensor, biases: torch.Tensor, at: torch.Tensor, meta: RowsMetadata
    ) -> torch.Tensor:
        """Attend to the window of each token, or to as many tokens before it as any may have, by
        tensors of one shape."""
        count = self.local_extent or meta.longest
        slots = meta.once(f"last {count}", lambda: meta.last(at, count))
        biases = within(biases, count)
        results = []
        chunk = max(1, MAX_ELEMENTS // (count * self.kv_rows.width))
        for first in range(0, len(query), chunk):
            some = slice(first, first + chunk)
            is_absent = (slots[some] < 0).view(-1, 1, 1, count)
            rows = gather(self.kv_rows.rows, slots[some])
            keys, values = rows.view(*rows.shape[:2], 2, self.num_kv_heads, -1).unbind(2)
            scores = query[some] @ keys.permute(0, 2, 3, 1) * self.scaling + biases[some]
            weights = scores.float().masked_fill_(is_absent, -torch.inf).softmax(-1)
            results.append(weights.to(rows.dtype) @ values.transpose(1, 2))
        return torch.cat(results)

    def _attend_requests(
        self, query: torch.Tensor, biases: torch.Tensor, at: torch.Tensor, meta: RowsMetadata
    ) -> torch.Tensor:
        """Attend to all tokens of each request, request by request."""
        results = torch.zeros_like(query)
        for request, (start, end) in enumerate(pairwise(meta.query_start_loc)):
            if start == end:
                continue
            named = torch.arange(meta.seq_lens[request], device=at.device)
            owner = meta.requests[start : start + 1]
            rows = self.kv_rows.rows[meta.slots(named.unsqueeze(0), owner).squeeze(0)]
            keys, values = rows.view(len(rows), 2, self.num_kv_heads, -1).unbind(1)
            chunk = max(1, MAX_ELEMENTS // (len(rows) * self.num_heads))
            for first in range(start, end, chunk):
                some = slice(first, min(first + chunk, end))
                distance = (at[some].unsqueeze(1) - named).view(-1, 1, 1, len(named))
                scores = query[some] @ keys.permute(1, 2, 0) * self.scaling
                scores = scores + at_distance(biases[some], distance)
                weights = scores.float().masked_fill_(distance < 0, -torch.inf).softmax(-1)
                results[some] = weights.to(rows.dtype) @ values.transpose(0, 1)
        return results


def within(biases: torch.Tensor, count: int) -> torch.Tensor:
    """Biases of the first ``count`` distances, ``[..., count]``, 0 where there is none."""
    extent = biases.shape[-1]
    if count <= extent:
        return biases[..., :count]
    return torch.nn.functional.pad(biases, (0, count - extent))


def at_distance(biases: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """Biases ``[tokens, kv_heads, groups, extent]`` at distances ``[tokens, 1, 1, n]``, 0 where
    there is none."""
    extent = biases.shape[-1]
    near = distance.clamp(0, extent - 1).expand(*biases.shape[:3], -1)
    return biases.gather(-1, near).masked_fill((distance < 0) | (distance >= extent), 0)
