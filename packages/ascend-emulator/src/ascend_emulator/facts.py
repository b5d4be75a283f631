# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Facts of operators: arguments, dtypes, workspace and communication, from the tables in facts/.

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
    "bf16": 15,
    "fp16": 5,
    "fp32": 6,
    "fp64": 7,
    "uint8": 0,
    "int8": 1,
    "int16": 2,
    "int32": 3,
    "int64": 4,
    "bool": 11,
    "complex64": 9,
    "complex128": 10,
}


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


def _value(table: dict[str, list[str]], name: str, default: str) -> str:
    """The key of the first pattern that a name has."""
    fits = (key for key, patterns in table.items() for p in patterns if fnmatchcase(name, p))
    return next(fits, default)


def header() -> str:
    """C++ rows of arguments, by name."""
    return "".join(f'{{"{name}", "{kinds}"}},\n' for name, kinds in sorted(arguments().items()))


def source() -> str:
    """C++ source of the other facts, by name."""
    resources = _table("resources")
    named = [p for table in resources.values() for patterns in table.values() for p in patterns]
    rows = []
    for name in sorted({*arguments(), *dtypes(), *(name for name in named if "*" not in name)}):
        bits = sum(1 << DTYPES[each] for each in dtypes().get(name, ()))
        workspace = _value(resources["workspace"], name, "none")
        communicates = _value(resources["communicates"], name, "no") == "yes"
        if bits or communicates or workspace != "none":
            rows.append(f'{{"{name}", {bits}, Workspace::{workspace}, {int(communicates)}}},\n')
    return (
        '#include "operator/facts.h"\nnamespace emu {\n'
        f"const OperatorFacts operator_facts[] = {{\n{''.join(rows)}}};\n"
        f"const size_t operators_with_facts = {len(rows)};\n}}\n"
    )
