# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The wheels as plugins of vLLM: their names and environment variables, registration, slots,
requirements, and VLLM_PLUGINS."""

from __future__ import annotations

COMPONENTS = {
    "ascend-platform": "ascend",
    "ascend-attention": "ascend_attention",
    "ascend-cli": "ascend_cli",
    "ascend-communicator": "ascend_communicator",
    "ascend-kv-connector": "ascend_kv_connector",
    "ascend-model-loader": "ascend_model_loader",
    "ascend-models": "ascend_models",
    "ascend-patches": "ascend_patches",
    "ascend-quantization": "ascend_quantization",
}
"""Distribution name to entry-point name, in the order of the summary line. VLLM_PLUGINS filters by
entry-point name."""

VARIABLES = {
    "VLLM_VERSION": (
        "the version of vLLM that requirements and patches are compared with, instead of the"
        " installed one"
    ),
    "VLLM_ASCEND_DISABLE_PATCHES": "names of patches to leave out, separated by commas",
    "VLLM_ASCEND_ACCEPT_OVERRIDES": (
        "names of overrides to apply to a vLLM whose source differs, separated by commas"
    ),
    "VLLM_ASCEND_STARTUP_CHECKS": (
        "`0` keeps `ascend_platform.pth` from starting diagnostics and collecting garbage rarely"
    ),
    "VLLM_ASCEND_WEIGHTS_SECRET": (
        "the secret of engines that load weights from each other, where no file is named for it"
    ),
    "VLLM_ASCEND_KV_SECRET": (
        "the secret of instances that transfer KV cache, where no file is named for it"
    ),
}
"""Environment variables of all components. The platform registers them with vLLM, which warns of
unknown ones."""

SECRETS = ("VLLM_ASCEND_WEIGHTS_SECRET", "VLLM_ASCEND_KV_SECRET")
"""Variables with a secret, which are not handed to Ray."""


NOT_ACTIVATED = "Ascend platform not activated"

not_activated: str | None = None
"""Why this process has not activated the platform; "" if it has, None before the first call of
``ascend_platform.register``."""
