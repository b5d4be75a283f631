# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Registration of the platform in a process: whether it can serve, and what it prepares if so."""

from __future__ import annotations

import importlib.util
import os

from ascend_platform import host
from ascend_platform.logger import logger
from ascend_platform.plugins import NOT_ACTIVATED, builds, requirements
from ascend_platform.process import environment


def reason_against() -> str:
    """Why the platform cannot serve here, also as one log line; "" if it can. Never raises."""
    try:
        problem = requirements.conflict() or requirements.unmet("ascend-platform")
        reason = str(problem or _missing_device())
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        logger.warning("%s: %s", NOT_ACTIVATED, reason)
    return reason


def prepare_process() -> None:
    """Prepare this process, before vLLM reads these variables, imports the platform's class and
    creates anything."""
    from ascend_platform.process import diagnostics, ray, scopes, sockets, watchdog

    if requirements.version("vllm").startswith(("0.31.", "0.32.")):
        _pin(
            environment.RUNNER,
            "0",
            "ascend-platform uses vLLM's V1 model runner, which needs no Triton",
        )
    environment.note_runner()
    _pin(
        "VLLM_USE_BREAKABLE_CUDAGRAPH",
        "0",
        "it captures by torch.cuda; cudagraph_mode PIECEWISE splits compiled models",
    )
    _pin("VLLM_WORKER_MULTIPROC_METHOD", "spawn", "a device context does not survive a fork")
    watchdog.exit_when_parent_exits()
    sockets.replace_foreign_directory()
    ray.keep_resource_tracker()
    diagnostics.watch()
    for scope in scopes.scopes_here():
        scopes.enter(scope)


def _pin(variable: str, value: str, why: str) -> None:
    if (found := os.environ.get(variable)) not in (None, value):
        text = "%s=%s is not supported on Ascend NPUs and is set to %s: %s"
        logger.warning(text, variable, found, value, why)
    os.environ[variable] = value


def _missing_device() -> str:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed; fix: pip install torch-npu"
    if mismatch := requirements.unmet("torch-npu"):
        return f"torch_npu {requirements.version('torch-npu')} {mismatch}"
    if problem := builds.cuda_torch():
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
