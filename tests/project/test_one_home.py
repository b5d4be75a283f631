# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Facts that product code states in one module each, and the vocabulary of its messages. Chips have
modules of their own for their capabilities and their published figures."""

import ast
import re
import tomllib
from collections.abc import Callable, Iterator

import pytest
from ascend_transfer import mooncake
from harness import checkout
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

SOURCES = sorted(
    path for path in checkout.ROOT.glob("packages/*/src") if path.parent.name != "ascend-emulator"
)
CHIP = re.compile(r"Ascend ?(910|950|310)|910_9|910B|310P|Atlas A[23]")
OTHER_WORDS = re.compile("; run: ")


def strings(tree: ast.Module) -> Iterator[str]:
    """String constants other than docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            yield node.value


def names_a_chip(tree: ast.Module) -> bool:
    return any(CHIP.search(text) for text in strings(tree))


def reads_vllm_plugins(tree: ast.Module) -> bool:
    return "VLLM_PLUGINS" in strings(tree)


def reads_requirements(tree: ast.Module) -> bool:
    attributes = any(
        isinstance(node, ast.Attribute) and node.attr == "requires" for node in ast.walk(tree)
    )
    return attributes or "Requires-Dist" in strings(tree)


HOMES: dict[str, tuple[str, Callable[[ast.Module], bool]]] = {
    "chip names": ("ascend_cli/figures.py ascend_platform/chips.py", names_a_chip),
    "VLLM_PLUGINS": ("ascend_platform/plugins/plugin_filter.py", reads_vllm_plugins),
    "declared requirements": ("ascend_platform/plugins/requirements.py", reads_requirements),
}


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for source in SOURCES:
        for path in sorted(source.rglob("*.py")):
            yield str(path.relative_to(source)), ast.parse(path.read_text())


@pytest.mark.parametrize("fact", HOMES)
def test_fact_has_one_home(fact: str) -> None:
    home, states = HOMES[fact]
    assert [path for path, tree in parsed() if states(tree)] == home.split()


def test_messages_say_disabled_and_fix() -> None:
    assert [
        (path, text)
        for path, tree in parsed()
        for text in strings(tree)
        if OTHER_WORDS.search(text)
    ] == []


def test_docstrings_are_not_looked_at() -> None:
    tree = ast.parse(
        '"""On Ascend910B1."""\nNAME = "Ascend310P3"\ndef f():\n    """For Atlas A2."""\n'
    )
    assert [*strings(tree)] == ["Ascend310P3"]


def test_mooncake_that_was_tested_is_the_one_that_is_installed() -> None:
    project = tomllib.loads(
        (checkout.ROOT / "packages/ascend-kv-connector/pyproject.toml").read_text()
    )
    extras = project["project"]["optional-dependencies"]
    declared = [Requirement(each) for name in extras for each in extras[name] if "mooncake" in each]
    assert [each.name for each in declared] == list(mooncake.WHEELS[:2])
    *series, patch = Version(mooncake.TESTED).release
    after = ".".join(map(str, (*series, patch + 1)))
    for each in declared:
        assert each.specifier == SpecifierSet(f">={mooncake.TESTED},<{after}")
