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


def not_quantized(method: str, model: str) -> RefusedError:
    """The error of ``--quantization`` for weights that are not quantized; vLLM would quantize some
    when it loads them."""
    return RefusedError(
        f"--quantization {method} is for checkpoints that are quantized so, and the weights of"
        f" {model} are not; fix: remove --quantization, or quantize the weights first"
    )


def check_chip(schemes: Iterable[str]) -> None:
    """Raise RefusedError if the chip does not have the operators of these schemes, by torch_npu's
    documentation."""
    found, served = extension.installation.chip_name(), extension.chip_family().quantization
    names = [] if served is None else sorted(set(schemes) - set(served))
    if found and names:
        others = [family.name for family in extension.CHIP_FAMILIES if family.quantization is None]
        fix = f"a checkpoint of {', '.join(served)}, or " if served else ""
        raise RefusedError(
            f"the model has weights of {', '.join(names)}, which are supported on"
            f" {' and '.join(others)}; this NPU is {found}; fix: serve {fix}the unquantized model"
        )


def uses_weight_nz() -> bool:
    """Whether int8 matrices, of experts too, are stored in FRACTAL_NZ: the option
    ``ascend.platform.weight_nz``, or by chip."""
    asked = extension.platform_options().weight_nz
    return extension.chip().family.weight_nz if asked is None else bool(asked)


def fp8_target() -> str:
    """Target of the conversion of FP8 weights at load, the model's dtype or int8: the option
    ``ascend.platform.fp8``."""
    return extension.platform_options().fp8
