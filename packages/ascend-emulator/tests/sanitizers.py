# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tests that `tools/test --sanitize` leaves out: what a sanitizer replaces is what they look at."""

import os

import pytest


def without_sanitizers(reason: str) -> pytest.MarkDecorator:
    """Skip a test where the emulator is built with sanitizers, and say why."""
    return pytest.mark.skipif(
        "ASCEND_EMULATOR_SANITIZE" in os.environ, reason=f"built with sanitizers: {reason}"
    )
