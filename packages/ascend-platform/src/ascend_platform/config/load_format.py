"""Load formats: which are served, and their options, refused before vLLM loads weights."""

from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_platform import extension


def check(load_config: Any, is_quantized: bool = False) -> None:
    """Have the options of a sibling's load format looked at here, where they can be refused in one line.

    Raises:
        RefusedError: the options, a load format whose wheel is not there, or a sharded state of quantized weights.
    """
    if is_quantized and load_config.load_format in ("sharded_state", "runai_streamer_sharded"):
        raise extension.RefusedError(
            f"--load-format {load_config.load_format} is served with weights that are not quantized: a sharded state is saved "
            "after they are processed for the NPU, and would be processed again; load the checkpoint, or take weights from a peer"
        )
    if check := extension.offered(f"load_options.{load_config.load_format}"):
        resolve_obj_by_qualname(check)(load_config.model_loader_extra_config)
    elif load_config.load_format in ("ascend_peer", "netloader"):
        raise extension.RefusedError(
            f"--load-format {load_config.load_format} is ascend-model-loader's, which is "
            f"{extension.state('ascend-model-loader')}; install it, and let VLLM_PLUGINS name ascend_model_loader"
        )
