# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Build of the emulated CANN libraries, cached per (torch, torch_npu, compiler, source).

``libascend_emulator.so`` contains all entry points. Empty libraries with the names that torch_npu
links against or loads depend on it, because torch_npu looks up the same symbols in several
libraries.

The C++ files of several folders are compiled as one translation unit (UNITS).
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
from functools import cache
from pathlib import Path

from ascend_emulator import cache as cached
from ascend_emulator import elf, limits
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
# Translation units: folders of csrc. They are few, because parsing ATen's headers takes most of the
# time. Operators that call ATen need no more than -O1; `loops` and `products` have loops of their
# own.
UNITS = {
    "core": ("core",),
    "runtime": ("runtime",),
    "hccl": ("hccl",),
    "pointwise": ("operator", "ops/math", "ops/tensor"),
    "nn": ("ops/nn", "ops/quantization"),
    "attention": ("ops/attention", "ops/atb"),
    "composed": ("ops/mc2", "ops/legacy"),
    "loops": ("ops/moe", "ops/normalization", "ops/transformer"),
    "products": ("ops/matmul", "ops/attention/kernels"),
}
# Releases of torch_npu for whose ATB parameters csrc/ops/atb has the layout: op-plugin's
# declarations of them are the same, up to new enumerators, in its releases 7.1.0 to 26.1.0. A build
# of one's own may have others.
ATB_LAYOUT = ("2.10", "2.11", "2.12", "2.13", "2.14")
UNUSED_DAYS = 30
ERROR_LINES = 60  # of a compiler that are shown
PROCESSOR_SECONDS = 320  # Seconds of a whole build, with g++ 12.2 on a server's core.
COMPILER_BYTES = 1300 << 20  # Memory of one compiler process; with sanitizers twice as much.
# Prefixes of operators: GetWorkspaceSize and the launch.
OPERATORS = ("aclnn", "Atb", "aclStft", "aclRfft1D")
SOURCES = Path(__file__).parent / "csrc"
# ASCEND_EMULATOR_SANITIZE: sanitizers to compile with, which `ascend-emulator run` preloads.
# Python, which leaks at exit by design, and torch are not built with them.
SANITIZERS = "address,undefined"
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_container_overflow=0:detect_odr_violation=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": f"suppressions={Path(__file__).with_name('tsan.suppressions')}",
}


def _package_dir(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise BuildError(
            f"ascend-emulator needs {name}, which is not installed: pip install torch==2.13.0"
            " torch-npu==2.13.0"
        )
    return Path(spec.origin).parent


def torch_dir() -> Path:
    """Directory of the installed torch package; torch is not imported."""
    return _package_dir("torch")


@cache
def wheel_names() -> list[str]:
    """All CANN names that the installed torch_npu links against or looks up (its string table)."""
    data = (_package_dir("torch_npu") / "lib" / "libtorch_npu.so").read_bytes()
    found = re.findall(
        rb"(?<![\w])((?:aclnn|aclrt|aclmdl|aclop|aclsys|aclprof|aclGet|aclSet|Hccl)[A-Z]\w+|acl[A-Z]\w+|rt[A-Z]\w{6,}|Msprof[A-Z]\w+)\0",
        data,
    )
    names = {name.decode() for name in found}
    # Nine letters ending in a capital are eight of an inlined string and the first byte of an
    # instruction ("HcclAllgH").
    names |= {
        name.decode()
        for name in re.findall(rb"\0(Atb[A-Z]\w+?)(?:GetWorkspaceSize)?(?=\0)", _atb_plugin())
    }
    return sorted(
        n for n in names if not (len(n) == 9 and (n[-1].isupper() or n.startswith("Hccl")))
    )


@cache
def public_names() -> dict[str, bool]:
    """CANN's public C functions: name to whether it returns a status. From cann_names.txt and the
    torch_npu wheel's headers."""
    lines = (
        line.split() for line in Path(__file__).with_name("cann_names.txt").read_text().splitlines()
    )
    found = {name: not rest for name, *rest in lines}
    headers = _package_dir("torch_npu") / "include" / "third_party"
    for path in sorted([*headers.glob("acl/inc/acl/**/*.h"), *headers.glob("hccl/inc/hccl/*.h")]):
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(errors="replace"), flags=re.DOTALL)
        for kind, name in re.findall(
            r"(?:ACL_FUNC_VISIBILITY|extern)\s+([\w\s*]+?)\s*\b((?:acl|Hccl)\w+)\s*\(", text
        ):
            found[name] = kind.split()[-1] in ("aclError", "HcclResult")
    return found


def _atb_plugin() -> bytes:
    return (_package_dir("torch_npu") / "lib" / "libop_plugin_atb.so").read_bytes()


@cache
def atb_operators() -> list[str]:
    """Operators that torch_npu creates by libatb.so's C++ functions: ``atb::PagedAttention`` and
    others."""
    made = re.findall(rb"\0_ZN3atb15CreateOperationINS_5infer\d+(\w+?)ParamEEEi", _atb_plugin())
    return sorted({f"atb::{name.decode()}" for name in made})


@cache
def graph_engine_names() -> list[str]:
    """C++ functions of CANN's graph engine that torchair, in torch_npu's wheel, is linked
    against."""
    return elf.missing(
        (_package_dir("torch_npu") / "dynamo/torchair/core").glob("*.so"), "_ZNK?2ge"
    )


def has_two_functions(name: str) -> bool:
    """Whether a name is an operator's: GetWorkspaceSize and the launch."""
    return name.startswith(OPERATORS) and name not in (
        "aclnnInit",
        "aclnnFinalize",
        "aclnnSetPytorchRandom",
    )


def atb_without_layout() -> list[str]:
    """ATB's operators if their parameters' layout is not known for the installed torch_npu."""
    release = re.fullmatch(
        r"(\d+\.\d+)\.\d+(rc\d+)?(\.post\d+)?", importlib.metadata.version("torch-npu")
    )
    if release and release[1] in ATB_LAYOUT:
        return []
    return [
        *atb_operators(),
        *sorted({operator(name) for name in wheel_names() if name.startswith("Atb")}),
    ]


def operator(name: str) -> str:
    """The operator of an aclnn or Atb symbol; other names are returned unchanged."""
    return re.sub(r"Get(Max)?WorkspaceSize$", "", name) if name.startswith(OPERATORS) else name


def _compiler() -> tuple[list[str], str]:
    """Command of the compiler, with the arguments that CXX has, and its version."""
    given = os.environ.get("CXX", "")
    chosen = [given] if shutil.which(given) else shlex.split(given)
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
    unknown = [name for name in chosen.split(",") if name not in names]
    if unknown:
        raise BuildError(
            f"ASCEND_EMULATOR_SANITIZE: unknown {', '.join(unknown)}; supported: {', '.join(names)}"
        )
    compiler, _ = _compiler()
    return [
        str(
            Path(
                subprocess.run(
                    [*compiler, f"-print-file-name={names[name]}"], capture_output=True, text=True
                ).stdout.strip()
            ).resolve()
        )
        for name in chosen.split(",")
    ]


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


def _optimization(unit: str) -> list[str]:
    return ["-O3"] if unit in ("loops", "products") else ["-O1"]


def _with_headers(sources: list[Path]) -> list[Path]:
    """The files and the emulator's headers that they include, directly and indirectly."""
    found: dict[Path, None] = dict.fromkeys(sources)
    for path in (queue := [*sources]):
        for name in re.findall(r'^\s*#include "(.+?)"', path.read_text(), re.MULTILINE):
            header = next(
                (
                    place
                    for place in ((path.parent / name).resolve(), SOURCES / name)
                    if place.exists()
                ),
                None,
            )
            if header and header not in found:
                found[header] = None
                queue.append(header)
    return list(found)


def _stubs(names: list[str]) -> str:
    """C++ source of weak functions that fail with their name; definitions elsewhere
    override them."""
    lines = [
        '#include "core/status.h"',
        "#define STUB(NAME) EXPORT __attribute__((weak)) int NAME() { return emu::refuse(#NAME); }",
    ]
    # GetWorkspaceSize fails with the operator's name.
    workspace = (
        "EXPORT __attribute__((weak)) int NAME##GetWorkspaceSize() { return emu::refuse(#NAME); }"
    )
    lines.append(f"#define OPERATOR(NAME) STUB(NAME) {workspace}")
    lines += [
        f'EXPORT __attribute__((weak)) int {n}() {{ return emu::refuse("{n}"); }}'
        for n in names
        if n.endswith("GetMaxWorkspaceSize")
    ]
    public = public_names()
    operators = {operator(n) for n in (*names, *public) if has_two_functions(n)}
    lines += [f"OPERATOR({name})" for name in sorted(operators)]
    lines.append(
        "#define VALUE(NAME) EXPORT __attribute__((weak)) long NAME() { return"
        " emu::refuse_value(#NAME); }"
    )
    others = {n: n not in NO_STATUS for n in names} | public
    others = {n: status for n, status in others.items() if not has_two_functions(n)}
    lines += [
        f"{'STUB' if status else 'VALUE'}({name})"
        for name, status in sorted(others.items())
        if name not in ABSENT
    ]
    # C++ functions throw: of what they return nothing is known but the name.
    lines.append(
        "#define ENGINE(SYMBOL, NAME) EXPORT __attribute__((weak)) void SYMBOL() {"
        " emu::refuse_engine(NAME); }"
    )
    lines += [f'ENGINE({symbol}, "{elf.readable(symbol)}")' for symbol in graph_engine_names()]
    return "\n".join(lines) + "\n"


# Optional calls: torch_npu works without them, as with an older CANN.
ABSENT = frozenset[str]()
# Calls that return a pointer or a bit set instead of a status, beside those in headers: they return
# 0 when they refuse.
NO_STATUS = frozenset(
    {
        "HcclGetCommConfigCapability",
        "aclCreateGraphDumpOpt",
        "aclprofCreateConfig",
        "aclprofCreateStepInfo",
    }
)


def _run(what: str, command: list[str], text: str = "") -> str:
    # The umask keeps the files this user's own.
    done = subprocess.run(command, input=text, capture_output=True, text=True, umask=0o022)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        for line in lines[:ERROR_LINES]:
            cached.say_on_stderr(line)
        first = next(
            (
                line
                for line in lines
                if "error" in line or "undefined" in line or "multiple" in line
            ),
            lines[-1] if lines else "",
        )
        raise BuildError(f"ascend-emulator: {what} failed: {first}")
    return done.stdout


def _versions() -> list[str]:
    return [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "torch-npu")
        if _package_dir(name.replace("-", "_"))
    ]


def _contents() -> list[bytes]:
    """Inputs of the libraries, besides the installed torch_npu."""
    own = [Path(__file__).with_name(name) for name in ("build.py", "elf.py", "cann_names.txt")]
    return [path.read_bytes() for path in (*own, *sorted(SOURCES.rglob("*.[ch]*")))]


def prebuilt_name(versions: list[str] | None = None) -> str:
    """Directory of these libraries in the wheel ascend-emulator-libs: of any compiler, and of torch
    in any build without CUDA."""
    public = [
        version.partition("+")[0] for version in (_versions() if versions is None else versions)
    ]
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
        release = importlib.metadata.version("torch").partition("+")[0]
        raise BuildError(
            f"ascend-emulator: torch {release} is a CUDA build, beside which torch-npu aborts;"
            f" torch's CPU build is supported; fix: pip install torch=={release}+cpu --index-url"
            " https://download.pytorch.org/whl/cpu"
        )
    if (found := _prebuilt(versions, say)) is not None:
        return found
    compiler, compiler_version = _compiler()
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
    compiler, version = _compiler()
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
    found = path.stat()
    return [found.st_mtime_ns, found.st_size]


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
    stubs.write_text(_stubs(wheel_names()))
    sources = {"stubs": [stubs], **units()}
    # A changed header rebuilds the units that include it only.
    contents = {
        name: [path.read_bytes() for path in _with_headers(paths)]
        for name, paths in sources.items()
    }
    built = {
        name: objects / f"{_digest(*base, *_optimization(name), *parts)}.o"
        for name, parts in contents.items()
    }

    def compile_one(name: str) -> None:
        text = "".join(f'#include "{path}"\n' for path in sources[name])
        partial = built[name].with_suffix(f".{os.getpid()}")
        command = [
            *compiler,
            *_flags(),
            *_optimization(name),
            f"-I{SOURCES}",
            f"-isystem{torch / 'include'}",
            # Relative file names in messages and in the registry.
            f"-ffile-prefix-map={SOURCES}/=",
            *("-x", "c++", "-c", "-o", str(partial), "-"),
        ]
        _run(f"compiling {name}", command, text)
        if [path.read_bytes() for path in _with_headers(sources[name])] != contents[name]:
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
    missing = sorted(
        (name for name in sources if not built[name].exists()),
        key=lambda name: -sum(map(len, contents[name])),
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
    core = target / f"lib{CORE}.so"
    # No run path: torch's libraries are loaded before these (activate).
    _run(
        f"linking {core.name}",
        [
            *compiler,
            *(flag for flag in _flags() if "sanitize" in flag),
            # Inline functions of the C++ library: those compiled with the sanitizer, not torch's.
            *(
                ["-Wl,-Bsymbolic-functions"]
                if os.environ.get("ASCEND_EMULATOR_SANITIZE") == "thread"
                else []
            ),
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
                *compiler,
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
        # Where programs that link against CANN look for it.
        (target / "lib64").mkdir(exist_ok=True)
        (target / "lib64" / soname).unlink(missing_ok=True)
        (target / "lib64" / soname).symlink_to(Path("..", soname))
    # Files that torch_npu expects in a CANN installation
    # (torch_npu/_init/registry/registry_manager.py).
    for name in ("runtime", "compiler", "opp"):
        (target / name).mkdir(exist_ok=True)
        # a wheel has no empty directories
        (target / name / "version.info").write_text(f"Version={CANN_VERSION}\n")
    (target / "ascend_emulator_install.info").write_text(f"version={CANN_VERSION}\n")
    cached.protect(target)
    (target / "complete").touch(mode=0o644)
