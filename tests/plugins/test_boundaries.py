# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Import rules: packages meet only in ascend_platform.extension and the library ascend_transfer,
product code does not know the emulator, tests import the harness, which imports neither tests nor tools, tools
import only its progress, and no modules import each other in a circle."""

import ast
import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest
from harness import checkout
from harness.project.circles import circles

PACKAGES = checkout.ROOT / "packages"
OURS = {path.name for path in PACKAGES.glob("*/src/*") if path.is_dir()}
FILES = sorted(path for path in PACKAGES.glob("*/src/**/*.py"))
DOORS = ("ascend_platform.extension", "ascend_transfer")


def imported(path: Path) -> Iterator[str]:
    """Qualified names of a file's imports, including those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGES)))
def test_packages_import_only_the_interface_of_the_platform(path: Path) -> None:
    package = path.relative_to(PACKAGES).parts[2]
    across = [
        name for name in imported(path) if (top := name.split(".")[0]) in OURS and top != package
    ]
    doors = () if package == "ascend_platform" else DOORS
    assert [
        name for name in across if not f"{name}.".startswith(tuple(f"{each}." for each in doors))
    ] == []


def test_platform_does_not_import_its_interface() -> None:
    platform = next(path for path in PACKAGES.glob("*/src/*") if path.name == "ascend_platform")
    inside = [path for path in platform.rglob("*.py") if path != platform / "extension.py"]
    assert [
        (str(path), name)
        for path in inside
        for name in imported(path)
        if name.startswith(("ascend_platform.extension", "ascend_platform.installation"))
    ] == []


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if "ascend-emulator" not in path.parts],
    ids=lambda path: str(path.relative_to(PACKAGES)),
)
def test_product_code_does_not_know_the_emulator(path: Path) -> None:
    assert "ascend_emulator" not in path.read_text().lower()


def test_only_v1_imports_v1() -> None:
    """vLLM may remove its V1 runner with any release: what serves it is deleted by path."""
    remaining = [path for path in FILES if not {"v1", "v1.py"} & {*path.parts}]
    assert len(FILES) - len(remaining) > 5
    assert [
        f"{path.relative_to(PACKAGES)}: {name}"
        for path in remaining
        for name in imported(path)
        if name.startswith("ascend_platform.") and "v1" in name.split(".")
    ] == []


TESTS, TOOLS = checkout.ROOT / "tests", checkout.TOOLS
HARNESS = checkout.ROOT / "harness"
PARTS = ("e2e", "plugins", "project")
COMMANDS = [
    path
    for path in TOOLS.iterdir()
    if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env python3")
]


def modules(top: Path, package: str = "") -> dict[str, Path]:
    """The files of a folder by the names that they are imported under, commands without a suffix
    included."""
    paths = {}
    for path in [*top.rglob("*.py"), *(path for path in COMMANDS if path.parent == top)]:
        parts = path.relative_to(top).with_suffix("").parts
        paths[
            ".".join(filter(None, (package, *(part for part in parts if part != "__init__"))))
        ] = path
    return paths


def imported_modules(path: Path, known: Collection[str]) -> set[str]:
    """Those of the known modules that a file imports, also inside functions and under
    TYPE_CHECKING."""
    names = set(imported(path))
    return {
        name
        for name in names | {name.rpartition(".")[0] for name in names - {*known}}
        if name in known
    }


def circles_of_imports(known: dict[str, Path]) -> list[list[str]]:
    """Groups of modules each of which imports all others of its group, directly or by way
    of them."""
    return circles({name: imported_modules(path, known) - {name} for name, path in known.items()})


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from p import two\n")
    (tmp_path / "two.py").write_text("def f():\n    from p.three import x\n")
    (tmp_path / "three.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.one import y\n"
    )
    (tmp_path / "four.py").write_text("from p import one, two\n")
    assert circles_of_imports(modules(tmp_path, "p")) == [["p.one", "p.three", "p.two"]]


FOLDERS = {
    path.name: (path, path.name) for path in sorted(PACKAGES.glob("*/src/*")) if path.is_dir()
}
FOLDERS |= {
    "harness": (HARNESS, "harness"),
    "programs": (checkout.PROGRAMS, ""),
    "tools": (TOOLS, ""),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_no_modules_import_each_other(name: str) -> None:
    assert circles_of_imports(modules(*FOLDERS[name])) == []


@pytest.mark.parametrize(("side", "peer"), [("consumer", "producer"), ("producer", "consumer")])
def test_sides_of_a_kv_transfer_are_independent(side: str, peer: str) -> None:
    """A rank may be only one of the two; what both use lies beside them."""
    p2p = PACKAGES / "ascend-kv-connector" / "src" / "ascend_kv_connector" / "p2p"
    files = [*(p2p / side).glob("*.py")]
    assert len(files) > 4
    assert [
        name
        for path in files
        for name in imported(path)
        if f"ascend_kv_connector.p2p.{peer}" in name
    ] == []


ORDER = (
    "errors chips logger fingerprint protocols",
    "host options",
    "plugins",
    "overrides",
    "process",
    "config",
    "observability sampling",
    "attention",
    "kernels",
    "ops state_layers",
    "lora graph",
    "activation",
    "worker",
    "runners",
    "installation",
    "platform extension",
)
"""Folders and modules of ascend_platform: each imports only those of lines above its own."""


def test_folders_of_the_platform_import_downward() -> None:
    """``config`` imports no folder with a subject: they declare features, which it composes."""
    top = FOLDERS["ascend_platform"][0]
    known = modules(top, "ascend_platform")
    levels = {name: level for level, line in enumerate(ORDER) for name in line.split()}
    folders = {name.split(".")[1] for name in known if "." in name}
    assert folders == {*levels}, "a folder without a line in ORDER"
    upward = {
        (name, other)
        for name, path in known.items()
        for other in imported_modules(path, known)
        if "." in name and "." in other
        if (ours := name.split(".")[1]) != (imported := other.split(".")[1])
        if levels[ours] <= levels[imported]
    }
    assert upward == set()


def tops(paths: Iterable[Path]) -> set[str]:
    """The first part of the names of all that the files import."""
    return {name.partition(".")[0] for path in paths for name in imported(path)}


def test_tools_import_of_the_harness_only_progress() -> None:
    files = modules(TOOLS).values()
    assert len(files) > len(COMMANDS) > 5
    assert tops(files) & {"conftest", "tests", *PARTS, *modules(checkout.PROGRAMS)} == set()
    names = {name for path in files for name in imported(path) if name.startswith("harness")}
    assert {name.rpartition(".")[0] for name in names} == {"harness.progress"}


def test_tests_and_harness_import_nothing_of_the_tools() -> None:
    tool_names = {
        path.stem for path in TOOLS.iterdir() if path.is_dir() and any(path.glob("*.py"))
    } | {path.name for path in COMMANDS}
    assert {"environment", "versions", "docs-tables"} <= tool_names
    files = [*HARNESS.rglob("*.py"), *TESTS.rglob("*.py"), *PACKAGES.glob("*/tests/**/*.py")]
    assert tops(files) & (tool_names | {"tools"}) == set()


def test_harness_does_not_import_its_programs() -> None:
    files = [path for path in HARNESS.rglob("*.py") if path.parent != checkout.PROGRAMS]
    programs = modules(checkout.PROGRAMS)
    assert {"serve_layout"} <= {*programs}
    assert tops(files) & {*programs} == set()
    assert {
        name for path in files for name in imported(path) if "harness.programs" in name
    } == set()


@pytest.mark.parametrize("part", [*PARTS, "packages", "harness"])
def test_tests_share_only_the_harness(part: str) -> None:
    files = {
        "packages": PACKAGES.glob("*/tests/**/*.py"),
        "harness": HARNESS.rglob("*.py"),
    }.get(part, (TESTS / part).rglob("*.py"))
    files = [*files]
    assert files
    forbidden = {*PARTS, "conftest", "tests"} | {
        path.stem for other in PARTS if other != part for path in (TESTS / other).glob("*.py")
    }
    assert tops(files) & forbidden == set()


SIBLINGS = sorted(OURS - {"ascend_platform", "ascend_emulator", "ascend_transfer"})
WATCH = """
import builtins, importlib, json, pkgutil, sys
from types import ModuleType
import ascend_platform
from ascend_platform import extension

siblings, doors, crossed = json.loads(sys.argv[1]), json.loads(sys.argv[2]), set()
plain = builtins.__import__

def sibling_above(depth=2):
    name = sys._getframe(depth).f_globals.get("__name__", "").partition(".")[0]
    return name if name in siblings else ""

def watched(name, globals=None, locals=None, fromlist=(), level=0):
    top = name.partition(".")[0]
    if level == 0 and (importer := sibling_above()) and top in (*siblings, "ascend_platform") and top != importer:
        found = {f"{importer}: {name}.{part}" for part in fromlist or [""]}
        crossed.update(each for each in found if not f"{each}.".startswith(tuple(f"{importer}: {door}." for door in doors)))
    return plain(name, globals, locals, fromlist, level)

class Watched(ModuleType):
    def __getattribute__(self, name):
        interface = super().__getattribute__("__name__").rpartition(".")[2]
        if (user := sibling_above()) and name not in public[interface] and not name.startswith("__"):
            crossed.add(f"{user}: {interface}.{name}")
        return super().__getattribute__(name)

public = {"extension": extension.__all__, "installation": extension.installation.__all__}
for interface in (extension, extension.installation):
    interface.__class__ = Watched
builtins.__import__ = watched
loaded = []
for sibling in siblings:
    package = importlib.import_module(sibling)
    package.register()
    loaded += [importlib.import_module(each.name).__name__ for each in pkgutil.walk_packages(package.__path__, f"{sibling}.")]
print(json.dumps([sorted(crossed), loaded]))
"""


def crossings(path: Path | None = None) -> tuple[list[str], list[str]]:
    """Names that the siblings use of each other and of the platform when all their modules are
    imported, and these modules."""
    script = WATCH if path is None else f"import sys\nsys.path.insert(0, {str(path)!r})\n{WATCH}"
    names = SIBLINGS if path is None else sorted(each.name for each in path.iterdir())
    command = [sys.executable, "-c", script, json.dumps(names), json.dumps(DOORS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    crossed, loaded = json.loads(done.stdout.splitlines()[-1])
    return crossed, loaded


@pytest.mark.slow
def test_siblings_use_only_the_public_interface() -> None:
    crossed, loaded = crossings()
    assert crossed == []
    assert {"ascend_attention.dense", "ascend_patches.apply"} <= {*loaded}


def test_use_of_other_names_is_found(tmp_path: Path) -> None:
    (tmp_path / "plugin_of_somebody").mkdir()
    (tmp_path / "plugin_of_somebody" / "__init__.py").write_text(
        "from ascend_platform import extension, host\nimport ascend_platform.plugins.registry\ndef"
        " register():\n    extension.requirements.declared('x')\n    extension.installation.plugins\n"
        "    extension.join('somebody', 'somebody')\n"
    )
    assert crossings(tmp_path)[0] == [
        "plugin_of_somebody: ascend_platform.host",
        "plugin_of_somebody: ascend_platform.plugins.registry.",
        "plugin_of_somebody: extension.requirements",
        "plugin_of_somebody: installation.plugins",
    ]
