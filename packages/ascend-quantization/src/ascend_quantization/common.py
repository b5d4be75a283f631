# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Names of the quantization methods, the check of the chip, and the options of the platform."""

from __future__ import annotations

from collections.abc import Iterable

from ascend_platform import extension
from ascend_platform.extension import RefusedError

NAME = "ascend"
"""Value of ``--quantization`` for ModelSlim checkpoints."""

DESCRIPTION = "quant_model_description.json"
AWQ, GPTQ = "auto_awq", "auto_gptq"
"""vLLM's names of the methods; checkpoints have ``awq`` and ``gptq``."""

FP8, MXFP4 = "fp8", "gpt_oss_mxfp4"
DEEPSEEK_V4 = "deepseek_v4_fp8"
MXFP8, MODELOPT_MXFP8 = "mxfp8", "modelopt_mxfp8"
"""The first is also the value of ``--quantization`` that quantizes a bfloat16 checkpoint at load."""

FP8_SCHEMES = ("W8A8FP8_DYNAMIC", "W8A8FP8_BLOCK")
"""Of FP8 checkpoints that are not converted: scales per channel, which ModelSlim writes too, and
per block."""

SCHEMES_OF = {MXFP8: ("W8A8_MXFP8",), MODELOPT_MXFP8: ("W8A8_MXFP8",)}
"""Schemes of the methods that have no other."""


def not_quantized(method: str, model: str) -> RefusedError:
    """The error of ``--quantization`` for weights that are not quantized; vLLM would quantize some
    when it loads them."""
    return RefusedError(
        f"--quantization {method} is for checkpoints that are quantized so, and the weights of"
        f" {model} are not; fix: remove --quantization, or quantize the weights first"
    )


def has_schemes(schemes: Iterable[str]) -> bool:
    """Whether the chip has the operators of all these schemes."""
    return {*schemes} <= {*extension.chip_family().quantization}


def check_chip(schemes: Iterable[str]) -> None:
    """Raise RefusedError if the chip does not have the operators of these schemes, by torch_npu's
    documentation."""
    found, served = extension.installation.chip_name(), extension.chip_family().quantization
    names = sorted({*schemes} - {*served})
    if found and names:
        others = [
            family.name for family in extension.CHIP_FAMILIES if {*names} <= {*family.quantization}
        ]
        several = " and ".join(filter(None, [", ".join(others[:-1]), *others[-1:]]))
        where = f"are supported on {several}" if others else "no chip has all of"
        fix = f"a checkpoint of {', '.join(served)}, or " if served else ""
        raise RefusedError(
            f"the model has weights of {', '.join(names)}, which {where}; this NPU is {found}; fix:"
            f" serve {fix}the unquantized model"
        )


def uses_weight_nz() -> bool:
    """Whether int8 matrices, of experts too, are stored in FRACTAL_NZ: the option
    ``ascend.platform.weight_nz``, or by chip."""
    asked = extension.platform_options().weight_nz
    return extension.chip().family.weight_nz if asked is None else bool(asked)


def fp8_target() -> str:
    """The form of FP8 and MXFP4 weights of the model that is being created, by the option
    ``ascend.platform.fp8``. Its ``auto`` is ``native`` where the chip multiplies them by inputs of
    the model's dtype, and ``dequantize`` elsewhere."""
    import torch

    asked = extension.platform_options().fp8
    if asked != "auto":
        return str(asked)
    # The default dtype is the model's.
    is_narrow = torch.get_default_dtype() in (torch.bfloat16, torch.float16)
    is_native = (
        extension.installation.chip_name()
        and has_schemes((*FP8_SCHEMES, "W4A8_MXFP"))
        and is_narrow
    )
    return "native" if is_native else "dequantize"
