# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Consumer side of a rank of AscendP2PConnector: it loads KV cache from the ranks of a producer."""
