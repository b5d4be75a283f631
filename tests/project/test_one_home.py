"""Facts that product code states in one module each."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
CHIP = re.compile(r"Ascend ?(910|950|310)|910_9|910B|310P|Atlas A[23]")


def strings(tree: ast.Module) -> Iterator[str]:
    """String constants other than docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # a docstring
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def names_a_chip(tree: ast.Module) -> bool:
    return any(CHIP.search(text) for text in strings(tree))


HOMES: dict[str, tuple[str, Callable[[ast.Module], bool]]] = {
    "chip names": ("ascend_platform/chips.py", names_a_chip),
}


@pytest.mark.parametrize("fact", HOMES)
def test_fact_has_one_home(fact: str) -> None:
    home, states = HOMES[fact]
    found = []
    for source in sorted(package / "src" for package in PACKAGES.iterdir() if package.name != "ascend-emulator"):
        for path in sorted(source.rglob("*.py")):
            if states(ast.parse(path.read_text())):
                found.append(str(path.relative_to(source)))
    assert found == [home]
