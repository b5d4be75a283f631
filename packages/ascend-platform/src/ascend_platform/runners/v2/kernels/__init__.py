# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Triton kernels of vLLM's V2 model runner (``vllm/v1/worker/gpu/``) in PyTorch."""
