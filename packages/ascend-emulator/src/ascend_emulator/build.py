"""Compile the emulated CANN libraries, once for each (torch, torch_npu, compiler, source) and keep them in a cache.

The result is one library, ``libascend_emulator.so``, that holds every entry point, and a handful of empty ones that carry the
names torch_npu links against and depend on it: torch_npu asks several libraries for the same symbol, and finds it through each.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from pathlib import Path

from ascend_emulator import limits

CORE = "ascend_emulator"
CANN_VERSION = "9.1.0"  # the interface that torch_npu 2.13 was released against; aclsysGetVersionStr answers the same
# What torch_npu's wheel links against, and what it opens by name: libopapi for operators, libhcomm for HCCL's groups.
SONAMES = (
    "libascendcl.so",
    "libhccl.so",
    "libhcomm.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libopapi.so",
    "libatb.so",  # what libop_plugin_atb.so links against, loaded with the first of its operators
    "libnnopbase.so",  # where it looks for aclDestroyAclOpExecutor
    "libmsprofiler.so",  # with the first profiler
    "libascend_hal.so",  # the driver, which its Python asks for the number of NPUs
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
# Most operators are calls of ATen, which better optimization makes no faster; these have loops of their own.
LOOPS = ("ops/matmul", "ops/normalization", "ops/transformer")
UNIT_BYTES = 60_000  # of source in one translation unit: ATen's headers are most of the work, and are read once for each
COMPILER_BYTES = 900 << 20  # of memory that a compiler takes
OPERATORS = ("aclnn", "Atb")  # how the names begin that stand for two functions, one of which asks for a workspace
SOURCES = Path(__file__).parent / "csrc"
# ASCEND_EMULATOR_SANITIZE: compiled with these sanitizers of the compiler, which `ascend-emulator run` then loads first. Neither
# Python, which leaks at exit by design, nor torch is built with them.
SANITIZERS = "address,undefined"
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_container_overflow=0:detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class BuildError(RuntimeError):
    """The libraries could not be built; the message is one line that says what to do."""


def _package_dir(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise BuildError(f"ascend-emulator needs {name}, which is not installed: pip install torch==2.13.0 torch-npu==2.13.0")
    return Path(spec.origin).parent


def torch_dir() -> Path:
    """Directory of the installed torch package; torch is not imported."""
    return _package_dir("torch")


@cache
def wheel_names() -> list[str]:
    """Every CANN name that the installed torch_npu can ask for: link-time symbols and look-ups by name (its string table)."""
    data = (_package_dir("torch_npu") / "lib" / "libtorch_npu.so").read_bytes()
    found = re.findall(
        rb"(?<![\w])((?:aclnn|aclrt|aclmdl|aclop|aclsys|aclprof|aclGet|aclSet|Hccl)[A-Z]\w+|acl[A-Z]\w+|rt[A-Z]\w{6,}|Msprof[A-Z]\w+)\0",
        data,
    )
    names = {name.decode() for name in found}
    # Nine letters with a capital at the end are eight of an inlined string and an instruction's first byte ("HcclAllgH").
    names |= {name.decode() for name in re.findall(rb"\0(Atb[A-Z]\w+?)(?:GetWorkspaceSize)?(?=\0)", _atb_plugin())}
    return sorted(n for n in names if not (len(n) == 9 and (n[-1].isupper() or n.startswith("Hccl"))))


def _atb_plugin() -> bytes:
    return (_package_dir("torch_npu") / "lib" / "libop_plugin_atb.so").read_bytes()


@cache
def atb_operators() -> list[str]:
    """The operators that torch_npu makes of parameters, of libatb.so's C++ functions: ``atb::PagedAttention`` and others."""
    made = re.findall(rb"\0_ZN3atb15CreateOperationINS_5infer\d+(\w+?)ParamEEEi", _atb_plugin())
    return sorted({f"atb::{name.decode()}" for name in made})


def operator(name: str) -> str:
    """The operator that an aclnn or Atb symbol belongs to; other names are their own."""
    return re.sub(r"Get(Max)?WorkspaceSize$", "", name) if name.startswith(OPERATORS) else name


def _compiler() -> tuple[str, str]:
    for candidate in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        path = shutil.which(candidate)
        if path:
            version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
            return path, version[0] if version else "unknown"
    raise BuildError(
        "ascend-emulator needs a C++ compiler and found none: apt-get install g++ (or dnf install gcc-c++), or set CXX"
    )


def _flags() -> tuple[str, ...]:
    chosen = os.environ.get("ASCEND_EMULATOR_SANITIZE")
    if not chosen:
        return FLAGS
    return (*FLAGS, "-g1", "-fno-omit-frame-pointer", f"-fsanitize={chosen}", "-fno-sanitize=vptr")


def sanitizer_libraries() -> list[str]:
    """What has to be in a process before everything else (LD_PRELOAD) if the libraries are built with sanitizers."""
    chosen = os.environ.get("ASCEND_EMULATOR_SANITIZE")
    if not chosen:
        return []
    names = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
    unknown = [name for name in chosen.split(",") if name not in names]
    if unknown:
        raise BuildError(f"ASCEND_EMULATOR_SANITIZE: unknown {', '.join(unknown)}; there are {', '.join(names)}")
    compiler, _ = _compiler()
    return [
        str(
            Path(
                subprocess.run([compiler, f"-print-file-name={names[name]}"], capture_output=True, text=True).stdout.strip()
            ).resolve()
        )
        for name in chosen.split(",")
    ]


def cache_root() -> Path:
    """``ASCEND_EMULATOR_CACHE``, else ``ascend-emulator`` in the user's cache directory."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ascend-emulator"
    return Path(os.environ.get("ASCEND_EMULATOR_CACHE") or default)


def _digest(*parts: str | bytes) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part.encode() if isinstance(part, str) else part)
        hasher.update(b"\0")
    return hasher.hexdigest()[:16]


def units(directory: Path = SOURCES) -> dict[str, list[Path]]:
    """The translation units: name to the source files that are compiled as one, those of a folder in parts of about UNIT_BYTES."""
    folders: dict[str, list[Path]] = {}
    for path in sorted(directory.rglob("*.cpp")):
        folders.setdefault(path.parent.relative_to(directory).as_posix(), []).append(path)
    found = {}
    for folder, paths in folders.items():
        sizes = [path.stat().st_size for path in paths]
        parts = math.ceil(sum(sizes) / UNIT_BYTES)
        for path, size, before in zip(paths, sizes, accumulate(sizes, initial=0), strict=False):
            part = int((before + size / 2) * parts / sum(sizes)) + 1
            found.setdefault(folder if parts == 1 else f"{folder} {part}", []).append(path)
    return found


def _with_headers(sources: list[Path]) -> list[Path]:
    """The files and, in turn, the headers of ours that they include; they are named from their directory or from SOURCES."""
    found: dict[Path, None] = dict.fromkeys(sources)
    for path in (queue := [*sources]):
        for name in re.findall(r'^\s*#include "(.+?)"', path.read_text(), re.MULTILINE):
            header = next((place for place in ((path.parent / name).resolve(), SOURCES / name) if place.exists()), None)
            if header and header not in found:
                found[header] = None
                queue.append(header)
    return list(found)


def _stubs(names: list[str]) -> str:
    """C++ text of weak functions that refuse by their own name; a real definition elsewhere takes their place."""
    lines = [
        '#include "core/status.h"',
        "#define STUB(NAME) EXPORT __attribute__((weak)) int NAME() { return emu::refuse(#NAME); }",
    ]
    # The name that is refused is the operator's, also where its workspace is asked for first.
    workspace = "EXPORT __attribute__((weak)) int NAME##GetWorkspaceSize() { return emu::refuse(#NAME); }"
    lines.append(f"#define OPERATOR(NAME) STUB(NAME) {workspace}")
    lines += [
        f'EXPORT __attribute__((weak)) int {n}() {{ return emu::refuse("{n}"); }}'
        for n in names
        if n.endswith("GetMaxWorkspaceSize")
    ]
    operators = {operator(n) for n in names if n.startswith(OPERATORS)}
    lines += [f"OPERATOR({name})" for name in sorted(operators)]
    lines += [f"STUB({name})" for name in names if not name.startswith(OPERATORS) and name not in ABSENT | NO_STATUS]
    lines += [f'EXPORT __attribute__((weak)) long {n}() {{ emu::refuse("{n}"); return 0; }}' for n in names if n in NO_STATUS]
    return "\n".join(lines) + "\n"


# Optional calls: torch_npu probes for them and does without when they are absent, as with an older CANN.
ABSENT = frozenset[str]()
# Calls that answer with a pointer or a set of features, where a status would be taken for one: they refuse with none.
NO_STATUS = frozenset({"HcclGetCommConfigCapability", "aclCreateGraphDumpOpt", "aclprofCreateConfig", "aclprofCreateStepInfo"})


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _run(what: str, command: list[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        first = next(
            (line for line in lines if "error" in line or "undefined" in line or "multiple" in line), lines[-1] if lines else ""
        )
        raise BuildError(f"ascend-emulator: {what} failed: {first}")


def library_dir(progress: Callable[[str], None] | None = None) -> Path:
    """Directory of the compiled libraries, built first if they are not in the cache.

    Raises:
        BuildError: torch, torch_npu or a compiler is missing, or a file does not compile.
    """
    say = progress or (lambda line: print(line, file=sys.stderr, flush=True))
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torch-npu") if _package_dir(name.replace("-", "_"))
    ]
    compiler, compiler_version = _compiler()
    base = (*versions, compiler_version, *_flags(), os.uname().machine)
    content = _digest(*base, Path(__file__).read_bytes(), *(path.read_bytes() for path in sorted(SOURCES.rglob("*.[ch]*"))))
    target = cache_root() / content
    if (target / "complete").exists():
        return target
    with _lock(target.with_suffix(".lock")):  # another version may compile at the same time
        if not (target / "complete").exists():
            started = time.monotonic()
            say(f"ascend-emulator: compiling CANN's libraries for {', '.join(versions)} ({compiler_version}), once ...")
            _build(target, compiler, base, say)
            say(f"ascend-emulator: compiled in {time.monotonic() - started:.0f} s")
    return target


def _build(target: Path, compiler: str, base: tuple[str, ...], say: Callable[[str], None]) -> None:
    torch = torch_dir()
    objects = cache_root() / "objects"
    for directory in (target, objects):
        directory.mkdir(parents=True, exist_ok=True)
    stubs = target / "stubs.cpp"
    stubs.write_text(_stubs(wheel_names()))
    sources = {"stubs": [stubs], **units()}
    # A header of ours counts for the units that include it alone.
    contents = {name: [path.read_bytes() for path in _with_headers(paths)] for name, paths in sources.items()}
    built = {name: objects / f"{_digest(*base, name, *parts)}.o" for name, parts in contents.items()}

    def compile_one(name: str) -> None:
        text = "".join(f'#include "{path}"\n' for path in sources[name])
        partial = built[name].with_suffix(f".{os.getpid()}")
        command = [
            compiler,
            *_flags(),
            "-O2" if name.startswith(LOOPS) else "-O1",
            f"-I{SOURCES}",
            f"-isystem{torch / 'include'}",
            f"-ffile-prefix-map={SOURCES}/=",  # so that messages name the file within the project
            *("-x", "c++", "-c", "-o", str(partial), "-"),
        ]
        _run(f"compiling {name}", command, text)
        if [path.read_bytes() for path in _with_headers(sources[name])] != contents[name]:
            partial.unlink()
            raise BuildError(f"ascend-emulator: a file of {name} changed while it was compiled; start again")
        partial.rename(built[name])
        say(f"ascend-emulator:   {name}")

    missing = sorted((name for name in sources if not built[name].exists()), key=lambda name: -sum(map(len, contents[name])))
    with ThreadPoolExecutor(max_workers=max(1, min(limits.cpus(), limits.memory() // COMPILER_BYTES))) as pool:
        list(pool.map(compile_one, missing))
    core = target / f"lib{CORE}.so"
    # No run path: torch's own libraries are in the process before these are (activate), whichever environment they came from.
    _run(
        f"linking {core.name}",
        [
            compiler,
            *(flag for flag in _flags() if "sanitize" in flag),
            "-shared",
            f"-Wl,-soname,{core.name}",
            "-o",
            str(core),
            *map(str, built.values()),
            f"-L{torch / 'lib'}",
            "-ltorch_cpu",
            "-lc10",
        ],
    )
    for soname in SONAMES:
        _run(
            f"linking {soname}",
            [
                compiler,
                "-shared",
                f"-Wl,-soname,{soname}",
                "-Wl,-rpath,$ORIGIN",
                "-Wl,--no-as-needed",
                "-o",
                str(target / soname),
                f"-L{target}",
                f"-l{CORE}",
            ],
        )
    # What torch_npu expects to find in a CANN installation (torch_npu/_init/registry/registry_manager.py).
    for name in ("runtime", "compiler", "opp"):
        (target / name).mkdir(exist_ok=True)
    (target / "ascend_emulator_install.info").write_text(f"version={CANN_VERSION}\n")
    (target / "complete").touch()
