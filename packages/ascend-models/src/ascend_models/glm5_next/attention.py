# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""GLM-5-next's latent attention, to the tokens of groups that pooled keys select, and to those of
the group that goes on.

The classes replace vLLM's of the same parameters and arguments in its attention layer, which keeps
its projections and norms.
"""

from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear

from ascend_models.common.indexer import all_rows, select, select_each
from ascend_models.common.sparse_attention import attend
from ascend_models.glm5_next.cache import PooledCache, PooledMetadata

CHUNK = 1024
"""Tokens whose selections are listed at a time."""


class PooledIndexer(torch.nn.Module):
    """Keys of groups of tokens, means of the tokens' keys weighted by learned gates, and the
    selection of groups. Parameters as in vLLM's Indexer.

    The scores are not scaled, as a positive factor leaves their order as it is.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: Any,
        hidden_size: int,
        q_lora_rank: int,
        quant_config: Any,
        cache_config: Any,
        topk_indices_buffer: torch.Tensor | None,
        prefix: str = "",
    ) -> None:
        """Take the arguments of the Indexer of vLLM; the buffer is not used."""
        super().__init__()
        self.heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.group, self.topk = config.index_kpool, config.index_topk // config.index_kpool
        self.index_kpool_compress_ape = torch.nn.Parameter(
            torch.zeros(self.group, self.head_dim, dtype=torch.float32), requires_grad=False
        )
        self.index_kpool_compress_gate = torch.nn.Parameter(
            torch.empty(self.head_dim, hidden_size), requires_grad=False
        )
        self.wq_b = ReplicatedLinear(
            q_lora_rank,
            self.heads * self.head_dim,
            bias=False,
            return_bias=False,
            quant_config=quant_config,
            prefix=f"{prefix}.wq_b",
        )
        self.wk_weights_proj = MergedColumnParallelLinear(
            hidden_size,
            [self.head_dim, self.heads],
            bias=False,
            return_bias=False,
            quant_config=None,
            disable_tp=True,
            prefix=f"{prefix}.wk_weights_proj",
        )
        self.k_norm = LayerNorm(self.head_dim, eps=1e-6, dtype=torch.float32)

    def forward(
        self,
        hidden_states: torch.Tensor,
        latent: torch.Tensor,
        positions: torch.Tensor,
        cache: PooledCache,
        meta: PooledMetadata,
    ) -> torch.Tensor | None:
        """Store the keys of the groups that end in the step, and select for each token.

        Args:
            hidden_states: ``[tokens, hidden_size]``.
            latent: the normalized latent of the query, ``[tokens, q_lora_rank]``.
            positions: int64 ``[tokens]``.

        Returns:
            int64 ``[tokens, n]``, numbers of groups, -1 for none; None if each token attends to all
            before it.
        """
        key = self.wk_weights_proj(hidden_states)[:, : self.head_dim]
        gates = F.linear(hidden_states, self.index_kpool_compress_gate)
        self._pool(torch.cat((self.k_norm(key), gates), -1), positions, cache, meta)
        most = meta.longest // self.group
        if most <= self.topk:
            return None
        visible = (positions + 1) // self.group
        query = self.wq_b(latent).view(-1, self.heads, self.head_dim)
        # Not rounded, as in vLLM: scores of groups are near each other.
        both: Any = self.wk_weights_proj.weight
        weights = F.linear(hidden_states.float(), both[self.head_dim :].float())
        if meta.is_static:
            return select_each(query, weights, cache.keys, meta, visible, self.topk, most)
        return select(query, weights, cache.keys, meta, visible, self.topk, self.group)

    def tokens(self, groups: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The tokens of groups, and those of the group that goes on up to each token.

        Args:
            groups: int64 ``[tokens, n]``, numbers of groups, -1 for none.
            positions: int64 ``[tokens]``.

        Returns:
            int64 ``[tokens, (n + 1) * group - 1]``, positions of tokens, -1 for none.
        """
        offsets = torch.arange(self.group, device=positions.device)
        whole = groups.unsqueeze(-1) * self.group + offsets
        whole = torch.where(groups.unsqueeze(-1) < 0, -1, whole).flatten(1)
        own = positions.unsqueeze(1)
        tail = (own + 1) // self.group * self.group + offsets[:-1]
        return torch.cat((whole, torch.where(tail > own, -1, tail)), 1)

    def _pool(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        cache: PooledCache,
        meta: PooledMetadata,
    ) -> None:
        """Store the keys of groups that end in the step, and the states of tokens of groups that go
        on."""
        ends = meta.ends
        last, owners = positions[ends], meta.requests[ends]
        offsets = torch.arange(1 - self.group, 1, device=ends.device)
        earlier = meta.once(
            "states", lambda: meta.states((last.unsqueeze(1) + offsets).clamp_min(0), owners)
        )
        if meta.is_static:
            cache.states.index_copy_(0, meta.once("own states", lambda: meta.own_states), states)
            of_groups = cache.states[earlier]
        else:
            # The cache keeps the states of one group, those of a prefill's groups are of this step.
            of_step = ends.unsqueeze(1) + offsets
            is_of_step = (of_step >= meta.starts[owners].unsqueeze(1)).unsqueeze(-1)
            own = states[of_step.clamp_min(0)]
            of_groups = torch.where(is_of_step, own, cache.states[earlier])
            cache.states.index_copy_(0, meta.own_states[meta.tails], states[meta.tails])
        keys, gates = of_groups.float().split(self.head_dim, -1)
        weights = (gates + self.index_kpool_compress_ape).softmax(1)
        pooled = (keys * weights).sum(1).to(cache.dtype)
        slots = meta.once("groups", lambda: meta.groups(meta, ends, last, self.group))
        cache.keys.index_copy_(0, slots, pooled)


class PooledLatentAttention(torch.nn.Module):
    """Attention over latents, by queries that are multiplied by the matrix of their keys."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int,
        kv_lora_rank: int,
        mla_modules: Any,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
        **_: Any,
    ) -> None:
        """Take the arguments of vLLM's MultiHeadLatentAttentionWrapper; keys are not rotated."""
        super().__init__()
        assert not qk_rope_head_dim
        self.heads, self.scale = num_heads, scale
        self.head_dim, self.value_dim = qk_nope_head_dim, v_head_dim
        self.sizes = [q_lora_rank, kv_lora_rank]
        self.fused_qkv_a_proj = mla_modules.fused_qkv_a_proj
        self.q_a_layernorm = mla_modules.q_a_layernorm
        self.q_b_proj = mla_modules.q_b_proj
        self.kv_a_layernorm = mla_modules.kv_a_layernorm
        self.kv_b_proj = mla_modules.kv_b_proj
        self.o_proj = mla_modules.o_proj
        self.indexer: PooledIndexer = mla_modules.indexer
        self.cache = PooledCache(
            f"{prefix}.attn",
            kv_lora_rank,
            self.indexer.head_dim,
            self.indexer.group,
            torch.get_default_dtype(),
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute attention.

        Args:
            positions: int64 ``[tokens]``.
            hidden_states: ``[tokens, hidden_size]``.

        Returns:
            ``[tokens, hidden_size]``; in a run without metadata, as vLLM's profiling run, the values
            have no meaning.
        """
        latent, kv = self.fused_qkv_a_proj(hidden_states)[0].split(self.sizes, -1)
        latent = self.q_a_layernorm(latent.contiguous())
        kv = self.kv_a_layernorm(kv.contiguous())
        query = self.q_b_proj(latent)[0].view(-1, self.heads, self.head_dim)
        matrices = self.kv_b_proj.weight.view(self.heads, -1, self.sizes[1])
        of_keys, of_values = matrices.split([self.head_dim, self.value_dim], 1)
        query = torch.bmm(query.transpose(0, 1), of_keys).transpose(0, 1)
        attended = query
        metadata: Any = get_forward_context().attn_metadata
        if metadata is not None:
            meta: Any = metadata[self.cache.prefix]
            attended = torch.zeros_like(query)
            if tokens := meta.num_tokens:
                given = hidden_states[:tokens], latent[:tokens], query[:tokens], kv[:tokens]
                self._attend(*given, positions[:tokens], meta, attended[:tokens])
        values = torch.bmm(attended.transpose(0, 1), of_values.transpose(1, 2)).transpose(0, 1)
        return self.o_proj(values.reshape(len(values), -1))[0]

    def _attend(
        self,
        hidden_states: torch.Tensor,
        latent: torch.Tensor,
        query: torch.Tensor,
        kv: torch.Tensor,
        positions: torch.Tensor,
        meta: PooledMetadata,
        output: torch.Tensor,
    ) -> None:
        """Store the step's latents and attend to what each token sees."""
        latents = self.cache.rows
        latents.index_copy_(0, meta.once("latents", lambda: meta.own_latents), kv)
        groups = self.indexer(hidden_states, latent, positions, self.cache, meta)
        for first in range(0, len(query), CHUNK):
            some = slice(first, first + CHUNK)
            if groups is None:
                tokens = all_rows(positions[some] + 1, meta.longest)
            else:
                tokens = self.indexer.tokens(groups[some], positions[some])
            slots = meta.latents(tokens, meta.requests[some])
            output[some] = attend(query[some], [(latents, slots)], None, self.scale)
