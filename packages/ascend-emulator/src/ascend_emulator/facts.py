# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Facts of operators: arguments, dtypes, workspace, cost and communication, from facts/.

build.py compiles them: the arguments into the header that operator/signature.h includes, the other
facts into the file of stubs (operator/facts.h).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from ascend_emulator import toml

TABLES = Path(__file__).with_name("facts")
# c10::ScalarType
DTYPES = {
    "uint8": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "float16": 5,
    "float32": 6,
    "float64": 7,
    "complex64": 9,
    "complex128": 10,
    "bool": 11,
    "bfloat16": 15,
    "float4_e1m2fn_x2": 20,  # Bits4x2 (csrc/operator/tensor.cpp)
    "hifloat8": 21,  # Bits8
    "float8_e5m2": 23,
    "float8_e4m3fn": 24,
    "uint64": 29,
    "float8_e8m0fnu": 44,
    "float4_e2m1fn_x2": 45,
}
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def _table(name: str) -> dict[str, Any]:
    return toml.loads((TABLES / f"{name}.toml").read_text())


@cache
def arguments() -> dict[str, str]:
    """Operator to the letters of its arguments' C types."""
    return {f"aclnn{name}": kinds for name, kinds in _table("arguments").items()}


@cache
def dtypes() -> dict[str, list[str]]:
    """Operator to the dtypes of its first tensor."""
    return {
        f"aclnn{name}": listed.split()
        for listed, names in _table("dtypes").items()
        for name in names.split()
    }


@cache
def resources(name: str) -> dict[str, str]:
    """Workspace, cost and communication of an operator: the key of the first pattern that fits."""
    values = {"workspace": "none", "cost": "elements", "communicates": "no"}
    for fact, table in _table("resources").items():
        fits = (key for key, patterns in table.items() for p in patterns if fnmatchcase(name, p))
        values[fact] = next(fits, values[fact])
    return values


def header() -> str:
    """C++ rows of arguments, by name."""
    return "".join(f'{{"{name}", "{kinds}"}},\n' for name, kinds in sorted(arguments().items()))


def source() -> str:
    """C++ source of the other facts, by name."""
    tables = _table("resources").values()
    named = {p for table in tables for patterns in table.values() for p in patterns if "*" not in p}
    rows = []
    for name in sorted({*arguments(), *dtypes(), *named}):
        bits = sum(1 << DTYPES[SHORT.get(each, each)] for each in dtypes().get(name, ()))
        workspace, cost, communicates = resources(name).values()
        rows.append(
            f'{{"{name}", {bits}, Workspace::{workspace}, Cost::{cost},'
            f" {int(communicates == 'yes')}}},\n"
        )
    return (
        '#include "operator/facts.h"\nnamespace emu {\n'
        f"const OperatorFacts operator_facts[] = {{\n{''.join(rows)}}};\n"
        f"const size_t operators_with_facts = {len(rows)};\n}}\n"
    )
