# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Variables of vLLM that the platform both reads and sets."""

from __future__ import annotations

import os

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

requested_runner = os.environ.get(RUNNER)
"""The user's value from before this process's plugins were loaded, or None. In a process of an
engine it is the engine's choice."""


def note_runner() -> None:
    """Read the variable, and set it to V2 if the user has not, until an engine is configured
    (``config/model_runner.py``): without Triton vLLM would choose V1."""
    global requested_runner
    requested_runner = os.environ.get(RUNNER)
    os.environ.setdefault(RUNNER, "1")
