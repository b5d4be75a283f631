# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Compressor: a row for each group of tokens, a mean of the group's vectors weighted by learned
gates.

Each token has a state, a vector and a gate, in a KV cache layer of its own. A group may end in any
later step: its row is computed when its last token is. With overlap the states have two halves, and
a row is of the first halves of the group before and the second halves of its own.
"""

from typing import Any

import torch
import torch_npu
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from ascend_models.common.rotary import rotate
from ascend_models.common.rows import RowCache, RowsMetadata

MAX_ELEMENTS = 1 << 26
"""Upper bound of the elements of the states that are gathered at a time."""


class Compressor(torch.nn.Module):
    """Parameters as in vLLM's DeepseekCompressor, and the states' KV cache layer.

    Args:
        hidden_size: of the model.
        head_dim: elements of a row.
        ratio: tokens of a group.
        target: the layer of the rows.
        eps: of the norm.
        prefix: name of the module.
    """

    def __init__(
        self, hidden_size: int, head_dim: int, ratio: int, target: RowCache, eps: float, prefix: str
    ) -> None:
        super().__init__()
        self.head_dim, self.ratio, self.target = head_dim, ratio, target
        self.overlaps = ratio == 4
        self.width = (1 + self.overlaps) * head_dim
        self.window = (1 + self.overlaps) * ratio
        self.ape = torch.nn.Parameter(
            torch.empty(ratio, self.width, dtype=torch.float32), requires_grad=False
        )
        self.fused_wkv_wgate = MergedColumnParallelLinear(
            hidden_size,
            [self.width, self.width],
            bias=False,
            return_bias=False,
            quant_config=None,
            disable_tp=True,
            prefix=f"{prefix}.fused_wkv_wgate",
        )
        self.norm = RMSNorm(head_dim, eps)
        self.state_cache = RowCache(
            f"{prefix}.state_cache",
            2 * self.width,
            torch.float32,
            target.page_bytes,
            window=self.window,
            group=ratio,
        )

    def forward(
        self, hidden_states: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        """Store the states of the step's tokens, and the rows of the groups that end in it.

        Args:
            hidden_states: ``[tokens, hidden_size]``.
            positions: int64 ``[tokens]``.
            cos_sin: float32 ``[positions, 2 * pairs]``, the table of the rotary embedding.
        """
        metadata: Any = get_forward_context().attn_metadata
        meta: RowsMetadata = metadata[self.state_cache.prefix]
        tokens = meta.num_tokens
        projected = self.fused_wkv_wgate(hidden_states[:tokens]).float()
        vectors, gates = projected.split(self.width, -1)
        gates = gates + self.ape[positions[:tokens] % self.ratio]
        states = self.state_cache.rows
        states.index_copy_(0, meta.slot_mapping, torch.cat((vectors, gates), -1))
        chunk = max(1, MAX_ELEMENTS // (self.window * states.shape[1]))
        for number, some in enumerate(meta.ends.split(chunk)):
            if len(some):
                target = metadata[self.target.prefix]
                self._store(f"{number} of {chunk}", some, meta, target, positions, cos_sin)

    def _store(
        self,
        chunk: str,
        ends: torch.Tensor,
        meta: RowsMetadata,
        target: RowsMetadata,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> None:
        """Compute and store the rows of groups, given the tokens that end them, and a name of these
        that all compressors of the step have in common."""
        last, owners = positions[ends], meta.requests[ends]
        offsets = torch.arange(1 - self.window, 1, device=ends.device)
        tokens = last.unsqueeze(1) + offsets
        slots = meta.once(f"states {chunk}", lambda: meta.slots(tokens, owners).clamp_min(0))
        states = self.state_cache.rows[slots]
        vectors, gates = states.split(self.width, -1)
        if self.overlaps:
            vectors, gates = self._halves(vectors), self._halves(gates)
            # The first group has none before it.
            is_absent = (tokens < 0).unsqueeze(-1)
            vectors = vectors.masked_fill(is_absent, 0)
            gates = gates.masked_fill(is_absent, -torch.inf)
        mean = (vectors * gates.softmax(1)).sum(1)
        gamma = self.norm.weight.float()
        normed = torch_npu.npu_rms_norm(mean, gamma, self.norm.variance_epsilon)[0]
        rows = rotate(normed, cos_sin[last // self.ratio * self.ratio])
        rows_of_groups = target.once(
            f"groups {chunk}", lambda: target.groups(meta, ends, last, self.ratio)
        )
        self.target.rows.index_copy_(0, rows_of_groups, rows.to(self.target.dtype))

    def _halves(self, each: torch.Tensor) -> torch.Tensor:
        """The first halves of the group before, and the second halves of the group."""
        before, own = each.split(self.ratio, 1)
        return torch.cat((before[..., : self.head_dim], own[..., self.head_dim :]), 1)
