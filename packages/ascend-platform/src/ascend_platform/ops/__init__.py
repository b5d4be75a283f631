# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's layers on fused NPU operators."""

from ascend_platform import host


def register() -> None:
    """Import the modules of the fused operators that this process's chip has, which registers them
    as vLLM's layers."""
    from ascend_platform.ops import layernorm  # noqa: F401

    family = host.chip_family()
    if not family.lacks("npu_gemma_rms_norm"):
        from ascend_platform.ops import gemma_layernorm  # noqa: F401
    if not family.lacks("npu_swiglu"):
        from ascend_platform.ops import activation  # noqa: F401
    if not family.lacks("npu_mrope"):
        from ascend_platform.ops import rotary_embedding  # noqa: F401
