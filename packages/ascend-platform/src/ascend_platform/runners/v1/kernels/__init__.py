# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Triton kernels of vLLM's V1 model runner in PyTorch. Only V1's runner and overrides import this
folder, so that it can be deleted with them."""
