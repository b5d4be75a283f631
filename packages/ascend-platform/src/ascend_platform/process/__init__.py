# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Set-up of each vLLM process: start-up, garbage collection, scopes, slot for diagnostics,
sockets, Ray and the watchdog."""
