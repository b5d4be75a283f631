# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Overrides of vLLM's names: a vLLM that differs is refused by the name of the override, before
anything is replaced."""

import ast
import copy
import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from ascend_platform import extension
from ascend_platform.overrides import guard, table
from ascend_platform.overrides.table import Override
from harness.project import vllm_copy
from packaging.version import Version
from vllm import __version__ as vllm_version

ADDER = Path(__file__).parents[3] / "tools" / "models" / "adder"
OVERRIDES = table.rows("common", "v1")
TABLE = [*OVERRIDES]
if Version(vllm_version).release >= Version(table.V2_SINCE).release:
    # A bool, which does not belong to a module.
    TABLE += [each for each in table.rows("v2") if each.qualname != "HAS_TRITON"]
if Version(vllm_version).release >= Version("0.32").release:
    TABLE += table.rows("states")
FUNCTIONS = [
    each
    for each in TABLE
    if each.action == "replaced" and each.qualname.isidentifier() and each.qualname != "torch"
]
GROUPED = "vllm.model_executor.layers.fused_moe.router.grouped_topk_router:grouped_topk"


WALK = """
import functools, json, pathlib, sys
from ascend_platform import fingerprint
from ascend_platform.overrides import guard
fingerprint.fingerprint = functools.cache(fingerprint.fingerprint)  # most of vLLM is the same in all cases
tree, cases, said = pathlib.Path(sys.argv[1]), json.load(sys.stdin), []
for file, text in cases:
    place = tree / file
    before = place.read_text()
    place.unlink()
    place.write_text(text)
    guard._problem.cache_clear()
    try:
        guard.check("common", "v1")
        said.append("")
    except ValueError as error:
        said.append(str(error))
    place.write_text(before)
assert "vllm" not in sys.modules and "torch" not in sys.modules
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def vllm_tree(tmp_path_factory) -> Path:
    return vllm_copy.make(tmp_path_factory.mktemp("tree"))


def walk(tree: Path, cases: list[tuple[str, str]]) -> list[str]:
    """Refusals of :func:`guard.check` for each edited vLLM, in a process that finds this
    vLLM first."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    }
    environment.pop(guard.ACCEPT, None)
    command = [sys.executable, "-c", WALK, str(tree)]
    done = subprocess.run(
        command,
        input=json.dumps(cases),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_table_is_of_this_vllm() -> None:
    assert [each.problem() for each in TABLE if each.problem()] == []


def test_renamed_target_is_refused_by_name(vllm_tree: Path) -> None:
    targets = [each.compared if each.compared.endswith(".*") else each.target for each in OVERRIDES]
    for each, message in zip(
        OVERRIDES,
        walk(vllm_tree, [vllm_copy.edited(target, renamed=True) for target in targets]),
        strict=True,
    ):
        assert f"override {each.name}: target " in message, each.name
        assert " is missing: " in message
        assert guard.ACCEPT not in message
        assert "\n" not in message


def test_changed_target_is_refused_with_both_fingerprints(vllm_tree: Path) -> None:
    targets = [each.compared or each.target for each in OVERRIDES]
    for each, message in zip(
        OVERRIDES,
        walk(vllm_tree, [vllm_copy.edited(target, renamed=False) for target in targets]),
        strict=True,
    ):
        compared = each.compared or each.target
        # several may depend on it
        first = next(other for other in OVERRIDES if (other.compared or other.target) == compared)
        assert f"override {first.name}: target {compared} has changed: found " in message, each.name
        assert f"expected {' or '.join(each.sources.values())}" in message
        assert "\n" not in message


def test_unchanged_vllm_of_another_version_is_taken(
    vllm_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_VERSION", "0.99.0")
    assert walk(vllm_tree, [vllm_copy.edited(GROUPED, renamed=True), ("vllm/__init__.py", "")]) == [
        (
            "vLLM 0.99.0 is not supported by ascend-platform 0.1.0: override"
            f" grouped_topk_router.grouped_topk: target {GROUPED} is missing:"
            f" {GROUPED.partition(':')[0]} does not define grouped_topk; fix: pip install --upgrade"
            f" vllm-ascend-all, or install an unedited release of {guard._supported()}"
        ),
        "",
    ]


@pytest.mark.parametrize("entry", FUNCTIONS, ids=lambda entry: entry.name)
def test_importer_that_the_table_does_not_name_is_refused(
    entry: Override, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_applied", set())
    importer, module = ModuleType("vllm.somebody"), importlib.import_module(entry.module)
    value = getattr(module, entry.qualname)  # Only of this module: replacements may be shared.
    importer.imported = functools.partial(value) if callable(value) else copy.copy(value)
    monkeypatch.setattr(module, entry.qualname, importer.imported)
    monkeypatch.setitem(sys.modules, "vllm.somebody", importer)
    with pytest.raises(extension.RefusedError) as refused:
        guard.override(entry.target, None)
    assert f"override {entry.name}: vllm.somebody has imported {entry.target} too" in str(
        refused.value
    )
    assert getattr(importlib.import_module(entry.module), entry.qualname) is importer.imported


@pytest.mark.parametrize("entry", FUNCTIONS, ids=lambda entry: entry.name)
def test_table_names_every_importer(entry: Override) -> None:
    named = {entry.module, *entry.replaced_in}
    for path in vllm_copy.INSTALLED.rglob("*.py"):
        text = path.read_text()
        if entry.qualname not in text and f"{entry.module.rpartition('.')[2]} import *" not in text:
            continue
        parts = path.relative_to(vllm_copy.INSTALLED.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(text)):
            # An import within a function is later, and gets the replacement.
            if not isinstance(node, ast.ImportFrom) or node.col_offset:
                continue
            origin = (
                ".".join(filter(None, (*parts[: -node.level], node.module)))
                if node.level
                else node.module
            )
            if origin == entry.module and {entry.qualname, "*"} & {one.name for one in node.names}:
                assert module in named or any(
                    f"{module}.".startswith(f"{kept}.") for kept in entry.kept_in
                ), module


@pytest.fixture
def plain_module(monkeypatch: pytest.MonkeyPatch):
    """A module of vLLM with one entry in the table, nothing of which is replaced yet."""
    module = ModuleType("vllm.plain")
    exec("def one():\n    return 1\n\nTABLE = {'gpu': 1}\nNAMES = {'a'}\n", module.__dict__)
    user = ModuleType("vllm.user")
    user.one = module.one
    for each in (module, user):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    importers = ("vllm.plain", "vllm.user", "vllm.later")
    entry = Override("vllm.plain:one", sources={"0.31": "a"}, replaced_in=importers)
    added = [Override(f"vllm.plain:{name}", action="entries added") for name in ("TABLE", "NAMES")]
    monkeypatch.setattr(table, "tables", lambda: {"common": (entry, *added)})
    monkeypatch.setattr(guard, "_applied", set())
    problems: dict[str, str] = {}
    monkeypatch.setattr(guard, "_problem", lambda target: problems.get(target, ""))
    module.problems = problems
    return module


def test_override_is_applied_once_and_wherever_it_was_imported(plain_module: ModuleType) -> None:
    guard.override("vllm.plain:one", len)
    guard.override("vllm.plain:one", max)
    assert plain_module.one is sys.modules["vllm.user"].one is len
    assert "vllm.later" not in sys.modules


def test_entries_are_added_and_vllm_keeps_its_own(plain_module: ModuleType) -> None:
    for _ in range(2):
        guard.add("vllm.plain:TABLE", {"npu": 2, "gpu": 3})
        guard.add("vllm.plain:NAMES", ["b"])
    assert plain_module.TABLE == {"gpu": 1, "npu": 2}
    assert sorted(plain_module.NAMES) == ["a", "b"]


def test_another_plugin_that_has_replaced_it_is_named(plain_module: ModuleType, log_lines) -> None:
    plugin = ModuleType("plugin_of_somebody")
    exec("def one():\n    return 2\n", plugin.__dict__)
    plain_module.one = plugin.one
    guard.override("vllm.plain:one", len)
    assert log_lines == [
        (
            "WARNING",
            (
                "override plain.one replaces the object that plugin_of_somebody has installed for"
                " vllm.plain:one"
            ),
        )
    ]
    assert plain_module.one is len


def test_difference_that_the_user_accepts_is_a_line(
    plain_module: ModuleType, log_lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_module.problems["vllm.plain:one"] = (
        "target vllm.plain:one has changed: found b, expected a"
    )
    with pytest.raises(
        extension.RefusedError,
        match=r"or, if this vLLM is edited .* export VLLM_ASCEND_ACCEPT_OVERRIDES=plain.one$",
    ):
        guard.override("vllm.plain:one", len)
    monkeypatch.setenv(guard.ACCEPT, "plain.one")
    guard.override("vllm.plain:one", len)
    assert plain_module.one is len
    message = (
        f"override plain.one applied despite a mismatch ({guard.ACCEPT}):"
        f" {plain_module.problems['vllm.plain:one']}"
    )
    assert log_lines == [("WARNING", message)]
    plain_module.problems["vllm.plain:TABLE"] = "target vllm.plain:TABLE is missing"
    monkeypatch.setenv(guard.ACCEPT, "plain.one,plain.TABLE,plain.on")
    with pytest.raises(extension.RefusedError, match=r"override plain.TABLE: .* is missing; fix: "):
        guard.check()
    assert (
        "WARNING",
        (f"{guard.ACCEPT} names 'plain.on', which is no override; did you mean 'plain.one'?"),
    ) in log_lines


def test_more_than_one_difference_is_counted(plain_module: ModuleType) -> None:
    plain_module.problems.update(
        {f"vllm.plain:{name}": f"target {name} is missing" for name in ("one", "TABLE", "NAMES")}
    )
    with pytest.raises(
        extension.RefusedError,
        match=r"override plain.one: .* \(and 2 more, see vllm-ascend patches check\); fix",
    ):
        guard.check()


@pytest.mark.slow
def test_serve_with_a_renamed_function_ends_with_one_line(vllm_tree: Path) -> None:
    entry = next(
        each for each in OVERRIDES if each.name.endswith("eplb_map_to_physical_and_record")
    )
    file, text = vllm_copy.edited(entry.target, renamed=True)
    before = (vllm_tree / file).read_text()
    vllm_copy.write(vllm_tree, file, text)
    path = os.pathsep.join(filter(None, [str(vllm_tree), os.environ.get("PYTHONPATH")]))
    removed = ("VLLM_PLUGINS", "VLLM_VERSION", "VLLM_LOGGING_LEVEL", guard.ACCEPT)
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    done = subprocess.run(
        [Path(sys.executable).with_name("vllm"), "serve", ADDER, "--max-model-len", "1024"],
        env=environment | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    vllm_copy.write(vllm_tree, file, before)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert [line for line in lines if "Traceback" in line] == []
    assert lines[-1].startswith("ascend-platform: vLLM ")
    assert f"override {entry.name}: target {entry.target} is missing" in lines[-1]
