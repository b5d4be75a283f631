# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""LoRA on experts: grouped matmuls beside those of the experts, for all adapters of a batch.

vLLM's layer wraps a modular kernel of Triton, which NPUs do not have. Here rows are multiplied by
the A matrices of all slots, a mask keeps each row's own adapter, and the results times the B
matrices are added to the experts' own outputs, as ``ascend_platform.lora.punica`` does for linear
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora import utils
from vllm.lora.layers import fused_moe
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.layers.utils import _get_lora_device

from ascend_platform.errors import RefusedError
from ascend_platform.ops.moe.grouped import grouped_matmul


class FusedMoEWithLoRA(fused_moe.FusedMoEWithLoRA):
    """vLLM's layer, with adapters in the order of npu_grouped_matmul. It has vLLM's name, by which
    vLLM recognizes it."""

    def __init__(self, base_layer: Any) -> None:
        """Set what vLLM's methods use, except its kernel.

        Raises:
            RefusedError: the experts have no gate.
        """
        BaseLayerWithLoRA.__init__(self)
        self.base_layer, self.moe_config = base_layer, base_layer.moe_config
        # vLLM looks up their layers here, for their own adapters.
        self._shared_experts = base_layer._shared_experts
        self.tp_size, self.tp_rank = base_layer.moe_config.tp_size, base_layer.moe_config.tp_rank
        self.device = _get_lora_device(base_layer)
        self._w13_slices = 2
        self.n_slices = self.local_num_experts * (self._w13_slices + 1)
        if not base_layer.moe_config.is_act_and_mul:
            raise RefusedError(
                "LoRA on experts without a gate is not supported; fix: --lora-target-modules"
                " without experts serves the others"
            )
        base_layer.routed_experts.lora_base_layer_prefix = "base_layer."

    def _create_lora_a_weights(self, max_loras: int, lora_config: Any) -> None:
        experts, shape = self.local_num_experts, (max_loras, lora_config.max_lora_rank)
        inner, like = self.intermediate_size_per_partition, self._like(lora_config)
        self._w13_a = torch.zeros(experts, self._w13_slices, *shape, self.hidden_size, **like)
        self._w2_a = torch.zeros(experts, 1, *shape, inner, **like)
        # vLLM's order: [slots, experts, rank, in]
        self.w13_lora_a_stacked = tuple(part.transpose(0, 1) for part in self._w13_a.unbind(1))
        self.w2_lora_a_stacked = (self._w2_a[:, 0].transpose(0, 1),)

    def _create_lora_b_weights(self, max_loras: int, lora_config: Any) -> None:
        shape, like = (max_loras, lora_config.max_lora_rank), self._like(lora_config)
        experts, inner = self.local_num_experts, self.intermediate_size_per_partition
        slices = range(self._w13_slices)
        self._w13_b = [torch.zeros(experts, *shape, inner, **like) for _ in slices]
        self._w2_b = [torch.zeros(experts, *shape, self.hidden_size, **like)]
        # vLLM's order: [slots, experts, out, rank]
        self.w13_lora_b_stacked = tuple(b.permute(1, 0, 3, 2) for b in self._w13_b)
        self.w2_lora_b_stacked = (self._w2_b[0].permute(1, 0, 3, 2),)

    def _like(self, lora_config: Any) -> dict[str, Any]:
        return {"dtype": lora_config.lora_dtype, "device": self.device}

    def set_mapping(self, punica_wrapper: Any) -> None:
        BaseLayerWithLoRA.set_mapping(self, punica_wrapper)
        self.base_layer.routed_experts.quant_method.lora = self.of_step

    def of_step(self) -> Callable[[torch.Tensor, int], RowLoRA] | None:
        """The function of the step that finds the adapters of rows; None if no token has an
        adapter."""
        return None if self.punica_wrapper.no_lora else self.of_rows

    def of_rows(self, row_idx: torch.Tensor, tokens: int) -> RowLoRA:
        """The adapters of a step's rows.

        Args:
            row_idx: int32 ``[tokens * k]``, the row of each copy of a token; -1, of another rank's
                expert.
        """
        rows, count = row_idx.long(), len(row_idx)
        copies = self.punica_wrapper.token_mask(tokens).repeat_interleave(count // tokens, 0)
        mask = copies.new_empty(count + self.use_ep, copies.shape[1])
        if self.use_ep:  # -1 becomes the row behind the others.
            rows %= count + 1
        return RowLoRA(self, mask.index_copy_(0, rows, copies)[:count])


@dataclass(frozen=True)
class RowLoRA:
    """The adapters of rows that are sorted by expert. ``mask`` ``[rows, slots]`` is 1 at the slot
    of a row's adapter."""

    layer: FusedMoEWithLoRA
    mask: torch.Tensor

    def add_w13(self, y: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> None:
        """Add the adapters' output to y ``[rows, 2 * inner]``, gate and up; rows ``[rows,
        hidden]``, counts by expert."""
        self._add(y, rows, counts, self.layer._w13_a, self.layer._w13_b)

    def add_w2(self, y: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> None:
        """Add the adapters' output to y ``[rows, hidden]``; rows ``[rows, inner]``."""
        self._add(y, rows, counts, self.layer._w2_a, self.layer._w2_b)

    def _add(
        self,
        y: torch.Tensor,
        rows: torch.Tensor,
        counts: torch.Tensor,
        a: torch.Tensor,
        bs: list[torch.Tensor],
    ) -> None:
        shrunk = grouped_matmul(rows.to(a.dtype), a.flatten(1, 3).transpose(1, 2), counts)
        shrunk = shrunk.view(len(rows), *a.shape[1:4]) * self.mask[:, None, :, None]
        for index, (b, part) in enumerate(zip(bs, y.chunk(len(bs), -1), strict=True)):
            inputs = shrunk[:, index].flatten(1).contiguous()
            part += grouped_matmul(inputs, b.flatten(1, 2), counts)


class FusedMoE3DWithLoRA(fused_moe.FusedMoE3DWithLoRA):
    """Adapters of models whose experts' gate and up projections are one tensor."""

    def __init__(self, base_layer: Any) -> None:
        raise RefusedError(
            "LoRA on experts whose gate and up projections are one tensor is not supported; fix:"
            " --lora-target-modules without experts serves the other layers"
        )


_OWN: dict[Any, Any] = {
    fused_moe.FusedMoEWithLoRA: FusedMoEWithLoRA,
    fused_moe.FusedMoE3DWithLoRA: FusedMoE3DWithLoRA,
}
LORA_CLASSES = tuple(_OWN.get(each, each) for each in utils._all_lora_classes)
