"""Which module may import which: the packages meet in ascend_platform.extension alone, and none knows the emulator."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import checkout

PACKAGES = checkout.ROOT / "packages"
OURS = {path.name for path in PACKAGES.glob("*/src/*") if path.is_dir()}
FILES = sorted(path for path in PACKAGES.glob("*/src/**/*.py"))


def imported(path: Path) -> Iterator[str]:
    """The qualified names of what a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGES)))
def test_packages_meet_in_the_extension_module_alone(path: Path) -> None:
    own = path.relative_to(PACKAGES).parts[2]
    across = [name for name in imported(path) if (top := name.split(".")[0]) in OURS and top != own]
    assert [name for name in across if not f"{name}.".startswith("ascend_platform.extension.")] == []


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if "ascend-emulator" not in path.parts],
    ids=lambda path: str(path.relative_to(PACKAGES)),
)
def test_product_code_does_not_know_the_emulator(path: Path) -> None:
    assert "ascend_emulator" not in path.read_text().lower()


SIBLINGS = sorted(OURS - {"ascend_platform", "ascend_emulator"})
WATCH = """
import builtins, importlib, json, pkgutil, sys
from types import ModuleType
import ascend_platform
from ascend_platform import extension

siblings, crossed = json.loads(sys.argv[1]), set()
plain = builtins.__import__

def own(depth=2):
    name = sys._getframe(depth).f_globals.get("__name__", "").partition(".")[0]
    return name if name in siblings else ""

def watched(name, globals=None, locals=None, fromlist=(), level=0):
    top = name.partition(".")[0]
    if level == 0 and (importer := own()) and top in (*siblings, "ascend_platform") and top != importer:
        crossed.update({f"{importer}: {name}.{part}" for part in fromlist or [""]} - {f"{importer}: ascend_platform.extension"})
    return plain(name, globals, locals, fromlist, level)

class Watched(ModuleType):
    def __getattribute__(self, name):
        if (user := own()) and name not in __all__ and not name.startswith("__"):
            crossed.add(f"{user}: extension.{name}")
        return super().__getattribute__(name)

__all__ = extension.__all__
extension.__class__ = Watched
builtins.__import__ = watched
loaded = []
for sibling in siblings:
    package = importlib.import_module(sibling)
    package.register()
    loaded += [importlib.import_module(each.name).__name__ for each in pkgutil.walk_packages(package.__path__, f"{sibling}.")]
print(json.dumps([sorted(crossed), loaded]))
"""


def crossings(path: Path | None = None) -> tuple[list[str], list[str]]:
    """What the siblings reach in each other and in the platform when all their modules run, and those modules."""
    script = WATCH if path is None else f"import sys\nsys.path.insert(0, {str(path)!r})\n{WATCH}"
    names = SIBLINGS if path is None else sorted(each.name for each in path.iterdir())
    command = [sys.executable, "-c", script, json.dumps(names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    crossed, loaded = json.loads(done.stdout.splitlines()[-1])
    return crossed, loaded


@pytest.mark.slow
def test_running_siblings_use_the_interface_alone() -> None:
    crossed, loaded = crossings()
    assert crossed == []
    assert {"ascend_attention.dense", "ascend_patches.apply"} <= {*loaded}


def test_sibling_that_reaches_further_is_found(tmp_path: Path) -> None:
    (tmp_path / "plugin_of_somebody").mkdir()
    (tmp_path / "plugin_of_somebody" / "__init__.py").write_text(
        "from ascend_platform import extension, host\nimport ascend_platform.cli.main\n"
        "def register():\n    extension.configure({})\n    extension.join('somebody', 'somebody')\n"
    )
    assert crossings(tmp_path)[0] == [
        "plugin_of_somebody: ascend_platform.cli.main.",
        "plugin_of_somebody: ascend_platform.host",
        "plugin_of_somebody: extension.configure",
    ]
