# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""DeepSeek-V4: vLLM's form for CPUs, whose layers are not tied to a device, with the attention,
hyper-connections and router of this wheel."""

from vllm.config import VllmConfig
from vllm.models.deepseek_v4.cpu import model as cpu_form

import ascend_models
from ascend_models.common import hyper_connections
from ascend_models.deepseek_v4.attention import SINKS

assert hyper_connections  # Its import registers the operators.


class DeepseekV4ForCausalLM(cpu_form.DeepseekV4ForCausalLM):
    """DeepSeek-V4-Flash and -Pro."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        ascend_models.install_overrides("deepseek_v4")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.hf_to_vllm_mapper = self.hf_to_vllm_mapper | SINKS
