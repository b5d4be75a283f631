# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Features of layers and experts that are not supported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm import envs

from ascend_platform.config.features import Feature

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _has_agnostic_layers(config: VllmConfig) -> bool:
    # Since vLLM 0.32; read by the Transformers backend's models.
    return bool(getattr(envs, "VLLM_USE_HW_AGNOSTIC", False))


def _other_kernels(config: VllmConfig) -> str:
    """Kernels that vLLM selects on CUDA and ROCm devices, and would ignore here."""
    names = ("moe_backend", "linear_backend", "sparse_indexer_topk_backend")
    kernels = {name: getattr(config.kernel_config, name, None) for name in names}
    # vLLM's default
    kernels["mamba_backend"] = config.mamba_config.backend.name.lower().replace("triton", "auto")
    if isinstance(config.additional_config, dict):
        kernels["gdn_prefill_backend"] = config.additional_config.get("gdn_prefill_backend")
    used = {name: value for name, value in kernels.items() if value not in (None, "auto")}
    return ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in used.items())


def _other_expert_transfer(config: VllmConfig) -> str:
    parallel = config.parallel_config
    way = getattr(parallel.eplb_config, "communicator", None) if parallel.enable_eplb else None
    if way in (None, "torch_gloo", "torch_nccl"):
        return ""
    # vLLM chooses nixl by itself where that package is installed.
    return way


def _other_placement(config: VllmConfig) -> str:
    strategy = config.parallel_config.expert_placement_strategy
    return "" if strategy == "linear" else strategy


def _scaled_residual(config: VllmConfig) -> str:
    """openPangu's layers scale the residual, while their norms undo the scale of what is added to
    it (``openpangu.py``)."""
    text = config.model_config.hf_text_config
    scale = getattr(text, "routed_scaling_factor", None) or 1
    is_half = str(config.model_config.dtype) == "torch.float16"
    if not is_half or scale == 1 or not getattr(text, "sandwich_norm", False):
        return ""
    return f"routed_scaling_factor {scale}"


FEATURES = (
    Feature(
        "VLLM_USE_HW_AGNOSTIC (layers other than those that have NPU forms)", _has_agnostic_layers
    ),
    Feature("kernels of other devices", _other_kernels),
    Feature("batch invariance", lambda config: envs.VLLM_BATCH_INVARIANT),
    Feature(
        "sandwich norms in float16, which vLLM computes wrongly",
        _scaled_residual,
        of_model=True,
        fix="--dtype bfloat16",
    ),
    Feature("elastic expert parallelism", lambda config: config.parallel_config.enable_elastic_ep),
    Feature("expert placement strategies other than linear", _other_placement, of_model=True),
    Feature(
        "expert load balancing by communicators other than torch_gloo and torch_nccl",
        _other_expert_transfer,
        fix='--eplb-config \'{"communicator": "torch_gloo"}\'',
    ),
)
