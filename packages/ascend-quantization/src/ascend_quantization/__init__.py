# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantized weights and KV caches of ModelSlim, compressed-tensors, AWQ, GPTQ, FP8 and MXFP4
checkpoints, on CANN's operators.

Each scheme is a module of ``schemes``, registered in ``schemes/__init__.py``; ``formats`` has the
checkpoint formats.
"""

from ascend_platform import extension


def register() -> None:
    """Offer the formats to ascend-platform; never raises.

    Entry point of group ``vllm.general_plugins``: vLLM calls it in every process, possibly more
    than once.
    """
    extension.join("ascend-quantization", "ascend_quantization", _offer, api="1.9")


def _offer() -> None:
    extension.offer("quantization", "ascend_quantization.formats")
