# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's V1 model runner on NPUs, for what V2 lacks and for vLLM before 0.33; deleted with the last
supported vLLM that contains it."""
