# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""GLM-5-next: vLLM's form, with attention over pooled keys, the kernels of Kimi delta attention and
hyper-connections of this wheel."""

from vllm.config import VllmConfig
from vllm.models.glm5next.common import model as common_form

import ascend_models
from ascend_models.common import hyper_connections

assert hyper_connections  # Its import registers the operators.


class Glm5NextForCausalLM(common_form.Glm5NextForCausalLM):
    """The text model."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        ascend_models.install_overrides("glm5_next")
        super().__init__(vllm_config=vllm_config, prefix=prefix)


class Glm5NextForConditionalGeneration(common_form.Glm5NextForConditionalGeneration):
    """The model as published, GLM-5.3-Flash; its text model is the above, by vLLM's registry."""
