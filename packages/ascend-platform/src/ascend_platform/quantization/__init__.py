"""Quantized weights and KV caches of ModelSlim, compressed-tensors, AWQ and GPTQ checkpoints, on CANN's operators.

Each scheme is a module of ``schemes``, registered in ``registry.py``; ``formats`` has the checkpoint formats.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ascend_platform import extension
from ascend_platform.quantization.common import DESCRIPTION, NAME

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@functools.cache
def register() -> None:
    """Register the formats with vLLM, once. Imports vLLM's quantization, so call it only before a model is configured.

    Never raises: with a vLLM that lacks a name imported here, models that are not quantized still work.
    """
    try:
        import ascend_platform.quantization.formats.awq_gptq
        import ascend_platform.quantization.formats.compressed_tensors
        import ascend_platform.quantization.formats.modelslim  # noqa: F401
    except ImportError as error:
        extension.logger.warning(
            "quantized weights are not supported with vLLM %s: %s; fix: pip install --upgrade ascend-platform",
            extension.version("vllm"),
            error,
        )


def detect(vllm_config: VllmConfig) -> None:
    """Set the method for a ModelSlim checkpoint where neither the user nor the checkpoint's configuration names one.

    vLLM asks quantization configurations only about models whose ``config.json`` has a ``quantization_config``
    (``vllm/config/model.py``), and ModelSlim writes none.
    """
    from vllm.transformers_utils.repo_utils import file_or_path_exists

    model: Any = vllm_config.model_config
    if model is None or model.quantization is not None or vllm_config.quant_config is not None:
        return
    if not file_or_path_exists(model.model, DESCRIPTION, model.revision):
        return
    extension.logger.info("%s has a file %s: --quantization %s", model.model, DESCRIPTION, NAME)
    model.quantization = NAME
    vllm_config.quant_config = vllm_config.get_quantization_config(model, vllm_config.load_config)
