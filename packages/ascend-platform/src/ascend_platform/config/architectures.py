# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models that are refused: architectures that vLLM has code of for other devices only, or the chip
of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_platform import host
from ascend_platform.errors import RefusedError
from ascend_platform.plugins import registry, requirements, slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig

IN_ASCEND_MODELS = (
    "DeepseekV4ForCausalLM",
    "DeepSeekV4MTPModel",
    "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration",
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
    "KimiLinearForCausalLM",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
)
"""Architectures whose form for NPUs is in the wheel ascend-models."""

LACKING = {
    "deepseek_v4": "images and drafts by DSpark",
    "deepseek_v41": "engrams and compressed keys that layers share",
    "dots3_note": "attention, images and sound",
    "glm5next": "drafts by MTP",
    "hy_v4": "latent attention with gates and sinks, and independent hyper-connections",
    "inkling": "drafts by MTP",
    "kimi_k3": "attention residuals and latent experts",
    "minimax_m3": "drafts by MTP",
    "qwen4_exp": "sparse attention (QSA) and embeddings of each layer",
}
"""Parts without a form for NPUs, by the package of ``vllm.models`` that has the architecture. Such
packages have code for named devices."""


def refusal(architecture: str) -> str:
    """Why an architecture is refused, in one line; "" if it is not."""
    from vllm.model_executor.models.registry import ModelRegistry

    module = str(getattr(ModelRegistry.models.get(architecture), "module_name", ""))
    package = module.removeprefix("vllm.models.").partition(".")[0]
    if not module.startswith("vllm.models.") or package not in LACKING:
        return ""
    if slots.offered(f"model.{architecture}"):  # and not registered with vLLM yet
        return ""
    if line := slots.offered(f"model_refusal.{architecture}"):
        return line
    if architecture in IN_ASCEND_MODELS:
        return f"{architecture} needs {registry.with_state('ascend-models')}"
    return (
        f"{architecture} is not supported by ascend-platform"
        f" {requirements.version('ascend-platform')}: vLLM has its {LACKING[package]} for other"
        " devices only, and there is no form of it for NPUs yet; fix: serve another model"
    )


def register() -> None:
    """Register the models that components offer with vLLM, in this process."""
    from vllm.model_executor.models.registry import ModelRegistry

    for name in slots.names("model"):
        ModelRegistry.register_model(name, str(slots.offered(f"model.{name}")))


def check_offered(vllm_config: VllmConfig) -> None:
    """Check a configuration by the function that the component of its model offers.

    Raises:
        RefusedError: what the model does not support, in one line.
    """
    model = vllm_config.model_config
    if model is not None and (path := slots.offered(f"model_check.{model.architecture}")):
        resolve_obj_by_qualname(path)(vllm_config)


def check(architecture: str) -> None:
    """Refuse an architecture of the table.

    Raises:
        RefusedError: what NPUs have no form of, in one line.
    """
    if line := refusal(architecture):
        raise RefusedError(line)


def dtypes() -> list[torch.dtype]:
    """The dtypes of models on this chip, the preferred one first."""
    return [getattr(torch, name) for name in host.chip_family().dtypes]


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype that the chip does not compute in.

    Raises:
        RefusedError: the chip and its dtypes, in one line.
    """
    served = dtypes()
    if dtype not in served:
        names = ", ".join(str(each).removeprefix("torch.") for each in served)
        raise RefusedError(
            f"dtype {str(dtype).removeprefix('torch.')} is not supported on {host.chip()};"
            f" supported: {names}; fix: remove --dtype, or --dtype float16"
        )


def check_chip(vllm_config: VllmConfig) -> None:
    """Refuse a model whose dtype or layers the chip does not support.

    Raises:
        RefusedError: the chip, and what it lacks, in one line.
    """
    model, family = vllm_config.model_config, host.chip_family()
    if model is None:
        return
    check_dtype(model.dtype)  # type: ignore[arg-type]  # resolved by now
    if model.is_moe and (
        missing := family.lacks("npu_moe_gating_top_k", "npu_moe_init_routing_v2")
    ):
        raise RefusedError(
            f"mixture-of-experts models are not supported on {host.chip()}, which has no"
            f" {' and no '.join(missing)}; supported: dense and pooling models;"
            " fix: serve one of these"
        )


def has_sparse_attention(model: Any) -> bool:
    """Whether the model has sparse latent attention (DSA)."""
    return model is not None and model.use_mla and hasattr(model.hf_text_config, "index_topk")
