# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Component wheels: their names and environment variables, and the types that the modules of this
folder share."""

from __future__ import annotations

import logging
from typing import NamedTuple

# vLLM's log handler is attached to the logger "vllm" (vllm/logger.py); a logger below it inherits
# the handler.
logger = logging.getLogger("vllm.ascend")

COMPONENTS = {
    "ascend-platform": "ascend",
    "ascend-attention": "ascend_attention",
    "ascend-communicator": "ascend_communicator",
    "ascend-kv-connector": "ascend_kv_connector",
    "ascend-model-loader": "ascend_model_loader",
    "ascend-patches": "ascend_patches",
}
"""Distribution name to entry-point name, in the order of the summary line. VLLM_PLUGINS filters by
entry-point name."""

VARIABLES = {
    "VLLM_VERSION": (
        "the version of vLLM that requirements and patches are compared with, in place of the"
        " installed one"
    ),
    "VLLM_ASCEND_DISABLE_PATCHES": "names of patches to leave out, separated by commas",
    "VLLM_ASCEND_ACCEPT_OVERRIDES": (
        "names of overrides to apply to a vLLM whose source differs, separated by commas"
    ),
    "VLLM_ASCEND_STARTUP_CHECKS": (
        "`0` keeps `ascend_platform.pth` from checking the environment of vLLM's commands at"
        " start-up, and from collecting garbage rarely while vLLM is imported"
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


class RefusedError(ValueError):
    """Unsupported configuration. vLLM's command ends with the message, which is one line, and
    without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class Problem(NamedTuple):
    """What was found, and the command or change that fixes it ("" if there is none)."""

    found: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.found}; fix: {self.fix}" if self.fix else self.found


NOT_ACTIVATED = "Ascend platform not activated"

not_activated: str | None = None
"""Why this process has not activated the platform; "" if it has, None before the first call of
``ascend_platform.register``."""
