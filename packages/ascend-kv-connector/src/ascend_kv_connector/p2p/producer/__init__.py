# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Producer side of a rank of AscendP2PConnector: it keeps and sends the KV cache of prompts."""
