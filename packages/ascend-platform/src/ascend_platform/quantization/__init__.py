"""Quantized weights and KV caches: ModelSlim's checkpoints and compressed-tensors', on CANN's operators.

A scheme is one small module, registered in ``registry.py``; ``formats`` has the two formats.
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
    """Register both formats with vLLM, once. Imports vLLM's quantization, so call it where a model is about to be configured.

    Never raises: in a vLLM that has other names for what is imported here, models that are not quantized are served as ever.
    """
    try:
        import ascend_platform.quantization.formats.compressed_tensors
        import ascend_platform.quantization.formats.modelslim  # noqa: F401
    except ImportError as error:
        version = extension.version("vllm")
        extension.logger.warning("quantized weights are not served with vLLM %s: %s; upgrade ascend-platform", version, error)


def detect(vllm_config: VllmConfig) -> None:
    """Take a ModelSlim checkpoint as such where neither the user nor its configuration has named a method.

    vLLM asks configurations of quantization only about models whose ``config.json`` has a ``quantization_config``
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
