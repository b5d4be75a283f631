# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Parameters of operators against op-plugin's calls, which the compiler compares
(csrc/operator/signature.h)."""

import re
import subprocess

import pytest
from ascend_emulator import build

SOURCE = """
#include "operator/signature.h"
static_assert(emu::is_called_with("aclnnMoeGatingTopK", "TTiiiiiibddTTT"));
static_assert({});
"""
TABLE = build.SOURCES / "generated" / "arguments.h"


def compiles(condition: str) -> str:
    """The compiler's errors."""
    command = [
        *build._compiler()[0],
        "-std=c++20",
        "-fsyntax-only",
        f"-I{build.SOURCES}",
        "-x",
        "c++",
        "-",
    ]
    return subprocess.run(
        command, input=SOURCE.format(condition), capture_output=True, text=True, check=False
    ).stderr


@pytest.mark.parametrize(
    "kinds", ["TTiiiiiibidTTT", "TTiiiiiibddTT", "TLiiiiiibddTTT"], ids=["double", "arity", "list"]
)
def test_another_parameter_list_does_not_compile(kinds):
    assert "static assertion failed" in compiles(
        f'emu::is_called_with("aclnnMoeGatingTopK", "{kinds}")'
    )


def test_what_is_not_known_agrees():
    assert compiles('emu::is_called_with("aclnnUnheardOf", "TT")') == ""


def test_the_table_is_sorted_and_has_most_operators():
    names = [f"aclnn{name}" for name in re.findall(r'\{"(\w+)"', TABLE.read_text())]
    assert names == sorted(names)
    operators = {
        name
        for path in (build.SOURCES / "ops").rglob("*.cpp")
        for name in re.findall(r"\b(?:OP|CHECKED|SHAPED)\(\s*(aclnn\w+)", path.read_text())
    }
    assert len(operators & {*names}) > 0.95 * len(operators)
