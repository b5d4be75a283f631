# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's V2 model runner on NPUs, without Triton; chosen by
``ascend_platform/config/model_runner.py``."""
