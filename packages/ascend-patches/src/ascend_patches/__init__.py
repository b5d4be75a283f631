# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Patches of vLLM, each for a range of versions, one process type and a known source of its
target."""

from ascend_patches.apply import enter, register
from ascend_patches.registry import SCOPES

__all__ = ["SCOPES", "enter", "register"]
