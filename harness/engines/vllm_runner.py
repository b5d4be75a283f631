# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Which of vLLM's model runners serves the cases that do not choose one."""

import importlib.metadata
import os

from packaging.version import Version

_GIVEN = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
IS_V2 = _GIVEN == "1" if _GIVEN else Version(importlib.metadata.version("vllm")) >= Version("0.33")
"""From vLLM 0.33 on V2 is the default; ``tools/compat --runner`` sets the variable."""

V2_ALONE = _GIVEN == "1"
"""V2 is requested, so that V1 does not serve instead what vLLM's V2 lacks."""
