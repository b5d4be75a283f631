# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Scheduler side of AscendP2PConnector, by role: consumer, producer, layer-by-layer prefills."""
