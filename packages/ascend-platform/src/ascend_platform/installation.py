# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Installed wheels, plugins, options, NPUs and CANN, as the platform sees them: the part of
``ascend_platform.extension`` for diagnostics.

The names in ``__all__`` belong to the interface. Nothing here imports torch, torch_npu or vLLM
unless its description says it.
"""

from __future__ import annotations

from packaging.version import Version

from ascend_platform import plugins
from ascend_platform.config.quantization import METHODS as QUANTIZATION_METHODS
from ascend_platform.config.quantization import SCHEME_BITS
from ascend_platform.errors import Problem
from ascend_platform.host import (
    DRIVER,
    REUSE_STREAMS,
    VISIBLE_NPUS,
    cann_home,
    cann_version,
    driver_version,
    error_chain,
    firmware_version,
    missing_library,
    npu_count,
    package,
    reuses_streams,
    through_torch_npu,
    unused_npus,
    visible,
)
from ascend_platform.host import chip as chip_name
from ascend_platform.options import UnknownKeyError
from ascend_platform.options import configure as configure_options
from ascend_platform.options import rows as option_rows
from ascend_platform.plugins import COMPONENTS, NOT_ACTIVATED, VARIABLES, requirements
from ascend_platform.plugins.builds import (
    cuda_extensions,
    cuda_torch,
    unloadable,
    unusable_extensions,
)
from ascend_platform.plugins.builds import install_command as install_extensions_command
from ascend_platform.plugins.installed import distributions
from ascend_platform.plugins.installed import names as plugin_names
from ascend_platform.plugins.installed import points as entry_points
from ascend_platform.plugins.plugin_filter import VARIABLE as PLUGINS_VARIABLE
from ascend_platform.plugins.plugin_filter import PluginFilter
from ascend_platform.plugins.registry import State, Status, status
from ascend_platform.plugins.requirements import (
    BUILT_FOR_TORCH,
    all_unmet,
    conflict,
    install_command,
    required_by_platform,
    unmet,
    upgrade_command,
)
from ascend_platform.process.sockets import is_private

__all__ = [
    "BUILT_FOR_TORCH",
    "COMPONENTS",
    "DRIVER",
    "NOT_ACTIVATED",
    "PLUGINS_VARIABLE",
    "QUANTIZATION_METHODS",
    "REUSE_STREAMS",
    "SCHEME_BITS",
    "VARIABLES",
    "VISIBLE_NPUS",
    "PluginFilter",
    "Problem",
    "State",
    "Status",
    "UnknownKeyError",
    "all_unmet",
    "architecture_refusal",
    "cann_home",
    "cann_version",
    "chip_name",
    "configure_options",
    "conflict",
    "cuda_extensions",
    "cuda_torch",
    "distributions",
    "driver_version",
    "entry_points",
    "error_chain",
    "firmware_version",
    "install_command",
    "install_extensions_command",
    "is_private",
    "missing_library",
    "not_activated",
    "npu_count",
    "option_rows",
    "package",
    "plugin_names",
    "required_by_platform",
    "reuses_streams",
    "runners",
    "status",
    "through_torch_npu",
    "timeouts",
    "unloadable",
    "unmet",
    "unusable_extensions",
    "unused_npus",
    "upgrade_command",
    "visible",
]


def not_activated() -> str | None:
    """Why this process has not activated the platform; "" if it has, None before the first call of
    ``ascend_platform.register``."""
    return plugins.not_activated


def runners() -> list[str]:
    """The model runners that engines with the installed vLLM may have, ``v1`` and ``v2``."""
    from ascend_platform.config import runners
    from ascend_platform.overrides import table

    served = {
        "v1": runners.has_v1(),
        "v2": Version(requirements.version("vllm")) >= Version(table.V2_SINCE),
    }
    return [name for name, is_served in served.items() if is_served]


def timeouts() -> dict[str, int]:
    """Seconds by the variable that sets them, of a step and of a collective; 0 is none. Imports
    nothing of vLLM."""
    from ascend_platform.config import collectives

    return {name: collectives.seconds(name) for name in (collectives.STEP, collectives.COLLECTIVE)}


def architecture_refusal(architecture: str) -> str:
    """Why a model's architecture is refused, in one line, or "". Imports torch and vLLM."""
    from ascend_platform.config.architectures import refusal

    return refusal(architecture)
