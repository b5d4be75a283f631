# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Layers with recurrent state in PyTorch: what vLLM computes by its Triton libraries."""
