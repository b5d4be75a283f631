"""Load formats: which are supported, and their options, checked before vLLM loads weights."""

from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_platform import extension
from ascend_platform.components import registry


def check(load_config: Any, is_quantized: bool = False) -> None:
    """Check --load-format, and its options by the function that its component offers.

    Raises:
        RefusedError: wrong options, a load format whose component is not active, or a sharded state of quantized weights.
    """
    if is_quantized and load_config.load_format in ("sharded_state", "runai_streamer_sharded"):
        raise extension.RefusedError(
            f"--load-format {load_config.load_format} supports unquantized weights: a sharded state is saved after the weights "
            "are processed for the NPU, and loading would process them again; load the checkpoint, or load weights from a peer"
        )
    if check := extension.offered(f"load_options.{load_config.load_format}"):
        resolve_obj_by_qualname(check)(load_config.model_loader_extra_config)
    elif load_config.load_format in ("ascend_peer", "netloader"):
        needed = registry.with_state("ascend-model-loader")
        raise extension.RefusedError(f"--load-format {load_config.load_format} needs {needed}")
