# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A custom logits processor for vLLM's V2 model runner (since vLLM 0.33): ``extra_args={"only":
token}`` allows one token."""

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)


class OnlyToken(LogitsProcessor):
    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self.tokens = torch.full((req_states.max_num_reqs,), -1)
        self.on_device = self.tokens.to(req_states.device)
        self.has_changed = False

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self.tokens[req_idx] = (sampling_params.extra_args or {}).get("only", -1)
        self.has_changed = True
        return bool(self.tokens[req_idx] >= 0)

    def apply_staged_writes(self) -> None:
        if self.has_changed:
            self.on_device.copy_(self.tokens)
            self.has_changed = False

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        only = self.on_device[ctx.expanded_idx_mapping][:, None]
        tokens = torch.arange(logits.shape[1], device=logits.device)
        return logits.masked_fill_((only >= 0) & (tokens != only), -torch.inf)
