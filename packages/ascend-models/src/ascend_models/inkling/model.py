# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Inkling: vLLM's form for NVIDIA, without its Triton kernels."""

from vllm.config import VllmConfig
from vllm.models.inkling.nvidia import model as nvidia_form

import ascend_models


def prepare(vllm_config: VllmConfig) -> None:
    """Replace what launches Triton kernels in this process, before the model is made."""
    ascend_models.install_overrides("inkling")
    vllm_config.kernel_config.enable_jit_warmup = False  # of kernels that are replaced


class InklingForCausalLM(nvidia_form.InklingForCausalLM):
    """The text model, whose layers have attention with relative biases, and short convolutions."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        prepare(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)


class InklingForConditionalGeneration(nvidia_form.InklingForConditionalGeneration):
    """Inkling; its text model is supported."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        prepare(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
