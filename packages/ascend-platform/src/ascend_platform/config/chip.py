"""What the chip of this machine lacks: dtypes and operators without which a model is refused."""

from typing import TYPE_CHECKING

import torch

from ascend_platform import extension, host

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
        raise extension.RefusedError(
            f"dtype {str(dtype).removeprefix('torch.')} is not supported on {host.chip()}; supported: {names}; "
            "fix: remove --dtype, or --dtype float16"
        )


def check(vllm_config: "VllmConfig") -> None:
    """Refuse a model whose dtype or layers the chip does not support.

    Raises:
        RefusedError: the chip, and what it lacks, in one line.
    """
    model, family = vllm_config.model_config, host.chip_family()
    if model is None:
        return
    check_dtype(model.dtype)  # type: ignore[arg-type]  # resolved by now
    if model.is_moe and (missing := family.lacks("npu_moe_gating_top_k", "npu_moe_init_routing_v2")):
        raise extension.RefusedError(
            f"mixture-of-experts models are not supported on {host.chip()}, which has no {' and no '.join(missing)}; "
            "supported: dense and pooling models"
        )
