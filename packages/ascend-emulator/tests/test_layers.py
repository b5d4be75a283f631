# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Rules of the C++ sources: no folder includes a higher one, no files include each other in a
circle, the process object owns the mutable state, and a unit has each helper once."""

import re
from collections.abc import Iterator
from pathlib import Path

from ascend_emulator.build import SOURCES, units
from harness.project.circles import circles

# From low to high. Folders of one row do not include each other.
ROWS = (("aten",), ("include",), ("core",), ("runtime", "operator", "hccl"), ("ops",))
LEVELS = {folder: level for level, row in enumerate(ROWS) for folder in row}
INCLUDE = re.compile(r'^\s*#include "(.+?)"', re.MULTILINE)
# A variable that can change: at the left margin, which is the scope of a namespace, or static.
MUTABLE = re.compile(
    r"^(?:(?:inline |extern )?(?!using|return|namespace|template|struct|class|enum|inline|extern"
    r"|constexpr|constinit|const|static|thread_local|#|ACL_|HCCL_|EXPORT|//|\}|\))"
    r"[A-Za-z_][\w:<>,*& ]* \**\w+(?:\{.*\}| = .*)?;"
    r"|\s*static (?!constexpr|constinit|const |const\b)[\w:<>,*& ]+?[ *&]\w+(?: =|\{|;|\[))",
    re.MULTILINE,
)
# Tables of constants, and what is registered before main().
CONSTANT = re.compile(r"const|static Instance|registration_")
# Helpers of one file: functions and types in a namespace without a name.
UNNAMED = re.compile(r"^namespace \{\n(.*?)^\}  // namespace$", re.MULTILINE | re.DOTALL)
HELPER = re.compile(
    r"^(?!return|else|namespace|using|#|//)(?:(?:struct|class) (\w+)|[A-Za-z_][\w:<>,*& ]*?[ *&]"
    r"(\w+)\([^;{]*?\)(?: const)?(?: noexcept)? \{)",
    re.MULTILINE,
)


def sources(root: Path) -> list[Path]:
    return [path for path in sorted(root.rglob("*")) if path.suffix in (".cpp", ".h")]


def included(path: Path, root: Path) -> Iterator[Path]:
    for name in INCLUDE.findall(path.read_text()):
        paths = ((path.parent / name).resolve(), root / name)
        # The build writes generated headers elsewhere.
        if header := next(filter(Path.exists, paths), None):
            yield header


def upward(root: Path) -> list[str]:
    """Includes of a higher folder, or of another one in the same row."""
    arrows = []
    for path in sources(root):
        folder_name = path.relative_to(root).parts[0]
        for other in included(path, root):
            folder = other.relative_to(root).parts[0]
            if folder != folder_name and LEVELS[folder] >= LEVELS[folder_name]:
                arrows.append(f"{path.relative_to(root)} includes {other.relative_to(root)}")
    return arrows


def circles_of_includes(root: Path) -> list[list[str]]:
    """Groups of files that include each other; a header and its source are one."""

    def name(path: Path) -> str:
        return path.relative_to(root).with_suffix("").as_posix()

    graph: dict[str, set[str]] = {}
    for path in sources(root):
        included_files = {name(other) for other in included(path, root)} - {name(path)}
        graph.setdefault(name(path), set()).update(included_files)
    return circles(graph)


def mutable(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: {line.strip()}"
        for folder in ("core", "runtime", "hccl")
        for path in sources(root / folder)
        for line in MUTABLE.findall(path.read_text())
        if not CONSTANT.search(line)
    ]


def shared_helpers(unit: list[Path]) -> list[str]:
    """Helpers that two files of a unit define in the same namespace: the unit is one translation
    unit, in which the second is an overload of the first."""
    homes: dict[str, set[str]] = {}
    for path in unit:
        text = path.read_text()
        outer = re.search(r"^namespace (emu::\w+) \{$", text, re.MULTILINE)
        for body in UNNAMED.findall(text):
            for names in HELPER.findall(body):
                name = f"{outer.group(1) if outer else ''}::{''.join(names)}"
                homes.setdefault(name, set()).add(path.name)
    return [f"{name} of {sorted(files)}" for name, files in homes.items() if len(files) > 1]


def test_no_folder_includes_a_higher_one() -> None:
    assert {path.relative_to(SOURCES).parts[0] for path in sources(SOURCES)} == {*LEVELS}
    assert upward(SOURCES) == []


def test_no_files_include_each_other() -> None:
    assert circles_of_includes(SOURCES) == []


def test_the_process_owns_the_mutable_state() -> None:
    assert mutable(SOURCES) == []


def test_a_unit_has_each_helper_once() -> None:
    assert [name for unit in units().values() for name in shared_helpers(unit)] == []


def test_violations_are_found(tmp_path: Path) -> None:
    for folder in LEVELS:
        (tmp_path / folder).mkdir()
    (tmp_path / "core/a.h").write_text('#include "b.h"\n')
    (tmp_path / "core/a.cpp").write_text('#include "a.h"\n')
    (tmp_path / "core/b.h").write_text("")
    (tmp_path / "core/b.cpp").write_text('#include "b.h"\n#include "a.h"\n#include "runtime/c.h"\n')
    (tmp_path / "runtime/c.h").write_text('#include "core/a.h"\n#include "hccl/d.h"\n')
    (tmp_path / "hccl/d.h").write_text(
        "std::mutex mutex;\nconst int limit = 3;\nint f() {\n  static int uses = 0;\n"
        "  static const int most = 2;\n  return ++uses;\n}\n"
    )
    assert upward(tmp_path) == [
        "core/b.cpp includes runtime/c.h",
        "runtime/c.h includes hccl/d.h",
    ]
    assert circles_of_includes(tmp_path) == [["core/a", "core/b", "runtime/c"]]
    assert mutable(tmp_path) == ["hccl/d.h: std::mutex mutex;", "hccl/d.h: static int uses ="]
    for name in ("e", "f"):
        text = f"namespace {{\nint {name}() {{\n}}\nint twice(int x) {{\n}}\n}}  // namespace\n"
        (tmp_path / f"{name}.cpp").write_text(text)
    both = shared_helpers([tmp_path / "e.cpp", tmp_path / "f.cpp"])
    assert both == ["::twice of ['e.cpp', 'f.cpp']"]
