# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Checks of the environment as vLLM's commands start, which the doctor has too."""

from __future__ import annotations

import os

from ascend_platform import extension
from ascend_platform.extension import installation

TARGET_DEVICE = "VLLM_TARGET_DEVICE"


def target_device() -> installation.Problem | None:
    """A value of VLLM_TARGET_DEVICE, which vLLM also reads at run time: cpu selects the CPU before
    vLLM loads any plugin."""
    value = os.environ.get(TARGET_DEVICE)
    if not value:
        return None
    effect = "makes vLLM use the CPU" if value == "cpu" else "is only for building vLLM"
    return installation.Problem(f"{value!r} {effect}", f"unset {TARGET_DEVICE}")


def two_tritons() -> installation.Problem | None:
    """Two wheels with a package triton."""
    both = {name: extension.version(name) for name in ("triton", "triton-ascend")}
    if not all(both.values()):
        return None
    found = " and ".join(f"{name} {version}" for name, version in both.items())
    install = f"pip install --no-deps triton-ascend=={both['triton-ascend']}"
    fix = f"pip uninstall -y triton triton-ascend && {install}"
    return installation.Problem(f"{found} overwrite each other's files", fix)
