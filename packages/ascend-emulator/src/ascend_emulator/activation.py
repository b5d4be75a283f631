# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Activation of the emulated libraries, in this process or in child processes."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import MutableMapping
from pathlib import Path

from ascend_emulator import (
    build,
    cann_names,
    coverage,
    laws,
    limits,
    operators,
    triton,
    variables,
)
from ascend_emulator.chips import chip, measured
from ascend_emulator.verify.report import read, title

DEFAULT_SOC = "Ascend910B1"
MOST_NPUS = 64  # With a torch_npu that does not say for how many it is compiled.
# CANN's Python binding, a top-level module as in CANN.
_PYACL = str(Path(__file__).with_name("pyacl"))
# npu-smi, msprof
_PROGRAMS = tuple(str(Path(__file__).parent / name) for name in ("bin", "tools/profiler/bin"))
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes of a size such as ``8GiB``, ``8g`` or ``8589934592``.

    Raises:
        ValueError: invalid size.
    """
    lower = text.strip().lower().removesuffix("ib").removesuffix("b") or text
    number = lower.rstrip("kmgt")
    try:
        return int(float(number) * _UNITS[lower[len(number) :]])
    except (ValueError, KeyError):
        raise ValueError(
            f"invalid memory size {text!r}; use a form such as 8GiB or 8589934592"
        ) from None


def _default_memory(capacity: int, npus: int) -> int:
    """The chip's memory, at most this machine's memory / 2 / NPUs."""
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    return min(capacity, page * pages // 2 // npus) & ~((2 << 20) - 1)


STRICT = (
    "poison device memory, report leaks at exit, name races of the host with copies, and run tasks"
    " in the order of --adversary (seed 1 unless given)"
)


def set_strict(environ: MutableMapping[str, str]) -> None:
    """Set the variables in ``environ`` that find bugs which an NPU may hide; those that are set
    already are kept."""
    for name in ("POISON", "LEAKS", "RACES", "ADVERSARY"):
        environ.setdefault(f"ASCEND_EMULATOR_{name}", "1")


# Code of this CPU that ATen, MKL and oneDNN use instead of what they would choose; the emulator's
# kernels follow ATen.
GENERIC = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
MODELLED = "; times of events, profiles and traces are modelled"


def most_npus() -> int:
    """The NPUs that a process can use: those that the installed torch_npu is compiled for.

    Raises:
        BuildError: torch_npu is not installed.
    """
    header = cann_names.package_dir("torch_npu") / "include/torch_npu/csrc/core/npu/NPUMacros.h"
    try:
        found = re.search(r"define\s+C10_COMPILE_TIME_MAX_NPUS\s+(\d+)", header.read_text())
    except OSError:
        return MOST_NPUS
    return int(found[1]) if found else MOST_NPUS


def set_environment(
    environ: MutableMapping[str, str],
    npus: int,
    soc: str,
    memory: int | None,
    times: Path | None = None,
    driver: str = "",
) -> str:
    """Set the variables in ``environ`` that emulate NPUs in processes started with it; return a
    message for the user.

    ``times`` is a report of a real NPU, which corrects the laws of modelled times (laws.toml), and
    ``driver`` the version of the driver, by default unknown.

    Raises:
        BuildError: the libraries could not be compiled.
        ValueError: ``npus``, ``soc``, ``memory`` or ``driver`` is out of range, a variable of the
            emulator is wrong, or ``times`` cannot be used.
    """
    most = most_npus()
    if not 1 <= npus <= most:
        raise ValueError(
            f"{npus} NPUs requested; supported: 1 to {most}, for which the installed torch_npu is"
            " compiled"
        )
    if driver and not re.fullmatch(r"\d+\.\d+(\.\w+)*", driver):
        raise ValueError(f"driver version {driver!r}; use a form such as 25.5.1 or 24.1.rc3")
    if driver:
        environ["ASCEND_EMULATOR_DRIVER"] = driver
    model, known, source = chip(soc), laws.laws(), ""
    if environ.get("ASCEND_EMULATOR_TIME"):
        source = MODELLED
    if times:
        report = read(times)
        model, records = measured(model, report)
        known = laws.measured(model, records)
        source += f" by times measured on {title(report)}"
    size = _default_memory(model.memory, npus) if memory is None else memory
    variables.check(environ)
    numerics = environ.get("ASCEND_EMULATOR_NUMERICS", "")
    if "generic" in numerics:
        environ.update(GENERIC)
    if size < 64 << 20:
        raise ValueError(f"{size} bytes of device memory requested; the minimum is 64 MiB")
    libraries = str(build.library_dir())
    paths = [libraries]
    if custom := operators.library(environ):
        _prepend(environ, "ASCEND_CUSTOM_OPP_PATH", str(custom))
        paths.append(
            str(custom / "op_api" / "lib")
        )  # For callers that look it up only by its name.
        environ["ASCEND_EMULATOR_CUSTOM"] = ",".join(operators.names(custom))
    _prepend(environ, "LD_LIBRARY_PATH", *paths)
    _prepend(environ, "PATH", *_PROGRAMS)
    _prepend(environ, "PYTHONPATH", _PYACL)
    environ.update(
        ASCEND_HOME_PATH=libraries,
        ASCEND_OPP_PATH=str(Path(libraries) / "opp"),
        ASCEND_EMULATOR_NPUS=str(npus),
        ASCEND_EMULATOR_SOC=model.name,
        ASCEND_EMULATOR_MEMORY=str(size),
        ASCEND_EMULATOR_CHIP=model.description(),
        ASCEND_EMULATOR_LAWS=laws.description(model, known),
        ASCEND_EMULATOR_LACKS=",".join(model.lacks),
    )
    atb = ""
    if unknown := cann_names.atb_without_layout():
        disable(environ, *unknown)
        atb = (
            f"; ATB's {len(unknown)} operators refuse: their parameters are known for torch-npu"
            f" {', '.join(cann_names.ATB_LAYOUT)}"
        )
    if sanitizers := build.sanitizer_libraries():
        _prepend(environ, "LD_PRELOAD", *sanitizers)
        for name, options in build.SANITIZER_OPTIONS.items():
            environ.setdefault(name, options)
    if any(environ.get(f"{variables.PREFIX}{name}") for name in variables.NAMES) and (
        wrong := coverage.ask("ascend_emulator_complaint", environ)
    ):
        raise ValueError(wrong)
    name = model.name if model.correlated else f"{model.name}, not correlated with hardware"
    part = "" if size == model.memory else f" of its {model.memory / 2**30:.0f} GiB"
    devices = f"{npus} emulated NPU{'s' * (npus > 1)}"
    cpu = f"computed on this CPU ({limits.vector_unit(environ)})"
    if numerics:
        cpu += f" with numerics {numerics}"
    return f"ascend-emulator: {devices} ({name}, {size / 2**30:.3g} GiB{part}), {cpu}{source}{atb}"


def disable(environ: MutableMapping[str, str], *names: str) -> None:
    """Let calls of these entry points fail, in addition to those that do already."""
    disabled = [environ.get("ASCEND_EMULATOR_WITHOUT", ""), *names]
    environ["ASCEND_EMULATOR_WITHOUT"] = ",".join(filter(None, disabled))


def _prepend(environ: MutableMapping[str, str], name: str, *paths: str) -> None:
    """Put paths in front of those that a variable has."""
    others = [each for each in environ.get(name, "").split(os.pathsep) if each]
    environ[name] = os.pathsep.join(dict.fromkeys((*paths, *others)))


def activate(npus: int = 1, soc: str = DEFAULT_SOC, memory: int | None = None) -> str:
    """Emulate ``npus`` NPUs in this process and its child processes. Must be called before torch is
    imported.

    Args:
        npus: number of NPUs, 1 to ``most_npus()``.
        soc: chip, a key of ``ascend_emulator.chips.chips()``.
        memory: bytes of device memory per NPU; by default those of the chip, or less if this
            machine has less.

    Returns:
        The message, which is also printed to stderr once.

    Raises:
        RuntimeError: torch_npu is already loaded with other libraries.
        BuildError, ValueError: see ``set_environment``.
    """
    line = set_environment(os.environ, npus, soc, memory)
    libraries = Path(os.environ["LD_LIBRARY_PATH"].split(os.pathsep)[0])
    if _PYACL not in sys.path:
        sys.path.append(_PYACL)
    if _loaded("libascend_emulator.so"):
        return line
    if "torch_npu" in sys.modules:
        raise RuntimeError(
            "ascend_emulator.activate() was called after torch_npu was loaded; fix: call it before"
            " importing torch, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 where something else imports"
            " torch first, such as a pytest plugin (-p)"
        )
    if not all(map(_loaded, build.sanitizer_libraries())):
        raise RuntimeError(
            "sanitizers must be preloaded; use `ascend-emulator run`, or tools/test --sanitize for"
            " tests"
        )
    # A loaded library satisfies a NEEDED entry of the same name; the dynamic linker reads
    # LD_LIBRARY_PATH only at start.
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(build.torch_dir() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    for name in (f"lib{build.CORE}.so", *build.SONAMES):
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
    if custom := operators.library(os.environ):
        ctypes.CDLL(str(custom / "op_api" / "lib" / operators.SONAME))
    triton.install()
    print(line, file=sys.stderr, flush=True)
    return line


def _loaded(library: str) -> bool:
    return library in Path("/proc/self/maps").read_text()
