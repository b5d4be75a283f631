# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""DeepSeek's decoder layer with sequence-parallel MoE, for steps of one token."""

from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.models.deepseek_v2 import DeepseekV2DecoderLayer

_forward: Any = DeepseekV2DecoderLayer.forward


def forward(
    self: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run vLLM's layer; after a step of one token, all-gather hidden states and residual, each
    ``[1, hidden size]``.

    vLLM recognizes sharded hidden states by their number of rows, which is 1 both for one token and
    for a rank's shard of it: the next layer would not gather them, and ranks other than 0 would
    continue with padding (https://github.com/vllm-project/vllm/pull/50691).
    """
    states = _forward(self, positions, hidden_states, residual, *args, **kwargs)
    if not self.use_sequence_parallel_moe or positions.shape[0] != 1:
        return states
    gathered = tensor_model_parallel_all_gather(torch.cat(states, dim=-1), 0)[:1]
    return tuple(part.contiguous() for part in gathered.chunk(2, dim=-1))
