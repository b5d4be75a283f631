"""The Ascend NPU as a platform of vLLM: device, worker, model runner and operators."""

_reason: str | None = None  # why the platform is not activated, "" if it is; None until asked


def register() -> str | None:
    """The entry point of group ``vllm.platform_plugins``.

    Returns:
        The qualified name of the platform class when torch_npu and an NPU are there; otherwise None, with the reason
        in one logged line. Never raises. Counts devices without opening one. vLLM calls it twice in each process
        (``vllm/platforms/__init__.py``).
    """
    global _reason
    if _reason is None:
        _reason = _find_reason()
        if not _reason:
            _enter_scopes()
    return None if _reason else "ascend_platform.platform.NPUPlatform"


def _find_reason() -> str:
    from ascend_platform import extension

    try:
        reason = extension.clash() or extension.unmet("ascend-platform") or _missing_device()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        extension.logger.warning("Ascend platform not activated: %s", reason)
    return reason


def _enter_scopes() -> None:
    from ascend_platform import extension

    for scope in extension.scopes_here():
        extension.enter(scope)


def _missing_device() -> str:
    import importlib.util
    import os

    from ascend_platform import extension, host

    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; run: pip install torch-npu"
    if mismatch := extension.unmet("torch-npu"):
        return f"torch_npu {extension.version('torch-npu')} does not fit: {mismatch}"
    try:
        import torch_npu
    except ImportError as error:
        return host.missing_library(error) or f"torch_npu cannot be loaded: {error}"
    if torch_npu.npu.device_count() == 0:
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        restriction = "" if visible is None else f" with ASCEND_RT_VISIBLE_DEVICES={visible!r}"
        return f"no NPU is visible{restriction}; check the driver with npu-smi info"
    return ""
