# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""What wheels that move data between instances share: secret, identity of weights, messages,
engines, memory, queues of peers.

Like :mod:`ascend_platform.extension`, whose version it has, this package may be imported by other
wheels.
"""
