# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The Ascend NPU as a platform of vLLM: device, worker, model runner and operators."""

runner_is_given = True
"""Whether VLLM_USE_V2_MODEL_RUNNER was set before this process's plugins; in a process of an engine
it is the engine's choice."""


def register() -> str | None:
    """Entry point of group ``vllm.platform_plugins``; never raises.

    Devices are counted without creating a context on one. vLLM calls it twice in each process
    (``vllm/platforms/__init__.py``).

    Returns:
        The qualified name of the platform class if torch_npu and an NPU are present; otherwise
        None, and the reason is logged in one line.
    """
    from ascend_platform import plugins

    if plugins.not_activated is None:
        plugins.not_activated = _find_reason()
        if not plugins.not_activated:
            _activate()
    return None if plugins.not_activated else "ascend_platform.platform.NPUPlatform"


def _find_reason() -> str:
    from ascend_platform.logger import logger
    from ascend_platform.plugins import NOT_ACTIVATED, requirements

    try:
        found = str(
            requirements.conflict()
            or requirements.unmet("ascend-platform")
            or _missing_device()
            or ""
        )
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found:
        logger.warning("%s: %s", NOT_ACTIVATED, found)
    return found


def _activate() -> None:
    """Prepare this process, before vLLM reads these variables, imports the platform's class and
    creates anything."""
    import os

    from ascend_platform.plugins import requirements
    from ascend_platform.process import failures, ray, scopes, sockets, watchdog

    global runner_is_given
    if requirements.version("vllm").startswith(("0.31.", "0.32.")):
        _pin(
            "VLLM_USE_V2_MODEL_RUNNER",
            "0",
            "ascend-platform uses vLLM's V1 model runner, which needs no Triton",
        )
    # Without Triton vLLM would choose V1.
    if "VLLM_USE_V2_MODEL_RUNNER" not in os.environ:
        # Until the engine is configured: see ascend_platform/config/model_runner.py.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        runner_is_given = False
    _pin(
        "VLLM_USE_BREAKABLE_CUDAGRAPH",
        "0",
        "it captures by torch.cuda; cudagraph_mode PIECEWISE splits compiled models",
    )
    _pin("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "a device context does not survive a fork")
    watchdog.exit_when_parent_exits()
    sockets.replace_foreign_directory()
    ray.keep_resource_tracker()
    failures.forget()
    failures.watch()
    for scope in scopes.scopes_here():
        scopes.enter(scope)


def _pin(variable: str, value: str, why: str) -> None:
    import os

    from ascend_platform.logger import logger

    if (given := os.environ.get(variable)) not in (None, value):
        logger.warning(
            "%s=%s is not supported on Ascend NPUs and is set to %s: %s",
            variable,
            given,
            value,
            why,
        )
    os.environ[variable] = value


def _missing_device() -> str:
    import importlib.util
    import os

    from ascend_platform import host
    from ascend_platform.plugins import requirements

    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; fix: pip install torch-npu"
    if mismatch := requirements.unmet("torch-npu"):
        return f"torch_npu {requirements.version('torch-npu')} {mismatch}"
    if problem := requirements.cuda_torch():
        return str(problem)
    try:
        import torch_npu
    except ImportError as error:
        return host.missing_library(error) or f"torch_npu cannot be loaded: {error}"
    if torch_npu.npu.device_count() == 0:
        listed, (npus, _) = os.environ.get(host.VISIBLE_NPUS), host.npu_count()
        if listed is not None and npus:
            found, fix = host.unused_npus(listed, npus)
            return f"no NPU is visible: {host.VISIBLE_NPUS}={found}; fix: {fix}"
        return "no NPU is visible; fix: check the driver with npu-smi info"
    return ""
