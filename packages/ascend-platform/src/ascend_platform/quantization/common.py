"""What the checkpoint formats share: the methods' names, and the check of the chip."""

from __future__ import annotations

from collections.abc import Iterable

from ascend_platform import chips, extension, host

NAME = "ascend"
"""What ``--quantization`` calls ModelSlim's checkpoints."""

DESCRIPTION = "quant_model_description.json"
METHODS = (NAME, "compressed-tensors")


def check_chip(schemes: Iterable[str]) -> None:
    """Raise RefusedError where the NPU's operators do not take these schemes, by torch_npu's documentation."""
    found, names = host.chip(), sorted(set(schemes))
    if found and names and not chips.family_of(found).quantization:
        served = " and ".join(family.name for family in chips.FAMILIES if family.quantization)
        raise extension.RefusedError(
            f"the model has weights of {', '.join(names)}, which are served on {served}; this NPU is {found}: "
            "serve the model unquantized here"
        )
