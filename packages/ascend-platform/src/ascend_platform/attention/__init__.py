# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Attention backends in plain PyTorch, the base classes of all attention backends, and the KV
cache's layout."""
