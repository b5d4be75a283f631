"""The commands ``vllm-ascend plugins`` and ``vllm-ascend env``: what is installed, and what vLLM will make of it."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from packaging.utils import canonicalize_name

from ascend_platform import extension, host

GROUPS = ("vllm.platform_plugins", "vllm.general_plugins")
PREFIXES = ("VLLM_", "ASCEND_", "HCCL_", "HF_", "PYTORCH_NPU_", "TORCH_NPU_", "TORCH_DEVICE_", "TASK_QUEUE_", "ATB_", "GLOO_")
NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "OMP_NUM_THREADS", "CPU_AFFINITY_CONF", "TRANSFORMERS_OFFLINE")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True)
class Plugin:
    """A plugin of vLLM. ``state`` is active, off, standing aside, shadowed or broken; ``fix`` is what changes that."""

    name: str
    group: str
    distribution: str
    version: str
    state: str
    why: str = ""
    fix: str = ""


@functools.cache
def distributions() -> dict[str, importlib.metadata.Distribution]:
    """What is installed by normalized name; of two of one name, the one that Python finds first."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        if name := distribution.metadata["Name"]:
            found.setdefault(canonicalize_name(name), distribution)
    return found


def plugins() -> list[Plugin]:
    """Every plugin of vLLM's groups for platforms and general plugins, and what vLLM does with it."""
    points = [(name, point) for name, point in _points() if point.group in GROUPS]
    last = {(point.group, point.name): name for name, point in points}
    found = [
        Plugin(point.name, point.group, name, extension.version(name), *_fate(name, point, last[point.group, point.name]))
        for name, point in points
    ]
    return sorted(found, key=lambda plugin: (GROUPS.index(plugin.group), plugin.name, plugin.distribution))


def names() -> set[str]:
    """Every name that VLLM_PLUGINS may list, of whichever group."""
    return {point.name for _, point in _points() if point.group.startswith("vllm.")}


def _points() -> list[tuple[str, importlib.metadata.EntryPoint]]:
    return [(name, point) for name, distribution in distributions().items() for point in distribution.entry_points]


def allow(*wanted: str) -> str:
    """The command after which VLLM_PLUGINS lets these names load."""
    given = [word.strip() for word in os.environ.get("VLLM_PLUGINS", "").split(",")]
    return "export VLLM_PLUGINS=" + ",".join(dict.fromkeys(filter(None, [*given, *wanted])))


def unmet(distribution: str) -> tuple[str, str]:
    """The first requirement of a wheel that does not hold, and the command that cures it; both "" if all hold."""
    reason, _, fix = extension.unmet(distribution).partition("; run: ")
    if "VLLM_VERSION" in os.environ and re.match(r"it needs vllm[^-\w]", reason):
        return f"{reason} (VLLM_VERSION)", "unset VLLM_VERSION"
    return reason, fix


def _fate(distribution: str, point: importlib.metadata.EntryPoint, last: str) -> tuple[str, str, str]:
    if last != distribution:
        other = distribution if last in extension.COMPONENTS else last
        return "shadowed", f"{last} has a plugin of the same name, and vLLM keeps one", f"pip uninstall -y {other}"
    if not extension.allowed(point.name):
        given = os.environ["VLLM_PLUGINS"]
        blank = point.name in [word.strip() for word in given.split(",")]
        why = "a blank stands next to its name in VLLM_PLUGINS" if blank else f"VLLM_PLUGINS={given!r} does not name it"
        return "off", why, allow(point.name)
    reason, fix = unmet(distribution) if distribution in extension.COMPONENTS else ("", "")  # others are loaded all the same
    if reason:
        return "standing aside", reason, fix
    if importlib.util.find_spec(point.module.partition(".")[0]) is None:
        return "broken", f"there is no module {point.module}", f"pip install --force-reinstall --no-deps {distribution}"
    if distribution in extension.COMPONENTS:
        return _join(distribution, point)
    return "active", "", ""


def _join(distribution: str, point: importlib.metadata.EntryPoint) -> tuple[str, str, str]:
    """Let one of ours register, as vLLM does; the platform itself, which would import torch_npu, only by its name."""
    extension.logger.disabled = True  # what it would log is what we return
    try:
        if distribution == "ascend-platform":
            extension.join(distribution, point.name)
        else:
            point.load()()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        return "broken", why, f"pip install --force-reinstall --no-deps {distribution}"
    finally:
        extension.logger.disabled = False
    state, _, why = extension.state(distribution).partition(": ")
    if state == "standing aside":
        why, _, fix = why.partition("; run: ")
        return state, why, fix or f"pip install --upgrade {distribution}"
    return "active", state.removeprefix("active").strip(" ()"), ""


def environment() -> dict[str, dict[str, str]]:
    """What a report of a problem should say of this machine, by section."""
    npus, unknown = host.npu_count()
    home = host.cann_home()
    wanted = {"torch", "torch-npu", "triton", "triton-ascend", "transformers"}
    installed = {
        name: distribution.version
        for name, distribution in sorted(distributions().items())
        if name in wanted or name.startswith(("vllm", "ascend-"))
    }
    return {
        "machine": {"python": platform.python_version(), "system": platform.platform(), "processors": str(os.cpu_count())},
        "npu": {
            "npus": f"{npus} (counted in /dev: {unknown})" if unknown else str(npus),
            "chip": host.chip() or "unknown",
            "driver": host.driver_version() or f"no {host.DRIVER}/version.info",
            "cann": host.cann_version() or "unknown",
            "cann home": str(home or "ASCEND_HOME_PATH is not set"),
        },
        "wheels": installed,
        "environment": {
            name: "(hidden)" if any(word in name for word in SECRET) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES) or name in NAMES
        },
    }


def table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Lines of a table whose columns are as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """List the plugins of vLLM that are installed, and whether each will load."""
    parser.add_argument("--json", action="store_true", help="for a program to read")
    parser.set_defaults(run=_show_plugins)


def _show_plugins(options: argparse.Namespace) -> int:
    found = plugins()
    absent = [name for name in extension.COMPONENTS if name not in {plugin.distribution for plugin in found}]
    if options.json:
        json.dump({"plugins": [asdict(plugin) for plugin in found], "absent": absent}, sys.stdout, indent=2)
        print()
        return 0
    head = ("name", "wheel", "version", "group", "state", "")
    rows = [(plugin.name, plugin.distribution, plugin.version, plugin.group, plugin.state, _because(plugin)) for plugin in found]
    print("\n".join(table([head, *rows])))
    if absent:
        print(f"not installed: {', '.join(absent)}")
    return 0


def _because(plugin: Plugin) -> str:
    return f"{plugin.why}; run: {plugin.fix}" if plugin.fix else plugin.why


def add_env(parser: argparse.ArgumentParser) -> None:
    """Print what a report of a problem needs and vLLM's collect-env leaves out."""
    parser.add_argument("--json", action="store_true", help="for a program to read")
    parser.set_defaults(run=_show_env)


def _show_env(options: argparse.Namespace) -> int:
    found = environment()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for section, facts in found.items():
        print(section, *(f"  {line}" for line in table(list(facts.items()) or [("none", "")])), sep="\n")
    return 0
