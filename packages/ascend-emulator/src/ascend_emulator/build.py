# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Build of the emulated CANN libraries, cached per (torch, torch_npu, compiler, source).

``libascend_emulator.so`` contains all entry points. Empty libraries with the names that torch_npu
links against or loads depend on it, because torch_npu looks up the same symbols in several
libraries.

The C++ files of several folders are compiled as one translation unit (UNITS). The sources of
operators name no header of ATen's functions: their unit includes those that it calls, because
parsing all of them (ATen/ATen.h) takes 6 s. Two headers that each of those includes and none uses
are empty (csrc/aten), which saves 3 s of each unit.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ascend_emulator import cache as cached
from ascend_emulator import (
    cann_names,
    facts,
    families,
    limits,
    rule_parameters,
    rules,
    version_files,
)
from ascend_emulator.cache import BuildError
from ascend_emulator.cache import root as cache_root

CORE = "ascend_emulator"
PREBUILT = "ascend_emulator_libs"
# The CANN version that torch_npu 2.13 was released for; aclsysGetVersionStr returns it.
CANN_VERSION = "9.1.0"
# Libraries that torch_npu's wheel links against or loads: libopapi for operators, libhcomm for
# HCCL's groups.
SONAMES = (
    "libascendcl.so",
    "libhccl.so",
    "libhcomm.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libopapi.so",
    "libatb.so",  # Linked by libop_plugin_atb.so, which is loaded with its first operator.
    "libnnopbase.so",  # for aclDestroyAclOpExecutor
    "libmsprofiler.so",  # loaded with the first profiler
    "libascend_hal.so",  # The driver: number of NPUs, for torch_npu's Python code.
    "libfmk_parser.so",  # Linked by torchair's libraries, like the next one.
    "libascend_protobuf.so",
)
FLAGS = (
    "-std=c++20",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unused-function",
    f'-DCANN_VERSION="{CANN_VERSION}"',
)
UNIT_FLAGS = (
    "-DAT_PER_OPERATOR_HEADERS",
    # Below 1 GB g++ does not collect garbage, which would take a tenth of the time.
    "--param=ggc-min-heapsize=1000000",
)
# Translation units: folders of csrc.
UNITS = {
    "runtime": ("core", "runtime"),
    "launch": ("operator",),
    "composed": ("hccl", "ops/mc2", "ops/legacy"),
    "layers": (
        *("ops/matmul", "ops/quantization", "ops/moe"),
        *("ops/normalization", "ops/transformer"),
    ),
    "nn": ("ops/math", "ops/nn", "ops/tensor"),
    "attention": ("ops/attention", "ops/atb"),
    "kernels": ("ops/rows", "ops/matmul/kernels", "ops/attention/kernels"),
}
# Operators call ATen, where their time goes: -Og compiles them in two thirds of -O1's time. Attention
# has many checks, which each update of a captured step's attention runs.
OPTIMIZATION = {
    "stubs": "-O0",
    "runtime": "-O1",
    "launch": "-O1",
    "attention": "-O1",
    "kernels": "-O3",
}
UNUSED_DAYS = 30
ERROR_LINES = 60  # of a compiler that are shown
PROCESSOR_SECONDS = 100  # Of a whole build, with g++ 12.2: 80 on an AMD EPYC with AVX-512.
COMPILER_BYTES = 1900 << 20  # Memory of one compiler process; with sanitizers twice as much.
SOURCES = Path(__file__).parent / "csrc"
ATEN = SOURCES / "aten"  # Headers in front of torch's.
# ASCEND_EMULATOR_SANITIZE: sanitizers to compile with, which `ascend-emulator run` preloads.
# Python, which leaks at exit by design, and torch are not built with them.
SANITIZERS = "address,undefined"
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_container_overflow=0:detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": f"suppressions={Path(__file__).with_name('tsan.suppressions')}",
}


def torch_dir() -> Path:
    """Directory of the installed torch package; torch is not imported."""
    return cann_names.package_dir("torch")


def cxx() -> tuple[list[str], str]:
    """Command of the compiler, with the arguments that CXX has, and its version."""
    variable = os.environ.get("CXX", "")
    chosen = [variable] if shutil.which(variable) else shlex.split(variable)
    if chosen and not shutil.which(chosen[0]):
        raise BuildError(
            f"ascend-emulator: CXX names {chosen[0]}, which is no program on PATH; fix: correct or"
            " unset CXX"
        )
    for program, *arguments in filter(None, (chosen, ["g++"], ["clang++"])):
        if path := shutil.which(program):
            command = [path, *arguments]
            version = subprocess.run(
                [*command, "--version"], capture_output=True, text=True
            ).stdout.splitlines()
            return command, " ".join([version[0] if version else "unknown", *arguments])
    raise BuildError(
        "ascend-emulator needs a C++ compiler and found none: apt-get install g++ (or dnf install"
        " gcc-c++), or set CXX; or pip install ascend-emulator[libs], which has compiled libraries"
    )


def _flags() -> tuple[str, ...]:
    chosen = os.environ.get("ASCEND_EMULATOR_SANITIZE")
    if not chosen:
        return FLAGS
    return (*FLAGS, "-g1", "-fno-omit-frame-pointer", f"-fsanitize={chosen}", "-fno-sanitize=vptr")


def sanitizer_libraries() -> list[str]:
    """Libraries to preload (LD_PRELOAD) if the emulator is built with sanitizers."""
    chosen = os.environ.get("ASCEND_EMULATOR_SANITIZE")
    if not chosen:
        return []
    names = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
    compiler, _ = cxx()

    def path(library: str) -> str:
        command = [*compiler, f"-print-file-name={library}"]
        done = subprocess.run(command, capture_output=True, text=True)
        return str(Path(done.stdout.strip()).resolve())

    return [path(names[name]) for name in chosen.split(",")]


def _digest(*parts: str | bytes) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part.encode() if isinstance(part, str) else part)
        hasher.update(b"\0")
    return hasher.hexdigest()[:16]


def units(directory: Path = SOURCES) -> dict[str, list[Path]]:
    """Translation units: name to source files."""
    return {
        name: [path for folder in folders for path in sorted((directory / folder).glob("*.cpp"))]
        for name, folders in UNITS.items()
    }


def _optimization(unit: str) -> str:
    return OPTIMIZATION.get(unit, "-Og")


def _with_headers(sources: list[Path], *folders: Path) -> list[Path]:
    """The files and the headers that they include, directly and indirectly: the emulator's and those
    in the folders."""
    files = [*sources]
    for path in files:
        for name in re.findall(r'^\s*#include "(.+?)"', path.read_text(), re.MULTILINE):
            candidates = (
                (path.parent / name).resolve(),
                *(each / name for each in (SOURCES, *folders)),
            )
            header = next(filter(Path.exists, candidates), None)
            if header and header not in files:
                files.append(header)
    return files


def _read(sources: list[Path], generated: Path) -> list[bytes]:
    """Contents of the files that a unit is compiled from, except those of torch."""
    files = (*_with_headers(sources, generated), *sorted(ATEN.rglob("*.h")))
    return [path.read_bytes() for path in files]


def _functions(unit: str, contents: list[bytes]) -> str:
    """Lines that include the headers of ATen's functions which the files of operators name; families
    of operators add the suffix of a gradient to a name."""
    if not any(folder.startswith("op") for folder in UNITS.get(unit, ())):
        return ""
    found = re.findall(rb"\w+", b"\n".join(contents))
    words = {word.decode().removesuffix("_").removesuffix("_out") for word in found}
    headers = (path.stem for path in (torch_dir() / "include/ATen/ops").glob("*.h"))
    return "".join(
        f"#include <ATen/ops/{name}.h>\n"
        for name in sorted(headers)
        if name in words or re.sub("(_backward|_forward)?(_data)?$", "", name) in words
    )


def write_generated(directory: Path) -> dict[str, list[Path]]:
    """Write what follows from tables: the header of arguments, and the sources of families, which are
    returned by unit."""
    generated = {"generated/arguments.h": facts.header()}
    sources: dict[str, list[Path]] = {}
    for table in families.tables(SOURCES):
        folder = str(table.parent.relative_to(SOURCES))
        name = f"generated/{folder}/families.cpp"
        generated[name] = families.source(table, folder)
        unit = next(unit for unit, folders in UNITS.items() if folder in folders)
        sources.setdefault(unit, []).append(directory / name)
    for name, text in generated.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return sources


def _run(what: str, command: list[str], text: str = "") -> str:
    # The umask keeps the files this user's own.
    done = subprocess.run(command, input=text, capture_output=True, text=True, umask=0o022)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        for line in lines[:ERROR_LINES]:
            cached.say_on_stderr(line)
        errors = [line for line in lines if re.search("error|undefined|multiple", line)]
        first = (errors or lines[-1:] or [""])[0]
        raise BuildError(f"ascend-emulator: {what} failed: {first}")
    return done.stdout


def _versions() -> list[str]:
    return [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "torch-npu")
        if cann_names.package_dir(name.replace("-", "_"))
    ]


def _contents() -> list[bytes]:
    """Inputs of the libraries, besides the installed torch_npu."""
    modules = ("build", "cann_names", "elf", "facts", "families", "rules", "version_files")
    inputs = [Path(__file__).with_name(f"{name}.py") for name in modules]
    inputs += [cann_names.NAMES, *sorted(facts.TABLES.iterdir()), *families.tables(SOURCES)]
    inputs += sorted(SOURCES.rglob("*.[ch]*"))
    return [rules.source().encode(), *(path.read_bytes() for path in inputs)]


def prebuilt_name(versions: list[str] | None = None) -> str:
    """Directory of these libraries in the wheel ascend-emulator-libs: of any compiler, and of torch
    in any build without CUDA."""
    versions = _versions() if versions is None else versions
    public = [version.partition("+")[0] for version in versions]
    return _digest(*public, *FLAGS, os.uname().machine, *_contents())


def _prebuilt(versions: list[str], say: Callable[[str], None]) -> Path | None:
    """The libraries in the wheel ascend-emulator-libs, if it is installed and has these."""
    spec = (
        None if os.environ.get("ASCEND_EMULATOR_SANITIZE") else importlib.util.find_spec(PREBUILT)
    )
    for place in (spec.submodule_search_locations if spec else None) or ():
        target = Path(place) / prebuilt_name(versions)
        if (target / "complete").exists():
            return target
        say(
            "ascend-emulator: ascend-emulator-libs has none for this ascend-emulator and"
            f" {', '.join(versions)}"
        )
    return None


def library_dir(progress: Callable[[str], None] | None = None) -> Path:
    """Directory of the compiled libraries, which are built if they are not cached.

    Raises:
        BuildError: torch, torch_npu or a compiler is missing, or compilation failed.
    """
    say = progress or cached.say_on_stderr
    versions = _versions()
    if (torch_dir() / "lib" / "libtorch_cuda.so").exists():
        release, pins = importlib.metadata.version("torch").partition("+")[0], []
        # Without it pip may take the CUDA build of another index, and report success.
        local = "+cpu" if os.uname().machine == "x86_64" else ""
        for name in ("torch", "torchvision", "torchaudio"):  # built for the same torch
            with suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(name).partition("+")[0]
                pins.append(f"'{name}=={version}{local}'")
        raise BuildError(
            f"ascend-emulator: torch {release} is a CUDA build, beside which torch-npu aborts;"
            " torch's CPU build is supported; fix: pip install --force-reinstall --no-deps"
            f" {' '.join(pins)} --index-url https://download.pytorch.org/whl/cpu"
        )
    if (prebuilt := _prebuilt(versions, say)) is not None:
        return prebuilt
    compiler, compiler_version = cxx()
    base = (*versions, compiler_version, *_flags(), os.uname().machine)
    target = cache_root() / _digest(*base, *_contents())
    if cached.complete(target, "complete"):
        return target
    with cached.lock(target.with_suffix(".lock"), say):  # another process may be building it
        if not cached.complete(target, "complete"):
            started = time.monotonic()
            say(
                f"ascend-emulator: compiling CANN's libraries for {', '.join(versions)}"
                f" ({compiler_version}), once ..."
            )
            _build(target, compiler, base, say)
            say(f"ascend-emulator: compiled in {time.monotonic() - started:.0f} s")
    return target


def custom_library(native: list[Path], stubs: str, headers: Path, soname: str) -> Path:
    """Directory with ``op_api/lib/soname`` of the user's C++ files and generated stubs
    (operators.py), compiled unless cached.

    Raises:
        BuildError: there is no compiler, or compilation failed.
    """
    compiler, version = cxx()
    torch = torch_dir()
    flags = (
        *FLAGS[:-1],
        "-O2",
        f"-Wl,-soname,{soname}",
        f"-I{headers}",
        f"-isystem{torch / 'include'}",
    )
    files = [path.read_bytes() for path in (*_with_headers(native), *sorted(headers.rglob("*.h")))]
    target = (
        cache_root()
        / "operators"
        / _digest(*_versions(), version, *flags, *map(str, native), stubs, *files)
    )
    library, stamps = target / "op_api" / "lib" / soname, target / "headers.json"
    with cached.lock(target.with_suffix(".lock")):
        if not cached.complete(library.parent, soname) or not _same_headers(stamps):
            cached.create(library.parent)
            generated, partial = target / "python.cpp", library.with_suffix(f".{os.getpid()}")
            generated.write_text(stubs)
            sources = [*map(str, (generated, *native))]
            libraries = (f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl")
            what = "compiling your operators"
            _run(what, [*compiler, *flags, "-shared", "-o", str(partial), *sources, *libraries])
            # Included files of any form, "…" and <…>: the rules for make, as `target: file file`.
            rules = _run(what, [*compiler, *flags, "-M", *sources]).replace("\\\n", " ")
            used = sorted({name for name in shlex.split(rules) if not name.endswith(":")})
            stamps.write_text(json.dumps({name: _stamp(Path(name)) for name in used}))
            cached.protect(target)
            partial.rename(library)
    return target


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_mtime_ns, status.st_size]


def _same_headers(stamps: Path) -> bool:
    """Whether no file has changed that was read when the user's operators were compiled."""
    try:
        return all(
            _stamp(Path(name)) == stamp for name, stamp in json.loads(stamps.read_text()).items()
        )
    except (FileNotFoundError, ValueError):
        return False


def _remove_unused(objects: Path, used: Iterable[Path]) -> None:
    """Remove object files that no build has used for UNUSED_DAYS; mark those that this one uses."""
    for path in used:
        if path.exists():
            os.utime(path)
    for path in objects.iterdir():
        with suppress(FileNotFoundError):  # removed by another process
            if time.time() - path.stat().st_mtime > UNUSED_DAYS * 86400:
                path.unlink()


def _build(
    target: Path, compiler: list[str], base: tuple[str, ...], say: Callable[[str], None]
) -> None:
    torch = torch_dir()
    objects = cache_root() / "objects"
    for directory in (target, objects):
        cached.create(directory)
        cached.check(directory)
    stubs = target / "stubs.cpp"
    stubs.write_text(cann_names.stubs(cann_names.wheel_names()) + rules.source() + facts.source())
    sources = {"stubs": [stubs], **units()}
    for unit, paths in write_generated(target).items():
        sources[unit] = [*sources[unit], *paths]
    written = {path for paths in sources.values() for path in paths}
    known = rule_parameters.parameters(written | {*SOURCES.rglob("*.h")})
    for error in rule_parameters.unbound(rules.descriptions(), known):
        raise BuildError(f"ascend-emulator: {error}")
    # A changed header rebuilds the units that include it only.
    contents = {name: _read(paths, target) for name, paths in sources.items()}
    built = {
        name: objects / f"{_digest(*base, *UNIT_FLAGS, _optimization(name), *parts)}.o"
        for name, parts in contents.items()
    }

    def compile_one(name: str) -> None:
        text = _functions(name, contents[name])
        text += "".join(f'#include "{path}"\n' for path in sources[name])
        partial = built[name].with_suffix(f".{os.getpid()}")
        command = [
            *compiler,
            *_flags(),
            _optimization(name),
            *UNIT_FLAGS,
            f"-I{SOURCES}",
            f"-I{target}",
            f"-isystem{ATEN}",
            f"-isystem{torch / 'include'}",
            # Relative file names in messages and in the registry.
            f"-ffile-prefix-map={SOURCES}/=",
            f"-ffile-prefix-map={target}/generated/=",
            *("-x", "c++", "-c", "-o", str(partial), "-"),
        ]
        _run(f"compiling {name}", command, text)
        if _read(sources[name], target) != contents[name]:
            partial.unlink()
            raise BuildError(
                f"ascend-emulator: a source file of {name} changed during compilation; start again"
            )
        partial.rename(built[name])
        done.append(name)
        passed = time.monotonic() - started
        say(
            f"ascend-emulator:   {len(done)} of {len(missing)} parts compiled after {passed:.0f} s"
            f" of about {expected:.0f} s"
        )

    _remove_unused(objects, built.values())
    missing = sorted(  # Loops take most time for their size.
        (name for name in sources if not built[name].exists()),
        key=lambda name: (_optimization(name) != "-O3", -sum(map(len, contents[name]))),
    )
    memory = COMPILER_BYTES * (2 if "ASCEND_EMULATOR_SANITIZE" in os.environ else 1)
    compilers = max(1, min(limits.cpus(), limits.memory() // memory))
    sizes = {name: sum(map(len, contents[name])) for name in sources}
    expected = (
        PROCESSOR_SECONDS * sum(map(sizes.__getitem__, missing)) / sum(sizes.values()) / compilers
    )
    started, done = time.monotonic(), list[str]()
    if missing:
        say(
            f"ascend-emulator:   {len(missing)} parts with {compilers} compilers, about"
            f" {expected:.0f} s of idle processors"
        )
    with ThreadPoolExecutor(max_workers=compilers) as pool:
        list(pool.map(compile_one, missing))

    def link(soname: str, *arguments: object) -> None:
        shared = ["-shared", f"-Wl,-soname,{soname}", "-o", target / soname, *arguments]
        _run(f"linking {soname}", [*compiler, *map(str, shared)])

    flags = [flag for flag in _flags() if "sanitize" in flag]
    if os.environ.get("ASCEND_EMULATOR_SANITIZE") == "thread":
        # Inline functions of the C++ library: those compiled with the sanitizer, not torch's.
        flags.append("-Wl,-Bsymbolic-functions")
    # No run path: torch's libraries are loaded before these (activate).
    link(f"lib{CORE}.so", *flags, *built.values(), f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10")
    for soname in SONAMES:
        link(soname, "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", f"-L{target}", f"-l{CORE}")
        # Where programs that link against CANN look for it.
        (target / "lib64").mkdir(exist_ok=True)
        (target / "lib64" / soname).unlink(missing_ok=True)
        (target / "lib64" / soname).symlink_to(Path("..", soname))
    version_files.write(target, CANN_VERSION)
    cached.protect(target)
    (target / "complete").touch(mode=0o644)
