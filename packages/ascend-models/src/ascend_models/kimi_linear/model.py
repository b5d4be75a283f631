# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Kimi-Linear: vLLM's form for ROCm, whose layers are not tied to a device unless AITER is enabled,
with the kernels of Kimi delta attention in PyTorch."""

from vllm.config import VllmConfig
from vllm.models.kimi_k3.amd import linear

import ascend_models


class KimiLinearForCausalLM(linear.KimiLinearForCausalLM):
    """Kimi-Linear-48B-A3B, whose layers have Kimi delta attention or latent attention."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        ascend_models.install_overrides("kimi_linear")
        # vLLM would enlarge smaller shards of experts for a kernel of ROCm, in a way that fails.
        vllm_config.model_config.hf_text_config.min_moe_intermediate_per_partition = 0
        super().__init__(vllm_config=vllm_config, prefix=prefix)
