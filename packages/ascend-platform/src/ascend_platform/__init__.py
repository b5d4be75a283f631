"""The Ascend NPU as a platform of vLLM: device, worker, model runner and operators."""

import functools
import importlib
import importlib.util
import os

from ascend_platform import extension

CANN_HINT = "source CANN's set_env.sh (usually /usr/local/Ascend/ascend-toolkit/set_env.sh)"


def register() -> str | None:
    """The entry point of group ``vllm.platform_plugins``.

    Returns:
        The qualified name of the platform class when torch_npu and an NPU are there; otherwise None, with the reason
        in one logged line. Never raises. Counts devices without opening one, so a child may still be forked or
        spawned with an environment of its own. vLLM calls it twice in each process (``vllm/platforms/__init__.py``).
    """
    reason = _reason_against()
    return None if reason else "ascend_platform.platform.NPUPlatform"


@functools.cache
def _reason_against() -> str:
    try:
        reason = extension.unmet("ascend-platform") or _missing_device()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        extension.logger.warning("Ascend platform not activated: %s", reason)
    return reason


def _missing_device() -> str:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; run: pip install torch-npu"
    if mismatch := extension.unmet("torch-npu"):
        return f"torch_npu {extension.version('torch-npu')} does not fit: {mismatch}"
    try:
        torch_npu = importlib.import_module("torch_npu")
    except ImportError as error:
        library, _, rest = str(error).partition(": ")
        if "cannot open shared object file" in rest:
            return f"CANN's library {library} was not found; {CANN_HINT}"
        return f"torch_npu {extension.version('torch-npu')} cannot be loaded ({error}); {CANN_HINT}"
    if torch_npu.npu.device_count() == 0:
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        restriction = "" if visible is None else f" with ASCEND_RT_VISIBLE_DEVICES={visible!r}"
        return f"no NPU is visible{restriction}; check the driver with npu-smi info"
    return ""
