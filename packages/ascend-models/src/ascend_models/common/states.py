# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""States of requests before and after a prefill, in PyTorch, as vLLM's functions of these names."""

import torch


def gather_initial_states(
    state: torch.Tensor, indices: torch.Tensor, has_initial_state: torch.Tensor
) -> torch.Tensor:
    """States of requests, 0 for new requests."""
    mask = has_initial_state.view(-1, *(1,) * (state.dim() - 1))
    return torch.where(mask, state[indices.long()], 0)


class _ScatterStates:
    def __call__(self, state: torch.Tensor, src: torch.Tensor, indices: torch.Tensor) -> None:
        """Write the states of requests, like ``state``, to their blocks."""
        state[indices.long()] = src.to(state.dtype)

    def register_warmup(self, **_: object) -> None:
        """No-op: there is no kernel to compile."""


scatter_states = _ScatterStates()
