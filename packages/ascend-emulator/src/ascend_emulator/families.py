# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Families of operators that differ by a function of ATen, from the tables beside the sources.

``families.toml`` of a folder has the operators of each macro in its ``families.h``: the name and
the macro's other arguments. build.py compiles the source that defines them with the folder's own.
"""

from __future__ import annotations

from pathlib import Path

from ascend_emulator import toml

NAME = "families.toml"


def tables(sources: Path) -> list[Path]:
    """The tables below ``csrc``."""
    return sorted(sources.rglob(NAME))


def source(table: Path, folder: str) -> str:
    """The C++ source of a table's operators."""
    calls = [
        f"{macro}({name}, {arguments})\n"
        for macro, operators in toml.loads(table.read_text()).items()
        for name, arguments in operators.items()
    ]
    return f'#include "{folder}/families.h"\n{"".join(calls)}'
