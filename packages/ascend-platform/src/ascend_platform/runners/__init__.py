# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's model runners on NPUs: for each a folder with its runner, its kernels in PyTorch, the names
of vLLM that it replaces, and the features that it lacks."""
