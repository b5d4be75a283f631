# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Refused configurations: each message names the change that fixes it."""

import ast
from collections.abc import Iterator

from harness import checkout

SOURCES = sorted(
    path for path in checkout.ROOT.glob("packages/*/src") if path.parent.name != "ascend-emulator"
)
FIX = "; fix: "


def is_refusal(node: ast.AST) -> bool:
    """Whether this creates a RefusedError."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name == "RefusedError"


def has_state(node: ast.AST) -> bool:
    """Whether a message ends with a component's state, which names the fix."""
    return any(
        isinstance(each, ast.Attribute) and each.attr == "with_state" for each in ast.walk(node)
    )


def text_of(node: ast.AST) -> str:
    """The constant parts of a string; "" for what is no string in the source."""
    return "".join(
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    )


def without_fix(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the refusals that name no fix. One that only passes on a text is none."""
    for node in ast.walk(tree):
        if is_refusal(node) and node.args:
            text = text_of(node.args[0])
            if text and FIX not in text and not has_state(node):
                yield node.lineno, text


def test_each_refusal_names_a_fix() -> None:
    assert [
        f"{path.relative_to(source)}:{line}: {text}"
        for source in SOURCES
        for path in sorted(source.rglob("*.py"))
        for line, text in without_fix(ast.parse(path.read_text()))
    ] == []


def test_a_refusal_without_a_fix_is_found() -> None:
    tree = ast.parse(
        'raise RefusedError(f"{a} is not supported")\n'
        'raise extension.RefusedError("a; fix: remove it")\n'
        "raise RefusedError(line)\n"
    )
    assert [*without_fix(tree)] == [(1, " is not supported")]
