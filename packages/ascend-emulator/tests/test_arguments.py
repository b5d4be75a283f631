# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Parameters of operators against op-plugin's calls, which the compiler compares
(csrc/operator/signature.h)."""

import re
import subprocess
from pathlib import Path

import pytest
from ascend_emulator import build, facts

SOURCE = """
#include "operator/signature.h"
static_assert(emu::is_called_with("aclnnMoeGatingTopK", "TTiiiiiibddTTT"));
static_assert({});
"""


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    directory = tmp_path_factory.mktemp("headers")
    build.write_generated(directory)
    return directory


def compiles(condition: str, generated: Path) -> str:
    """The compiler's errors."""
    command = [
        *build.cxx()[0],
        "-std=c++20",
        "-fsyntax-only",
        f"-I{build.SOURCES}",
        f"-I{generated}",
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
def test_another_parameter_list_does_not_compile(kinds, generated):
    assert "static assertion failed" in compiles(
        f'emu::is_called_with("aclnnMoeGatingTopK", "{kinds}")', generated
    )


def test_what_is_not_known_agrees(generated):
    assert compiles('emu::is_called_with("aclnnUnheardOf", "TT")', generated) == ""


def test_the_tables_are_sorted_and_have_most_operators():
    for rows in (facts.header(), facts.source()):
        names = re.findall(r'^\{"(.+?)"', rows, re.MULTILINE)
        assert names == sorted({*names})
    names = facts.arguments()
    operators = {
        name
        for path in (build.SOURCES / "ops").rglob("*.cpp")
        for name in re.findall(r"\b(?:OP|CHECKED|SHAPED)\(\s*(aclnn\w+)", path.read_text())
    }
    assert len(operators & {*names}) > 0.95 * len(operators)
