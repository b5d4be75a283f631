"""Names of the quantization methods, and the check of the chip."""

from __future__ import annotations

from collections.abc import Iterable

from ascend_platform import chips, extension, host

NAME = "ascend"
"""Value of ``--quantization`` for ModelSlim checkpoints."""

DESCRIPTION = "quant_model_description.json"
AWQ, GPTQ = "auto_awq", "auto_gptq"
"""vLLM's names of the methods; checkpoints have ``awq`` and ``gptq``."""

METHODS = (NAME, "compressed-tensors", AWQ, GPTQ)


def check_chip(schemes: Iterable[str]) -> None:
    """Raise RefusedError if the chip does not have the operators of these schemes, by torch_npu's documentation."""
    found, names = host.chip(), sorted(set(schemes))
    if found and names and not chips.family_of(found).quantization:
        served = " and ".join(family.name for family in chips.FAMILIES if family.quantization)
        raise extension.RefusedError(
            f"the model has weights of {', '.join(names)}, which are supported on {served}; this NPU is {found}; "
            "fix: serve the unquantized model"
        )
