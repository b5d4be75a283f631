# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Moondream 3 samples from logits without the bias of its output layer."""

from collections.abc import Callable
from typing import Any


def compute_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(self: Any, hidden_states: Any) -> Any:
        logits = self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)
        if logits is not None:  # Only the first rank of a group gathers them.
            logits[:, self._answer_id] = float("-inf")
        return logits

    return replacement
