# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Choice of the gated delta rule's implementation: the operators that a component offers, or the
built-in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_platform import host
from ascend_platform.config.state_layers import SERVED
from ascend_platform.plugins import registry, requirements, slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class GatedDeltaRule:
    """The implementation of the gated delta rule that serves a model.

    Attributes:
        fused: the class that a component offers, or None.
        reasons: why it does not serve the model's prefills and decodes, "" where it does.
        casts: whether the operators' states are cast from the KV cache's dtype and back.
    """

    fused: Any
    reasons: dict[str, str]
    casts: bool = False

    def serves(self, phase: str) -> bool:
        """Whether the operators serve a phase."""
        return not self.reasons[phase]

    def __str__(self) -> str:
        version = f"ascend-attention {requirements.version('ascend-attention')}"
        reasons = [reason for reason in self.reasons.values() if reason]
        if not reasons:
            cast = "; --mamba-ssm-cache-dtype bfloat16 saves casts of states" if self.casts else ""
            return f"fused ({version}{cast})"
        if len(reasons) == len(PHASES):
            return f"built-in PyTorch ({reasons[0]})"
        return ", ".join(
            f"built-in PyTorch {phase} ({reason})" if reason else f"fused {phase} ({version})"
            for phase, reason in self.reasons.items()
        )


def select(vllm_config: VllmConfig) -> GatedDeltaRule | None:
    """Select the implementation for the model's layers, or None if it has no such layers."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator

    model = vllm_config.model_config
    cache = vllm_config.cache_config
    drafts = vllm_config.speculative_config
    if SERVED.get(model.architecture) != "gated delta net":
        return None
    path = slots.offered("attention.gated_delta")
    if path is None:
        reason = f"ascend-attention is {registry.state('ascend-attention')}"
        return GatedDeltaRule(None, dict.fromkeys(PHASES, reason))
    fused: Any = resolve_obj_by_qualname(path)
    settings = model.hf_text_config
    states = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    ranks = vllm_config.parallel_config.tensor_parallel_size
    layer = {
        "heads": settings.linear_num_value_heads // ranks,
        "sizes": (settings.linear_key_head_dim, settings.linear_value_head_dim),
        "dtype": model.dtype,
        "state_dtype": states[1],
        "tokens": 1 + (drafts.num_speculative_tokens if drafts else 0),
        "chunk_sizes": host.chip_family().chunk_rule_sizes,
        "doubles_strengths": bool(getattr(settings, "linear_allow_neg_eigval", False)),
    }
    reasons = {}
    for phase in PHASES:
        lacking = host.chip_family().lacks(fused.operators[phase])
        reasons[phase] = (
            f"{host.chip()} has no {lacking[0]}" if lacking else fused.unsupported(phase, **layer)
        )
    return GatedDeltaRule(fused, reasons, states[1] != torch.bfloat16)
