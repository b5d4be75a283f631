# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Compilation of a kernel's linalg, which triton-ascend makes of it for an NPU, for this processor:
MLIR's passes of ascendnpu-ir, LLVM of triton-ascend, and the linker of the C++ compiler."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ascend_emulator import build
from ascend_emulator.cache import BuildError
from ascend_emulator.triton import llvm_ir

PASSES = (
    *("convert-elementwise-to-linalg", "eliminate-empty-tensors", "empty-tensor-to-alloc-tensor"),
    *("one-shot-bufferize=allow-return-allocs-from-loops=true", "buffer-deallocation-pipeline"),
    *("convert-linalg-to-affine-loops", "lower-affine", "convert-linalg-to-loops"),
    *("convert-scf-to-cf", "convert-cf-to-llvm", "convert-arith-to-llvm", "convert-math-to-llvm"),
    *("convert-math-to-libm", "convert-complex-to-llvm", "convert-vector-to-llvm"),
    *("convert-index-to-llvm", "memref-expand", "expand-strided-metadata"),
    *("finalize-memref-to-llvm", "convert-func-to-llvm", "lower-affine", "convert-arith-to-llvm"),
    *("reconcile-unrealized-casts", "ensure-debug-info-scope-on-llvm-func"),
)
LINES = 6  # Shown of the output of a tool.
_MODULE = re.compile(r"^module (?:attributes .*)?\{(?: loc.*)?\n", re.MULTILINE)
_FOLLOWED = re.compile(r"(%\w+) = hivm\.hir\.pointer_cast\((%\w+)\) \[[^\]]*\] : memref<\?x(\w+)>")


@functools.cache
def processor() -> tuple[str, str]:
    """LLVM's triple and name of a processor that this one can stand for."""
    machine = os.uname().machine
    if machine != "x86_64":
        return f"{machine}-unknown-linux-gnu", "generic"
    flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
    modern = {"avx2", "bmi2", "f16c", "fma", "movbe"} <= flags
    return "x86_64-unknown-linux-gnu", "x86-64-v3" if modern else "x86-64"


@functools.cache
def optimizer() -> Path:
    """The program of ascendnpu-ir that has MLIR's passes.

    Raises:
        BuildError: it is not installed.
    """
    found = importlib.util.find_spec("ascendnpuir")
    places = found.submodule_search_locations if found else None
    program = Path(places[0], "bin", "bishengir-opt") if places else None
    if not program or not program.exists():
        raise BuildError(
            "Triton's kernels need ascendnpu-ir, which is not installed; fix: pip install"
            " ascend-emulator[triton]"
        )
    return program


@functools.cache
def version() -> str:
    """A hash of what decides the code of a kernel, besides triton-ascend."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    found = optimizer().stat()
    parts = (sources, found.st_size, found.st_mtime_ns, processor(), build.library_dir())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def run(what: str, *command: object) -> None:
    """Run a tool.

    Raises:
        BuildError: it failed.
    """
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()
        raise BuildError(f"{what} failed: {' '.join(map(str.strip, lines[:LINES]))}")


def _prepared(linalg: str) -> str:
    """Without what is for NPUs only; addresses that a kernel reads from memory become calls."""
    function = f"{llvm_ir.PREFIX}follow"
    dtypes = sorted({found[3] for found in _FOLLOWED.finditer(linalg)})
    linalg = _FOLLOWED.sub(rf"\1 = func.call @{function}_\3(\2) : (i64) -> memref<?x\3>", linalg)
    declared = "".join(
        f"  func.func private @{function}_{dtype}(i64) -> memref<?x{dtype}>\n" for dtype in dtypes
    )
    linalg = _MODULE.sub(lambda found: found[0] + declared, linalg, count=1)
    return re.sub(r"^\s*(?:annotation\.mark|gpu\.barrier)\b.*\n", "", linalg, flags=re.MULTILINE)


def compiled(linalg: str, metadata: dict[str, Any]) -> bytes:
    """A shared library of the kernel; its name is added to ``metadata``.

    Raises:
        BuildError: the kernel has a form that is not supported, or a tool failed.
    """
    from triton._C.libtriton import ir, llvm

    name = re.search(r"func\.func @(\w+)", linalg)
    if not name:
        raise BuildError("triton-ascend's compiler returned no kernel")
    metadata.update(kernel_name=name[1], name=f"{name[1]} aiv", shared=1, mix_mode="aiv")
    metadata.update(parallel_mode="simd", tensor_kinds=[])
    triple, cpu = processor()
    with tempfile.TemporaryDirectory() as directory:
        given, lowered, code, library = (
            Path(directory, f"kernel.{suffix}") for suffix in ("mlir", "llvm.mlir", "o", "so")
        )
        given.write_text(_prepared(linalg))
        options = ("--allow-unregistered-dialect", "--mlir-print-debuginfo", "-o", lowered)
        passes = [f"--{each}" for each in PASSES]
        run(f"bishengir-opt of kernel {name[1]}", optimizer(), given, *passes, *options)
        llvm.init_targets()
        context = ir.context()
        ir.load_dialects(context)
        module = llvm.to_module(ir.parse_mlir_module(str(lowered), context), llvm.context())
        llvm.attach_datalayout(module, triple, cpu, "")
        llvm.optimize_module(module, llvm.OPTIMIZE_O2)
        text = llvm_ir.with_checks(str(module))
        code.write_bytes(llvm.translate_to_asm(text, triple, cpu, "", [], False, True))
        # Its own symbols first: a kernel may be called as a function of libm.
        flags = ("-shared", "-Wl,-Bsymbolic", f"-L{build.library_dir()}", f"-l{build.CORE}", "-lm")
        run(f"linking kernel {name[1]}", *build.cxx()[0], code, "-o", library, *flags)
        return library.read_bytes()
