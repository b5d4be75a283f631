# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Expert parallel load balancing on the NPU."""

import torch
from vllm.config import ParallelConfig
from vllm.distributed.eplb.eplb_state import EplbState

_init = EplbState.__init__


def init_with_device_index(
    state: EplbState, parallel_config: ParallelConfig, device: torch.device
) -> None:
    """Also keep the device index that the weight transfer thread needs; vLLM does on CUDA and XPU
    only."""
    _init(state, parallel_config, device)
    state.device_index = device.index
