# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Library of the wheels that move data between instances: secret, identity of weights, messages,
engines, memory, queues of peers. Its public interface is what its modules define without an
underscore."""
