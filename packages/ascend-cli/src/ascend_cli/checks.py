# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Checks of ``vllm-ascend doctor``, each a generator of results.

They read metadata, files and the environment. They do not import torch, torch_npu or vLLM and open
no device, so they work where these are missing or broken.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ascend_platform import extension
from ascend_platform.extension import RefusedError, installation
from packaging.version import InvalidVersion, Version

from ascend_cli import env_vars, machine, plugins, tuning
from ascend_cli.diagnostics import checks
from ascend_cli.result import Result, expect, fail, ok, warn

State = installation.State
GIB = 1 << 30
DISK, MEMORY, SHARED = 10 * GIB, 8 * GIB, GIB
"""Less than this is warned of: free disk space for models, free memory, and shared memory between
vLLM's processes."""

EXAMPLE = """--additional-config '{"ascend": {...}}'"""

Check = Callable[[argparse.Namespace], Iterable[tuple[str, str, str, str]]]


def device(arguments: argparse.Namespace) -> Iterator[Result]:
    npus, unknown = installation.npu_count()
    if unknown:
        yield fail("driver", f"the driver does not answer: {unknown}", machine.driver_fix())
    else:
        yield ok("driver", installation.driver_version() or "answers")
        yield from tuning.streams_of_graphs()
    if firmware := installation.firmware_version():
        yield ok("firmware", firmware)
    if npus == 0:
        fix = "npu-smi info; a container needs --device /dev/davinci0; on a machine without NPUs:"
        yield fail("NPUs", "none found", f"{fix} ascend-emulator run -- COMMAND")
        return
    yield ok("NPUs", " ".join(filter(None, (str(npus), installation.chip_name()))))
    listed = os.environ.get(installation.VISIBLE_NPUS)
    if listed is None:
        return
    usable = installation.visible(listed, npus)
    found, fix = installation.unused_npus(listed, npus)
    if not found:
        yield ok(installation.VISIBLE_NPUS, f"{listed}: {usable} of {npus} NPUs")
    else:
        yield (warn if usable else fail)(installation.VISIBLE_NPUS, found, fix)


def cann(arguments: argparse.Namespace) -> Iterator[Result]:
    home = installation.cann_home()
    if home is None:
        yield warn("CANN", "ASCEND_HOME_PATH is not set", machine.set_env())
    elif not home.is_dir():
        yield fail("CANN", f"ASCEND_HOME_PATH={home} does not exist", machine.set_env())
    else:
        yield ok("CANN", f"{installation.cann_version() or 'unknown version'} in {home}")
        yield from tuning.cann_for_torch_npu(installation.cann_version())
    if opp := os.environ.get("ASCEND_OPP_PATH"):
        problem = "" if Path(opp).is_dir() else f"{opp} does not exist"
        yield expect("ASCEND_OPP_PATH", opp, problem, machine.set_env())
    yield _linked("libraries that torch_npu links against")
    yield _on_path("operators (libopapi)", "libopapi")


def _on_path(title: str, library: str) -> Result:
    problem = "" if machine.has_library(library) else "not on LD_LIBRARY_PATH"
    return expect(title, "found", problem, machine.set_env())


def _linked(title: str) -> Result:
    torch_npu = installation.package("torch_npu")
    install = installation.install_command(installation.required_by_platform("torch-npu"))
    reinstall = install.replace("pip install", "pip install --force-reinstall")
    if torch_npu is None:
        return fail(title, "torch_npu is not installed", install)
    try:
        missing, other = machine.missing_libraries(torch_npu)
    except FileNotFoundError:
        fix = "apt-get install libc-bin, or dnf install glibc-common"
        return warn(title, "not checked, as ldd is missing", fix)
    of_torch = [name for name in missing if name.startswith(("libtorch", "libc10"))]
    if of_cann := [name for name in missing if name not in of_torch]:
        return fail(title, f"not found: {', '.join(of_cann)}", machine.set_env())
    if of_torch:
        return fail(title, f"not found: {', '.join(of_torch)}", reinstall)
    if other:
        return fail(title, other, "pip install --force-reinstall --no-deps torch-npu")
    return ok(title, "all found")


def versions(arguments: argparse.Namespace) -> Iterator[Result]:
    override = os.environ.get("VLLM_VERSION")
    if override is not None:
        real = installation.distributions().get("vllm")
        installed_version = real.version if real else "none"
        found = f"{override!r} replaces the version of the installed vLLM ({installed_version})"
        try:
            Version(override)
            yield ok("VLLM_VERSION", found)
        except InvalidVersion:
            yield fail("VLLM_VERSION", f"{found} and is not a version", "unset VLLM_VERSION")
            return
    for name, top in (("vllm", "vllm"), ("torch", "torch"), ("torch-npu", "torch_npu")):
        version = extension.version(name)
        install = installation.install_command(installation.required_by_platform(name))
        if not version:
            yield fail(name, "not installed", install)
        elif installation.package(top) is None:
            found = f"{version} according to its metadata, but there is no package {top}"
            yield fail(name, found, f"pip install --force-reinstall --no-deps {name}")
        elif name == "torch" and (problem := installation.cuda_torch()):
            yield fail(name, *problem)
        else:
            yield ok(name, version)
    if extensions := [*filter(extension.version, installation.BUILT_FOR_TORCH)]:
        found = ", ".join(map(extension.version, extensions))
        yield expect(
            " and ".join(extensions), found, *installation.unusable_extensions() or ("", "")
        )
    wheels: dict[installation.Problem | None, list[str]] = {}
    for name in ("torch-npu", *installation.COMPONENTS, "vllm-ascend-all"):
        if extension.version(name):
            wheels.setdefault(plugins.unmet(name), []).append(name)
    for problem, names in wheels.items():
        title = f"requirements of {', '.join(names)}"
        yield fail(title, *problem) if problem else ok(title, "met")
    for unmet in installation.all_unmet("vllm") if "vllm" in installation.distributions() else ():
        if unmet.requirement.name == "torch" and unmet.installed:
            vllm = installation.install_command(installation.required_by_platform("vllm"))
            found = f"vLLM requires {unmet.requirement}, found {unmet.installed}"
            pair = f"torch=={Version(unmet.installed).public}"
            fix = f"{vllm} {pair}, or ignore this if Compatibility lists this pair"
            yield warn("torch for vLLM", found, fix)


def installed_plugins(arguments: argparse.Namespace) -> Iterator[Result]:
    if "vllm-ascend" in installation.distributions():
        version = extension.version("vllm-ascend")
        found = f"{version} is installed too; it has plugins of the same names, and vLLM loads one"
        yield fail("vllm-ascend", f"{found} of two", "pip uninstall -y vllm-ascend")
    found_plugins, off = plugins.plugins(), dict[str, str]()
    for plugin in found_plugins:
        title = f"{plugin.name} of {plugin.distribution} {plugin.version}"
        detail = f"{plugin.state}: {plugin.why}" if plugin.why else str(plugin.state)
        # The component's own plugin, not an additional one.
        main = plugin.name in ("ascend", plugin.distribution.replace("-", "_"))
        optional = plugin.distribution not in installation.COMPONENTS or not main
        if plugin.state == State.ACTIVE or (plugin.state == State.OFF and optional):
            yield ok(title, detail)
        elif plugin.state == State.OFF and plugin.name != "ascend":
            off[plugin.name] = plugin.fix
        else:
            yield fail(title, detail, plugin.fix)
    if off:
        fix = next(filter(None, off.values()), "correct VLLM_PLUGINS")
        yield warn("filtered out by VLLM_PLUGINS", ", ".join(off), fix)
    if not any(plugin.distribution == "ascend-platform" for plugin in found_plugins):
        found = "ascend-platform has no entry point here"
        yield fail("ascend", found, "pip install ascend-platform")
    for plugin in found_plugins:
        is_platform = plugin.group == plugins.GROUPS[0] and plugin.state == State.ACTIVE
        if is_platform and plugin.name != "ascend":
            found = f"of {plugin.distribution}; vLLM refuses to start if both find their device"
            fix = f"pip uninstall -y {plugin.distribution}"
            yield warn(f"{plugin.name}, another platform", found, fix)


def triton(arguments: argparse.Namespace) -> Iterator[Result]:
    versions = {name: extension.version(name) for name in ("triton", "triton-ascend")}
    found = next((f"{name} {version}" for name, version in versions.items() if version), "")
    problem = checks.two_tritons() or ("", "")
    yield expect("triton", found or "not installed, and not needed", *problem)


def environment(arguments: argparse.Namespace) -> Iterator[Result]:
    yield from env_vars.target_device()
    yield from env_vars.plugin_filter(installation.plugin_names())
    yield from env_vars.unknown()
    yield from tuning.task_queue()
    yield from tuning.launch_blocking()
    yield from tuning.cpu_governor()
    yield from tuning.vllm_ascend()


def hccl(arguments: argparse.Namespace) -> Iterator[Result]:
    yield _on_path("libhccl.so", "libhccl")
    yield from env_vars.interfaces()
    yield from tuning.hccl(installation.npu_count()[0])


def disk_and_memory(arguments: argparse.Namespace) -> Iterator[Result]:
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        fix = "export HF_HOME=<a writable directory>"
        yield warn("model cache", f"{cache} is not writable", fix)
    else:
        fix = "export HF_HOME=<a directory on a larger disk>"
        yield _enough("model cache", _free(existing), DISK, f"free for {cache}", fix)
    fix = "end other processes, or give the container more memory"
    yield _enough("memory", machine.free_memory(), MEMORY, "free", fix)
    if (shared := Path("/dev/shm")).is_dir():
        fix = "docker run --shm-size=8g, or: mount -o remount,size=8g /dev/shm"
        yield _enough("/dev/shm", _free(shared), SHARED, "free", fix)


def _free(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _enough(title: str, free: float, wanted: int, what: str, fix: str) -> Result:
    found = f"{free / GIB:.1f} GiB {what}"
    if free >= wanted:
        return ok(title, found)
    return warn(title, f"{found}; vLLM may need {wanted // GIB} GiB", fix)


def configuration(arguments: argparse.Namespace) -> Iterator[Result]:
    if arguments.additional_config is None:
        return
    title = "--additional-config"
    try:
        config = json.loads(arguments.additional_config)
    except json.JSONDecodeError as error:
        yield fail(title, f"not valid JSON: {error}", f"{EXAMPLE}, in single quotes")
        return
    if not isinstance(config, dict):
        yield fail(title, f"not an object: {config!r}", EXAMPLE)
        return
    for key in sorted(config.keys() - {"ascend"}):
        fix = """put options of these wheels under "ascend", and remove others"""
        yield warn(f"{title}, {key!r}", "no installed wheel of ours reads this key", fix)
    plugins.plugins()  # This registers the components, and so the keys that they know.
    try:
        installation.configure_options(config)
        yield ok(title, "known keys only")
    except installation.UnknownKeyError as error:
        yield fail(title, error.problem.found, f"correct the key ({error.problem.fix})")
    except RefusedError as error:
        found, _, fix = str(error).partition("; fix: ")
        yield fail(title, found, fix or "correct the value")


CHECKS: dict[str, Check] = {
    "chip and driver": device,
    "CANN": cann,
    "versions": versions,
    "plugins": installed_plugins,
    "triton": triton,
    "environment": environment,
    "HCCL": hccl,
    "disk and memory": disk_and_memory,
    "configuration": configuration,
}
"""By category, in the order of the output."""
