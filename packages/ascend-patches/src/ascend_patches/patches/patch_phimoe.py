# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Phi-3.5-MoE samples from logits without the bias of its output layer."""

from collections.abc import Callable
from typing import Any


def compute_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(self: Any, hidden_states: Any) -> Any:
        return self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)

    return replacement
