# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The functions of the V1 runner that msServiceProfiler measures."""

from ascend_platform.observability.service_profiling import Symbol, of_runner

_RUNNER = "ascend_platform.runners.v1.runner:NPUModelRunner"
SYMBOLS = [
    Symbol(
        "vllm.v1.sample.sampler:Sampler.forward", "sample", handler=("model", "sampler_forward")
    ),
    *of_runner(_RUNNER, "_update_states", "_prepare_inputs", "_build_attention_metadata"),
    Symbol(f"{_RUNNER}.propose_draft_token_ids", "propose_draft_token_ids", "SpecDecode"),
]
