# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""MiniMax-M3: vLLM's form for CUDA, whose norms, attention layers and indexers are replaced."""

from vllm.config import VllmConfig
from vllm.models.minimax_m3.nvidia import model as vllm_form

import ascend_models


class MiniMaxM3SparseForCausalLM(vllm_form.MiniMaxM3SparseForCausalLM):
    """The text model."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        ascend_models.install_overrides("minimax_m3")
        super().__init__(vllm_config=vllm_config, prefix=prefix)


class MiniMaxM3SparseForConditionalGeneration(vllm_form.MiniMaxM3SparseForConditionalGeneration):
    """MiniMax-M3 as published, without images."""
