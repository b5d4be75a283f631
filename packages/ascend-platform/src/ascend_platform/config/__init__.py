# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Checks of vLLM's configuration, and the defaults that it has on Ascend NPUs."""
