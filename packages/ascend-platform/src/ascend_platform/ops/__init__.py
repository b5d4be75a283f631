# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's layers on fused NPU operators."""

from ascend_platform import host


def register() -> None:
    """Import the modules of the fused operators that this process's chip has, which registers them
    as vLLM's layers."""
    from ascend_platform.ops import gemma_layernorm, layernorm  # noqa: F401

    register_value_heads()
    family = host.chip_family()
    if not family.lacks("npu_swiglu"):
        from ascend_platform.ops import activation  # noqa: F401
    if not family.lacks("npu_mrope"):
        from ascend_platform.ops import rotary_embedding  # noqa: F401


def register_value_heads() -> None:
    """Register the built-in attention for models whose keys and values have heads of different
    sizes, which choose a backend by its name (``vllm/model_executor/models/mimo_v2.py``)."""
    from vllm.v1.attention.backends import registry

    for name in ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV"):
        registry.register_backend(
            registry.AttentionBackendEnum[name],
            "ascend_platform.attention.paged.PagedAttentionBackend",
        )
