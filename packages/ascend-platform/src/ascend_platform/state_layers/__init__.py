# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Linear attention and state-space layers: their states and metadata, the rules that compute them,
vLLM's Triton kernels for them in PyTorch, the names of vLLM that these replace, and the features that
are refused."""
