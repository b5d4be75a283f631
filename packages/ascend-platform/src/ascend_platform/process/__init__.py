# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""What each process of vLLM does for itself: start-up, garbage collection, scopes, crash reports,
sockets, Ray and the watchdog."""
