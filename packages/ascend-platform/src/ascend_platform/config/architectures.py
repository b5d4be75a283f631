# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models that are refused: what CANN's public operators lack for their architectures, or the chip
of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ascend_platform import host
from ascend_platform.errors import RefusedError
from ascend_platform.plugins import requirements

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MHC = "hyper-connections (npu_mhc_pre, which is for the next generation of chips)"
_COMPRESSED = f"attention over compressed keys and values, its compressor, and {_MHC}"
_OTHERS = "kernels that vLLM has only for CUDA and ROCm"

LACKING = {
    "deepseek_v4": _COMPRESSED,
    "deepseek_v41": _COMPRESSED,
    "dots3_note": _OTHERS,
    "glm5next": _OTHERS,
    "hy_v4": f"latent attention with sinks, and {_MHC}",
    "inkling": _OTHERS,
    "kimi_k3": "prefill of Kimi delta attention",
    "minimax_m3": "MiniMax's sparse attention by blocks of keys",
    "qwen4_exp": _MHC,
}
"""Operators that CANN lacks, by the package of ``vllm.models`` that has the architecture; such
packages have
code for named platforms."""


def refusal(architecture: str) -> str:
    """Why an architecture is refused, in one line; "" if it is not."""
    from vllm.model_executor.models.registry import ModelRegistry

    module = str(getattr(ModelRegistry.models.get(architecture), "module_name", ""))
    package = module.removeprefix("vllm.models.").partition(".")[0]
    if not module.startswith("vllm.models.") or package not in LACKING:
        return ""
    return (
        f"{architecture} is not supported by ascend-platform"
        f" {requirements.version('ascend-platform')}: CANN's operators lack {LACKING[package]}; fix:"
        " serve another model"
    )


def check(architecture: str) -> None:
    """Refuse an architecture of the table.

    Raises:
        RefusedError: what CANN lacks, in one line.
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
