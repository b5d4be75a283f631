# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""No wheel replaces a name of vLLM past ascend-patches and ``vllm_overrides.py``, and the table of
that module is complete."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from ascend_platform.vllm_overrides import OVERRIDES
from ascend_platform.worker.state_layers import OVERRIDES as STATE_OVERRIDES
from ascend_platform.worker.v2.overrides import OVERRIDES as V2_OVERRIDES
from harness.checkout import ROOT

PACKAGES = ROOT / "packages"
FILES = sorted(
    path
    for path in PACKAGES.glob("*/src/**/*.py")
    if not {"ascend-emulator", "patches"} & {*path.parts}
)
CHANGES = {
    "add",
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
}
CALLS = {"override", "add", "require", "without"}


def replaced(source: str) -> Iterator[str]:
    """Names of vLLM's modules and classes that a file assigns or adds."""
    tree = ast.parse(source)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {
                (one.asname or one.name).partition(".")[0]
                for one in node.names
                if one.name.partition(".")[0] == "vllm"
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            imported |= {one.asname or one.name for one in node.names}

    def of_vllm(node: ast.AST) -> bool:
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        return isinstance(node, ast.Name) and node.id in imported

    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("setattr", "delattr")
        ):
            targets = [ast.Attribute(node.args[0], "", ast.Store())]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in CHANGES
        ):
            targets = [node.func.value] if isinstance(node.func.value, ast.Attribute) else []
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute | ast.Subscript) and of_vllm(each):
                    yield ast.unparse(each)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGES)))
def test_no_wheel_replaces_a_name_of_vllm_by_itself(path: Path) -> None:
    assert list(replaced(path.read_text())) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from vllm.v1 import worker\nworker.graph = 1", ["worker.graph"]),
        ("import vllm.envs as envs\nenvs.variables['A'] = 1", ["envs.variables['A']"]),
        ("def f():\n    from vllm.a import B\n    B.c, x = 1, 2", ["B.c"]),
        ("from vllm import a\nsetattr(a.b, 'c', 1)", ["a.b."]),
        ("from vllm import a\na.TABLE.update(x=1)", ["a.TABLE"]),
        ("from vllm import a\nx = a.b\nx.c = a.d()", []),
    ],
)
def test_replacement_is_found(source: str, found: list[str]) -> None:
    assert list(replaced(source)) == found


def test_table_entries_and_their_uses_are_the_same() -> None:
    used = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and node.args
                and ast.unparse(node.func).removeprefix("vllm_overrides.") in CALLS
            ):
                first = node.args[0]
                if isinstance(first, ast.Constant) and str(first.value).startswith("vllm."):
                    used.append(first.value)
        # of kernels
        if table := re.search(
            r"^(?:OVERRIDES|KERNELS)\b[^=\n]*= (\{.*?\})$",
            path.read_text(),
            re.DOTALL | re.MULTILINE,
        ):
            prefix = re.search(r'^_PREFIX = "(.*)"$', path.read_text(), re.MULTILINE)
            used += [
                (prefix[1] if prefix else "") + name
                for name in re.findall(r'"([^"]+)": ', table[1])
            ]
    assert sorted(set(used)) == sorted(
        each.target for each in (*OVERRIDES, *STATE_OVERRIDES, *V2_OVERRIDES)
    )


def test_readmes_say_the_number() -> None:
    patches = sum(
        path.read_text().count("\n@patch(")
        for path in PACKAGES.glob("ascend-patches/src/ascend_patches/patches/patch_*.py")
    )
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"| {patches}: " in text
    assert f"the {len(OVERRIDES)} guarded overrides of ascend-platform" in text
    text = " ".join((PACKAGES / "ascend-patches" / "README.md").read_text().split())
    assert f"This version has {patches} patches of its own" in text
    assert f"the {len(OVERRIDES)} overrides of ascend-platform" in text
