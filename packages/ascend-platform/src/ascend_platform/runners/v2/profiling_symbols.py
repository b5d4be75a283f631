# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The functions of the V2 runner that msServiceProfiler measures."""

from ascend_platform.observability.service_profiling import Symbol, of_runner

_RUNNER = "ascend_platform.runners.v2.runner:NPUModelRunner"
_METHODS = "add_requests update_requests prepare_inputs prepare_attn sample postprocess_sampled"
_DRAFTERS = (
    "target_dependent_ar.speculator:TargetDependentAR",
    "standalone_ar.speculator:StandaloneAR",
    "ngram.speculator:NgramGPU",
)
_PROPOSE = "vllm.v1.worker.gpu.spec_decode.{}Speculator.propose"
SYMBOLS = [
    *of_runner(_RUNNER, *_METHODS.split()),
    *(Symbol(_PROPOSE.format(name), "propose_draft_token_ids", "SpecDecode") for name in _DRAFTERS),
]
