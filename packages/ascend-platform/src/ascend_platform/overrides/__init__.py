# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Names of vLLM that ascend-platform replaces or adds to, for which vLLM has no registry, platform
hook or base class: tables of them, and guards that compare vLLM's source with the tables."""
