# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Transfers of KV cache between two instances, behind ``AscendP2PConnector``."""
