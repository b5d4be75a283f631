# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Operators of your own on the emulator, in C++ or Python: what an AscendC kernel computes.

``ASCEND_EMULATOR_OPERATORS`` and the entry points of the group ``ascend_emulator.operators`` name
C++ files, which use ``ascend_emulator/operator.h``, and Python files or modules, in which each
function ``aclnn…`` is an operator. They become one ``libcust_opapi.so``, where torch_npu and other
callers look operators up first. Python functions are found without importing their module: the type
annotations are the kernel's C parameters.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from ctypes import CFUNCTYPE, POINTER, c_char, c_char_p, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ascend_emulator import build

GROUP = "ascend_emulator.operators"
VARIABLE = "ASCEND_EMULATOR_OPERATORS"
SONAME = "libcust_opapi.so"
HEADERS = build.SOURCES / "include"
# Annotation: C type, class of operator.h. Arrays may be null, and are None then.
TYPES = {
    "Tensor": ("const void*", "Tensor"),
    "Tensor | None": ("const void*", "OptionalTensor"),
    "list[Tensor]": ("const void*", "Tensors"),
    "Number": ("const void*", "Scalar"),
    "list[int]": ("const void*", "Ints"),
    "list[float]": ("const void*", "Floats"),
    "list[bool]": ("const void*", "Bools"),
    "str": ("const char*", "Text"),
    "int": ("int64_t", "Integer"),
    "c_int32": ("int32_t", "Integer"),
    "c_int8": ("int8_t", "Integer"),
    "float": ("double", "Real"),
    "c_float": ("float", "Real"),
    "bool": ("bool", "Boolean"),
}
STUBS = """\
#define ASCEND_EMULATOR_NO_ATEN
#include <ascend_emulator/operator.h>
#include <dlfcn.h>
static void* find(const char* name) { return dlsym(dlopen("libascend_emulator.so", RTLD_LAZY | RTLD_NOLOAD), name); }
"""
STUB = """
extern "C" __attribute__((visibility("default"))) int {name}GetWorkspaceSize({parameters}uint64_t* workspace, void** executor) {{
  const AscendEmulatorArgument arguments[] = {{{arguments}}};
  static const auto prepare = (AscendEmulatorPreparePython*)find("ascend_emulator_prepare_python");
  return prepare("{name}", "({names})", arguments, {count}, "{function}", workspace, executor);
}}
extern "C" __attribute__((visibility("default"))) int {name}(void*, uint64_t, void* executor, void* stream) {{
  static const auto launch = (AscendEmulatorLaunch*)find("ascend_emulator_launch");
  return launch("{name}", executor, stream);
}}
"""


@dataclass(frozen=True)
class Operator:
    """An operator in Python.

    Attributes:
        name: its aclnn name, which is also the name of the function.
        where: module, or path of a Python file.
        parameters: names and keys of TYPES.
    """

    name: str
    where: str
    parameters: tuple[tuple[str, str], ...]

    def stub(self) -> str:
        """C++ source of its two functions."""
        arguments, parameters = [], []
        for name, annotation in self.parameters:
            kind, role = TYPES[annotation]
            parameters.append(f"{kind} {name}, ")
            value = {
                "Real": f"nullptr, 0, {name}",
                "Integer": f"nullptr, {name}, 0",
                "Boolean": f"nullptr, {name}, 0",
            }
            arguments.append(f"{{kAscendEmulator{role}, {value.get(role, f'{name}, 0, 0')}}}")
        return STUB.format(
            name=self.name,
            parameters="".join(parameters),
            arguments=", ".join(arguments),
            names=", ".join(name for name, _ in self.parameters),
            count=len(arguments),
            function=f"{self.where}:{self.name}",
        )


def _annotation(node: ast.expr | None) -> str:
    text = ast.unparse(node) if node else ""
    text = re.sub(r"\b(torch|typing|types|ctypes|numbers)\.", "", text.strip("'\""))
    return re.sub(r"^Optional\[(.+)\]$", r"\1 | None", text).replace("List[", "list[")


def declared(path: Path, where: str) -> list[Operator]:
    """The operators of a Python file: its functions named aclnn….

    Raises:
        BuildError: an annotation is not one of TYPES, or there is no such function.
    """
    operators = []
    for node in ast.parse(path.read_text(), str(path)).body:
        if not (isinstance(node, ast.FunctionDef) and node.name.startswith("aclnn")):
            continue
        parameters = [(each.arg, _annotation(each.annotation)) for each in node.args.args]
        for name, annotation in parameters:
            if annotation not in TYPES:
                raise build.BuildError(
                    f"{path}:{node.lineno}: parameter {name} of {node.name} has the annotation"
                    f" {annotation or 'none'!r}; supported: {', '.join(TYPES)}"
                )
        operators.append(Operator(node.name, where, tuple(parameters)))
    if not operators:
        raise build.BuildError(
            f"{path} has no function whose name starts with aclnn ({VARIABLE} or entry point"
            f" {GROUP})"
        )
    return operators


def _file(name: str) -> Path:
    """The C++ or Python file of a path or module; parent packages are not imported."""
    if name.endswith((".cpp", ".cc", ".py")) or "/" in name:
        path = Path(name).resolve()
        if path.suffix in (".cpp", ".cc", ".py") and path.exists():
            return path
        raise ValueError(
            f"{VARIABLE}: {name} is not a C++ (.cpp, .cc) or Python (.py) file, or a module"
        )
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top)
    places = [Path(place) for place in (spec.submodule_search_locations if spec else None) or ()]
    candidates = [place.joinpath(*rest) for place in places]
    files = [
        file
        for each in candidates
        for file in (each.with_suffix(".py"), each / "__init__.py", each.with_suffix(".cpp"))
    ]
    files += [Path(spec.origin)] if spec and spec.origin and not rest else []
    existing = next((path for path in files if path.is_file()), None)
    if existing is None:
        raise ValueError(
            f"{VARIABLE} or entry point {GROUP}: there is no module {name}, and no"
            f" {name.replace('.', '/')}.cpp"
        )
    return existing


def library(environ: Mapping[str, str]) -> Path | None:
    """Directory with ``op_api/lib/libcust_opapi.so`` of all declared operators, compiled unless
    cached; None if there are none.

    Raises:
        ValueError: a declared file or module is missing.
        BuildError: it is wrong, or there is no compiler.
    """
    named = [name for name in re.split(r"[:,]", environ.get(VARIABLE, "")) if name]
    named += [
        entry.value
        for entry in sorted(
            importlib.metadata.entry_points(group=GROUP), key=lambda entry: entry.value
        )
    ]
    files = {name: _file(name) for name in dict.fromkeys(named)}
    if not files:
        return None
    native = [path for path in files.values() if path.suffix != ".py"]
    python = [
        each
        for name, path in files.items()
        if path.suffix == ".py"
        for each in declared(path, _where(name, path))
    ]
    return build.custom_library(
        native, STUBS + "".join(each.stub() for each in python), HEADERS, SONAME
    )


def names(directory: Path) -> list[str]:
    """The operators in the directory of library()."""
    library = (directory / "op_api" / "lib" / SONAME).read_bytes()
    found = re.findall(rb"\0(aclnn\w+)GetWorkspaceSize(?=\0)", library)
    return sorted({name.decode() for name in found})


def _where(name: str, path: Path) -> str:
    return str(path) if name.endswith(".py") or "/" in name else name


# The rest runs in the emulated process: a stream's thread calls the Python function.


class _View(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("sizes", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("rank", c_int32),
        ("dtype", c_int32),
    )


_CALL = CFUNCTYPE(c_int, c_char_p, c_char_p, POINTER(_View), c_int, POINTER(c_char), c_int)


DTYPES = {0: "float32", 1: "float16", 2: "int8", 3: "int32", 4: "uint8", 6: "int16", 7: "uint16"}
DTYPES |= {8: "uint32", 9: "int64", 10: "uint64", 11: "float64", 12: "bool", 16: "complex64"}
DTYPES |= {17: "complex128", 27: "bfloat16", 35: "float8_e5m2", 36: "float8_e4m3fn"}
"""torch's dtype of CANN's (aclDataType)."""


@cache
def _dtypes() -> dict[int, Any]:
    import torch

    return {number: getattr(torch, name) for number, name in DTYPES.items()}


def _tensor(view: _View) -> Any:
    import torch

    if not view.sizes:
        return None
    sizes, strides = view.sizes[: view.rank], view.strides[: view.rank]
    dtype = _dtypes()[view.dtype]
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(view.data)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, strides)


@cache
def _function(name: str) -> Any:
    where, _, function = name.rpartition(":")
    if where.endswith(".py"):
        module_name = f"ascend_emulator_operators_{Path(where).stem}"
        spec = importlib.util.spec_from_file_location(module_name, where)
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    return getattr(module, function)


def _argument(value: Any, tensors: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return _tensor(tensors[value["tensor"]])
    first, count = value["tensors"]
    return [_tensor(tensors[first + each]) for each in range(count)]


def _call(function: bytes, values: bytes, tensors: Any, count: int, message: Any, size: int) -> int:
    try:
        import torch

        with torch.no_grad():
            _function(function.decode())(
                *(_argument(value, tensors) for value in json.loads(values))
            )
        return 0
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".encode()[: size - 1]
        ctypes.memmove(message, text + b"\0", len(text) + 1)
        return 1


_registered: list[Any] = []  # The callback must live as long as the process.


def register() -> None:
    """Let the emulator of this process call Python functions; the emulator does this when it first
    needs one."""
    library = ctypes.CDLL("libascend_emulator.so", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    if not _registered:
        _registered.append(_CALL(_call))
    library.ascend_emulator_set_python(_registered[0])
