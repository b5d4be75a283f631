"""The command ``vllm-ascend doctor``: a tick list of what has to hold before vLLM can serve, each failing line with its cure.

A check is a generator of results. It reads metadata, files and the environment; torch, torch_npu and vLLM are not imported
and no device is opened, so it works where these are missing or broken.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from ascend_platform import extension, host
from ascend_platform.cli import env_vars, plugins

CHECKS_GROUP = "vllm_ascend.checks"
GIB = 1 << 30
DISK, MEMORY, SHARED = 10 * GIB, 8 * GIB, GIB
"""Below these the doctor warns: free disk for models, free memory, and shared memory between vLLM's processes."""
MARKS = {
    "ok": ("ok  ", "\N{CHECK MARK}", "green"),
    "warn": ("warn", "!", "yellow"),
    "fail": ("FAIL", "\N{BALLOT X}", "bold red"),
}
"""The mark of each state in a pipe and on a terminal, and its style there."""


class Result(NamedTuple):
    """One line. ``state`` is ok, warn or fail; ``fix`` is the command or change that cures it."""

    title: str
    state: str
    found: str
    fix: str = ""


Line = tuple[str, str, str, str]
Check = Callable[[argparse.Namespace], Iterable[Line]]


def ok(title: str, found: str) -> Result:
    """A line with a tick."""
    return Result(title, "ok", found)


def device(options: argparse.Namespace) -> Iterator[Result]:
    npus, unknown = host.npu_count()
    if unknown:
        yield Result("driver", "fail", f"the driver does not answer: {unknown}", host.driver_fix())
    else:
        yield ok("driver", host.driver_version() or "answers")
    if npus == 0:
        fix = "npu-smi info; a container needs --device /dev/davinci0; where there is no NPU: ascend-emulator run -- COMMAND"
        yield Result("NPUs", "fail", "none found", fix)
        return
    yield ok("NPUs", " ".join(filter(None, (str(npus), host.chip()))))
    listed = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if listed is None:
        return
    usable = host.visible(listed, npus)
    ids = sorted({int(word) for word in re.findall(r"\d+", listed) if int(word) < npus})
    fix = f"export ASCEND_RT_VISIBLE_DEVICES={','.join(map(str, ids))}" if ids else "unset ASCEND_RT_VISIBLE_DEVICES"
    if usable == len(listed.split(",")):
        yield ok("ASCEND_RT_VISIBLE_DEVICES", f"{listed}: {usable} of {npus} NPUs")
    else:
        found = f"{listed!r} leaves {usable} of {npus} NPUs: ids from 0 to {npus - 1}, ascending, with commas and no blanks"
        yield Result("ASCEND_RT_VISIBLE_DEVICES", "warn" if usable else "fail", found, fix)


def cann(options: argparse.Namespace) -> Iterator[Result]:
    home = host.cann_home()
    if home is None:
        yield Result("CANN", "warn", "ASCEND_HOME_PATH is not set", host.set_env())
    elif not home.is_dir():
        yield Result("CANN", "fail", f"ASCEND_HOME_PATH={home} is not there", host.set_env())
    else:
        yield ok("CANN", f"{host.cann_version() or 'of unknown version'} in {home}")
    if opp := os.environ.get("ASCEND_OPP_PATH"):
        there = Path(opp).is_dir()
        yield ok("ASCEND_OPP_PATH", opp) if there else Result("ASCEND_OPP_PATH", "fail", f"{opp} is not there", host.set_env())
    yield _linked("libraries torch_npu links against")
    if host.has_library("libopapi"):
        yield ok("operators (libopapi)", "found")
    else:
        yield Result("operators (libopapi)", "fail", "not on LD_LIBRARY_PATH", host.set_env())


def _linked(title: str) -> Result:
    torch_npu = host.package("torch_npu")
    if torch_npu is None:
        return Result(title, "fail", "torch_npu is not installed", f"pip install '{_wanted('torch-npu')}'")
    try:
        missing, other = host.missing_libraries(torch_npu)
    except FileNotFoundError:
        return Result(title, "warn", "cannot be looked at without ldd", "apt-get install libc-bin, or dnf install glibc-common")
    of_torch = [name for name in missing if name.startswith(("libtorch", "libc10"))]
    if of_cann := [name for name in missing if name not in of_torch]:
        return Result(title, "fail", f"not found: {', '.join(of_cann)}", host.set_env())
    if of_torch:
        return Result(
            title, "fail", f"not found: {', '.join(of_torch)}", f"pip install --force-reinstall '{_wanted('torch-npu')}'"
        )
    if other:
        return Result(title, "fail", other, "pip install --force-reinstall --no-deps torch-npu")
    return ok(title, "all found")


def versions(options: argparse.Namespace) -> Iterator[Result]:
    override = os.environ.get("VLLM_VERSION")
    if override is not None:
        real = plugins.distributions().get("vllm")
        found = f"{override!r} stands for the installed {real.version if real else 'none'}"
        try:
            Version(override)
            yield ok("VLLM_VERSION", found)
        except InvalidVersion:
            yield Result("VLLM_VERSION", "fail", f"{found} and is no version", "unset VLLM_VERSION")
            return
    for name, top in (("vllm", "vllm"), ("torch", "torch"), ("torch-npu", "torch_npu")):
        if not extension.version(name):
            yield Result(name, "fail", "not installed", extension.install(name, _wanted(name)))
        elif host.package(top) is None:
            fix = f"pip install --force-reinstall --no-deps {name}"
            yield Result(name, "fail", f"{extension.version(name)} by its metadata, but there is no package {top}", fix)
        else:
            yield ok(name, extension.version(name))
    reasons: dict[tuple[str, str], list[str]] = {}
    for name in ("torch-npu", *extension.COMPONENTS, "vllm-ascend-all"):
        if extension.version(name):
            reasons.setdefault(plugins.unmet(name), []).append(name)
    for (reason, fix), names in reasons.items():
        title = f"what {', '.join(names)} require{'s' * (len(names) == 1)}"
        yield Result(title, "fail", reason, fix) if reason else ok(title, "is installed")
    for declared in importlib.metadata.requires("vllm") or [] if "vllm" in plugins.distributions() else []:
        wanted, torch = Requirement(declared), extension.version("torch")
        if wanted.name != "torch" or not torch or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
            continue
        if not wanted.specifier.contains(torch, prereleases=True):
            command = f"{extension.install('vllm', _wanted('vllm'))} torch=={Version(torch).public}"
            fix = f"{command}, or leave it if Compatibility lists this pair"
            yield Result("vLLM's torch", "warn", f"vLLM asks for {wanted} and found {torch}", fix)


def installed_plugins(options: argparse.Namespace) -> Iterator[Result]:
    if "vllm-ascend" in plugins.distributions():
        found = f"{extension.version('vllm-ascend')} is installed too; it has the same plugin names, and one of two loads"
        yield Result("vllm-ascend, the other NPU plugin", "fail", found, "pip uninstall -y vllm-ascend")
    found_plugins, off = plugins.plugins(), list[str]()
    for plugin in found_plugins:
        title, detail = f"{plugin.name} of {plugin.distribution} {plugin.version}", f"{plugin.state}: {plugin.why}".rstrip(": ")
        beside = plugin.name not in ("ascend", plugin.distribution.replace("-", "_"))  # what a component is not about
        if plugin.state == "active" or (plugin.state == "off" and (beside or plugin.distribution not in extension.COMPONENTS)):
            yield ok(title, detail)
        elif plugin.state == "off" and plugin.name != "ascend":
            off.append(plugin.name)
        else:
            yield Result(title, "fail", detail, plugin.fix)
    if off:
        yield Result("filtered out by VLLM_PLUGINS", "warn", ", ".join(off), plugins.allow(*off))
    if not any(plugin.distribution == "ascend-platform" for plugin in found_plugins):
        yield Result("ascend", "fail", "ascend-platform has no entry point here", "pip install ascend-platform")
    for plugin in found_plugins:
        if plugin.group == plugins.GROUPS[0] and plugin.state == "active" and plugin.name != "ascend":
            found = f"from {plugin.distribution}; if both find their device, vLLM refuses to start"
            yield Result(f"{plugin.name}, another platform", "warn", found, f"pip uninstall -y {plugin.distribution}")


def triton(options: argparse.Namespace | None = None) -> Iterator[Result]:
    both = {name: extension.version(name) for name in ("triton", "triton-ascend")}
    if all(both.values()):
        fix = f"pip uninstall -y triton triton-ascend && pip install --no-deps triton-ascend=={both['triton-ascend']}"
        found = f"triton {both['triton']} and triton-ascend {both['triton-ascend']} overwrite each other's files"
        yield Result("triton", "fail", found, fix)
    else:
        one = [f"{name} {version}" for name, version in both.items() if version]
        yield ok("triton", one[0] if one else "none, and none is needed")


def environment(options: argparse.Namespace) -> Iterator[Line]:
    yield from env_vars.target_device()
    yield from env_vars.plugin_names(plugins.names())
    yield from env_vars.unknown()


def hccl(options: argparse.Namespace) -> Iterator[Line]:
    if host.has_library("libhccl"):
        yield ok("libhccl.so", "found")
    else:
        yield Result("libhccl.so", "fail", "not on LD_LIBRARY_PATH", host.set_env())
    yield from env_vars.interfaces()


def check_disk_and_memory(options: argparse.Namespace) -> Iterator[Result]:
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub").expanduser()
    there = next(path for path in (cache, *cache.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        yield Result("model cache", "warn", f"{cache} cannot be written", "export HF_HOME=<a directory that can be written>")
    else:
        status = os.statvfs(there)
        free, fix = status.f_bavail * status.f_frsize, "export HF_HOME=<a directory on a larger disk>"
        yield _enough("model cache", free, DISK, f"free for {cache}", fix)
    yield _enough("memory", host.free_memory(), MEMORY, "free", "end other processes, or give the container more memory")
    if Path("/dev/shm").is_dir():
        status = os.statvfs("/dev/shm")
        fix = "docker run --shm-size=8g, or: mount -o remount,size=8g /dev/shm"
        yield _enough("/dev/shm", status.f_bavail * status.f_frsize, SHARED, "free", fix)


def configuration(options: argparse.Namespace) -> Iterator[Result]:
    if options.additional_config is None:
        return
    title = "--additional-config"
    try:
        given = json.loads(options.additional_config)
    except json.JSONDecodeError as error:
        yield Result(title, "fail", f"no JSON: {error}", """--additional-config '{"ascend": {...}}', in single quotes""")
        return
    if not isinstance(given, dict):
        yield Result(title, "fail", f"not an object: {given!r}", """--additional-config '{"ascend": {...}}'""")
        return
    for key in sorted(given.keys() - {"ascend"}):
        fix = """put what is meant for these wheels under "ascend", and remove the rest"""
        yield Result(f"{title}, {key!r}", "warn", "nothing here reads this key", fix)
    plugins.plugins()  # registers the components, and so the keys they know
    try:
        extension.configure(given)
        yield ok(title, "known keys only")
    except ValueError as error:
        found, _, fix = str(error).rpartition("; ")
        yield Result(title, "fail", found or str(error), f"correct the key ({fix})" if found else "correct the value")


CHECKS: dict[str, Check] = {
    "chip and driver": device,
    "CANN": cann,
    "versions": versions,
    "plugins": installed_plugins,
    "triton": triton,
    "environment": environment,
    "HCCL": hccl,
    "disk and memory": check_disk_and_memory,
    "configuration": configuration,
}


def diagnose(options: argparse.Namespace) -> dict[str, list[Result]]:
    """The results of every check by category.

    Another wheel adds a category by an entry point of group ``vllm_ascend.checks``: its name is the category's, and it names
    a function from the parsed arguments to tuples with the fields of :class:`Result`.
    """
    checks: dict[str, Check] = dict(CHECKS)
    for point in importlib.metadata.entry_points(group=CHECKS_GROUP):
        checks.setdefault(point.name, lambda options, point=point: point.load()(options))  # type: ignore[misc]
    return {category: _guarded(category, check, options) for category, check in checks.items()}


def _guarded(category: str, check: Check, options: argparse.Namespace) -> list[Result]:
    results: list[Result] = []
    try:
        for result in check(options):
            results.append(Result(*result))
    except Exception as error:
        found = f"could not be checked: {type(error).__name__}: {' '.join(str(error).split())}"
        results.append(Result(category, "fail", found, "report it, with the output of: vllm-ascend env"))
    return results


def _wanted(name: str) -> str:
    for declared in importlib.metadata.requires("ascend-platform") or []:
        if Requirement(declared).name == name:
            return f"{Requirement(declared).name}{Requirement(declared).specifier}"
    return name


def _enough(title: str, free: float, wanted: int, what: str, fix: str) -> Result:
    found = f"{free / GIB:.1f} GiB {what}"
    return ok(title, found) if free >= wanted else Result(title, "warn", f"{found}; vLLM may need {wanted // GIB} GiB", fix)


def add(parser: argparse.ArgumentParser) -> None:
    """Look for what keeps vLLM from serving on this machine, and say how to cure it."""
    parser.add_argument("--json", action="store_true", help="for a program to read")
    parser.add_argument("--additional-config", metavar="JSON", help="check what you would give to vllm serve by this name")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    found = diagnose(options)
    failed = sum(result.state == "fail" for results in found.values() for result in results)
    if options.json:
        lines = [{"category": category, **result._asdict()} for category, results in found.items() for result in results]
        print(json.dumps({"ok": not failed, "checks": lines}, indent=2))
    else:
        _print(found)
    return 1 if failed else 0


def _print(found: dict[str, list[Result]]) -> None:
    counts = {state: sum(result.state == state for results in found.values() for result in results) for state in MARKS}
    ending = f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed"
    show = _rich_printer() if sys.stdout.isatty() else None
    for category, results in found.items():
        if results:
            show(category, "bold") if show else print(category)
        for result in results:
            plain, mark, style = MARKS[result.state]
            show(f"  {mark} {_line(result)}", style) if show else print(f"  {plain} {_line(result)}")
    show(ending, "bold") if show else print(ending)


def _line(result: Result) -> str:
    return f"{result.title}: {result.found}" + (f"; to cure it: {result.fix}" if result.fix else "")


def _rich_printer() -> Callable[[str, str], None] | None:
    """What prints a line in a style on a terminal, or None where rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console()
    return lambda line, style: console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
