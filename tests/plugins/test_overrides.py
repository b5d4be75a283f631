# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""No wheel replaces a name of vLLM past ascend-patches and ``overrides/``, and the tables there are
complete."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from ascend_platform import fingerprint
from ascend_platform.overrides import table
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
CALLS = {"override", "add", "replaced", "require", "without"}


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
    ("source", "is_found"),
    [
        ("from vllm.v1 import worker\nworker.graph = 1", ["worker.graph"]),
        ("import vllm.envs as envs\nenvs.variables['A'] = 1", ["envs.variables['A']"]),
        ("def f():\n    from vllm.a import B\n    B.c, x = 1, 2", ["B.c"]),
        ("from vllm import a\nsetattr(a.b, 'c', 1)", ["a.b."]),
        ("from vllm import a\na.TABLE.update(x=1)", ["a.TABLE"]),
        ("from vllm import a\nx = a.b\nx.c = a.d()", []),
    ],
)
def test_replacement_is_found(source: str, is_found: list[str]) -> None:
    assert list(replaced(source)) == is_found


def calls(files: Iterable[Path]) -> Iterator[list[str]]:
    """Name and constant arguments of each call of a guard; a starred name is followed by the
    constants of the file's tuple."""
    for path in files:
        tree = ast.parse(path.read_text())
        tuples = {
            ast.unparse(node.targets[0]): ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and re.fullmatch(r"\(('[\w.]+'(, |,?\)))+", ast.unparse(node.value))
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                starred = [each.value for each in node.args if isinstance(each, ast.Starred)]
                constants = [each.value for each in node.args if isinstance(each, ast.Constant)]
                more = [name for each in starred for name in tuples.get(ast.unparse(each), ())]
                yield [ast.unparse(node.func).removeprefix("guard."), *constants, *more]


def test_every_row_is_used_and_every_use_has_a_row() -> None:
    """Those of V1 are used in its own folders."""
    of_v1 = {path for path in FILES if "v1" in path.parts}
    shared = ("common", "states", "v2", "ascend_models", "ascend_quantization")
    for files, tables in ((of_v1, ("v1",)), ({*FILES} - of_v1, shared)):
        literal_calls = [
            call for call in calls(files) if len(call) > 1 and isinstance(call[1], str)
        ]
        used = {
            target
            for name, target, *_ in literal_calls
            if name in CALLS and target.startswith("vllm.")
        }
        installed = {
            (table_name, module)
            for name, table_name, *modules in literal_calls
            if name in ("install", "extension.install_overrides")
            for module in modules or ["all"]
        }
        rows = [(name, each) for name in tables for each in table.rows(name)]
        rows = [(name, each) for name, each in rows if each.action not in table.OF_LAUNCHES]
        assert used == {each.target for _, each in rows if not each.by}
        by_row = {
            (name, "all" if (name, "all") in installed else each.by.partition(":")[0])
            for name, each in rows
            if each.by
        }
        assert by_row == installed


def test_replacements_exist() -> None:
    """Defined, or imported, in the module that the row names; it is not imported here."""
    for each in (*table.rows(), *table.optional_rows()):
        if each.by:
            module, _, name = each.by.partition(":")
            source = fingerprint.module_source(f"{each.package}.{module}")
            assert source is not None, each.by
            assert fingerprint.fingerprint(source, name), each.by


def test_tables_are_in_overrides_only() -> None:
    """Rows are made there, so that none is missed by the guards."""
    elsewhere = [
        str(path.relative_to(PACKAGES))
        for path in (*FILES, *PACKAGES.glob("*/src/**/*.toml"))
        if "overrides" not in path.parts
        and path.name not in ("overrides.toml", "launches.toml")
        and re.search(r"\bOverride\(|^\[\[override\]\]", path.read_text(), re.MULTILINE)
    ]
    assert elsewhere == []


def test_fingerprints_are_written_once() -> None:
    """Names have one row; a kernel with several callers has the same fingerprint in all rows."""
    targets = [each.target for each in table.rows()]
    assert len(set(targets)) == len(targets) > 150
    of_launches: dict[str, set[str]] = {}
    for each in table.rows("v2"):
        compared = {each.target: each.sources[table.V2_SINCE], **each.kernels, **each.callers}
        for target, source in compared.items():
            assert re.fullmatch("[0-9a-f]{12}", source), target
            if not each.compared:
                of_launches.setdefault(target, set()).add(source)
    assert [target for target, sources in of_launches.items() if len(sources) != 1] == []
