# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""PyTorch implementations of vLLM's Triton kernels, and their registration."""

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from vllm.triton_utils import dispatcher

from ascend_platform.overrides import guard


def register(overrides: Mapping[str, Callable[..., Any]]) -> None:
    """Let vLLM launch these functions instead of its kernels; a second call for a kernel does
    nothing.

    Raises:
        RefusedError: a kernel is missing, or its source has changed.
    """
    new = {}
    for target, kernel in overrides.items():
        guard.require(target)
        name = target.replace(":", ".")
        _, registered = dispatcher._registry.get(name, (None, None))
        if registered is not None and registered is not kernel:
            guard.report_foreign(target, registered)
        if registered is not kernel:
            new[name] = kernel
    if not new:
        return
    if (ffi := sys.modules.get("llvmlite.binding.ffi")) is not None:
        # numba's LLVM resolves every name, and vLLM reads the __dict__ of every object of every
        # module.
        getattr(ffi.lib, "_fntab", {})["__dict__"] = {}
    with warnings.catch_warnings():  # vLLM reads every name of every module, deprecated ones too.
        warnings.simplefilter("ignore")
        dispatcher.register_kernels(new)
