# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The commands ``vllm-ascend plugins`` and ``vllm-ascend env``: installed plugins with their
states, and the environment."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ascend_platform import extension
from ascend_platform.extension import installation

PluginFilter = installation.PluginFilter
Problem = installation.Problem
State = installation.State
Status = installation.Status

GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")
_PREFIXES = """
VLLM_ ASCEND_ HCCL_ HF_ PYTORCH_NPU_ TORCH_NPU_ TORCH_DEVICE_ TASK_QUEUE_ ATB_ GLOO_
"""
_NAMES = """
LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH OMP_NUM_THREADS CPU_AFFINITY_CONF TRANSFORMERS_OFFLINE
"""
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True)
class Plugin:
    """A plugin of vLLM: its state, the reason, and the command that makes it active."""

    name: str
    group: str
    distribution: str
    version: str
    state: State
    why: str = ""
    fix: str = ""


def plugins() -> list[Plugin]:
    """All platform plugins and general plugins of vLLM, with the states that they have in vLLM."""
    points = [(name, point) for name, point in installation.entry_points() if point.group in GROUPS]
    last = {(point.group, point.name): name for name, point in points}
    found, (fix, allowed) = [], _fix_filter()
    for name, point in points:
        status = _status(name, point, last[point.group, point.name])
        named = (point.name, point.group, name, extension.version(name))
        fixed_by = fix if status.state == State.OFF and point.name in allowed else status.fix
        found.append(Plugin(*named, status.state, status.detail, fixed_by))
    return sorted(found, key=lambda each: (GROUPS.index(each.group), each.name, each.distribution))


def unmet(distribution: str) -> Problem | None:
    """The first unmet requirement of a wheel; of vLLM's version, where VLLM_VERSION replaces it,
    the fix is to unset that."""
    first = next(installation.all_unmet(distribution), None)
    if first is None:
        return None
    if first.requirement.name == "vllm" and "VLLM_VERSION" in os.environ:
        return Problem(f"{first.problem.found} (VLLM_VERSION)", "unset VLLM_VERSION")
    return first.problem


def _fix_filter() -> tuple[str, list[str]]:
    """One command for all plugins that VLLM_PLUGINS filters out, and the names that it allows: it
    corrects the value if that is wrong, and otherwise allows all installed components."""
    filtered, known = PluginFilter.current(), installation.plugin_names()
    if wrong := filtered.problem(known):
        return wrong[0].fix, [*known] if not filtered.names else filtered.corrected(known)
    names = [name for wheel, name in installation.COMPONENTS.items() if extension.version(wheel)]
    return filtered.fix_to_allow(*names), names


def _status(distribution: str, point: importlib.metadata.EntryPoint, last: str) -> Status:
    reinstall = f"pip install --force-reinstall --no-deps {distribution}"
    if last != distribution:
        other = distribution if last in installation.COMPONENTS else last
        why = f"{last} has a plugin of the same name, and vLLM keeps one"
        return Status(State.SHADOWED, why, f"pip uninstall -y {other}")
    filtered = PluginFilter.current()
    if not filtered.allows(point.name):
        why = f"not listed in VLLM_PLUGINS={filtered.value!r}"
        if filtered.has_space_beside(point.name):
            why = "VLLM_PLUGINS has a space next to its name"
        return Status(State.OFF, why)
    # vLLM loads others whatever they require
    if distribution in installation.COMPONENTS and (problem := unmet(distribution)):
        return Status(State.DISABLED, *problem)
    if importlib.util.find_spec(point.module.partition(".")[0]) is None:
        return Status(State.BROKEN, f"there is no module {point.module}", reinstall)
    if distribution not in installation.COMPONENTS:
        return Status(State.ACTIVE)
    try:
        found = _registered(distribution, point)
    except Exception as error:
        return Status(State.BROKEN, f"{type(error).__name__}: {error}", reinstall)
    if found.state == State.DISABLED:
        fix = found.fix or installation.upgrade_command()
        return Status(found.state, found.detail, fix)
    return Status(State.ACTIVE, found.detail)


def _registered(distribution: str, point: importlib.metadata.EntryPoint) -> Status:
    """The status of a component after it is registered as by vLLM; the platform by name only, as it
    would import torch_npu."""
    extension.logger.disabled = True  # The status is what would be logged.
    try:
        if distribution == "ascend-platform":
            extension.join(distribution, point.name)
        else:
            point.load()()
    finally:
        extension.logger.disabled = False
    return installation.status(distribution)


def environment() -> dict[str, dict[str, str]]:
    """Contents of a bug report about this machine, by section."""
    npus, unknown = installation.npu_count()
    home = installation.cann_home()
    wanted = {"torch", "torch-npu", "triton", "triton-ascend", "transformers"}
    wheels = {
        name: distribution.version
        for name, distribution in sorted(installation.distributions().items())
        if name in wanted or name.startswith(("vllm", "ascend-"))
    }
    return {
        "machine": {
            "python": platform.python_version(),
            "system": platform.platform(),
            "processors": str(os.cpu_count()),
        },
        "npu": {
            "npus": f"{npus} (counted in /dev: {unknown})" if unknown else str(npus),
            "chip": installation.chip_name() or "unknown",
            "driver": installation.driver_version() or f"no {installation.DRIVER}/version.info",
            "cann": installation.cann_version() or "unknown",
            "cann home": str(home or "ASCEND_HOME_PATH is not set"),
        },
        "wheels": wheels,
        "environment": {
            name: "(hidden)" if any(word in name for word in SECRET) else value
            for name, value in sorted(os.environ.items())
            if name.startswith((*_PREFIXES.split(),)) or name in _NAMES.split()
        },
    }


def table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Lines of a table with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """List the installed plugins of vLLM, and whether each loads."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_show_plugins)


def _show_plugins(options: argparse.Namespace) -> int:
    found = plugins()
    absent = [
        name
        for name in installation.COMPONENTS
        if name not in {plugin.distribution for plugin in found}
    ]
    if options.json:
        shown = {"plugins": [asdict(plugin) for plugin in found], "absent": absent}
        print(json.dumps(shown, indent=2))
        return 0
    rows: list[tuple[str, ...]] = [("name", "wheel", "version", "group", "state", "")]
    for plugin in found:
        why = str(Problem(plugin.why, plugin.fix))
        named = (plugin.name, plugin.distribution, plugin.version, plugin.group)
        rows.append((*named, plugin.state, why))
    print("\n".join(table(rows)))
    if wrong := PluginFilter.current().problem(installation.plugin_names()):
        print(f"{installation.PLUGINS_VARIABLE}: {wrong[0]}")
    if absent:
        print(f"not installed: {', '.join(absent)}")
    return 0


def add_env(parser: argparse.ArgumentParser) -> None:
    """Print NPUs, driver, CANN, versions and environment variables for a bug report, beside vllm
    collect-env."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_show_env)


def _show_env(options: argparse.Namespace) -> int:
    found = environment()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for section, facts in found.items():
        lines = table(list(facts.items()) or [("none", "")])
        print(section, *(f"  {line}" for line in lines), sep="\n")
    return 0
