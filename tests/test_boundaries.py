"""Which module may import which: the packages meet in ascend_platform.extension alone, and none knows the emulator."""

import ast
from collections.abc import Iterator
from pathlib import Path

import environment
import pytest

PACKAGES = environment.ROOT / "packages"
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
