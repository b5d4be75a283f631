# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Emulated Ascend NPUs: CANN's shared libraries on the CPU, for the unmodified torch_npu."""

from ascend_emulator.activation import activate

__all__ = ["activate"]
