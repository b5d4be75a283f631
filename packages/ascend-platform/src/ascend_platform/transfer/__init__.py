# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Code shared by the wheels that move data between instances: secret, identity of weights,
messages,
engines, memory, queues of peers.

Like :mod:`ascend_platform.extension`, whose version it has, this package may be imported by other
wheels.
"""
