# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The build: translation units, and the format of the C++ sources."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ascend_emulator import build, cann_names

ROOT = Path(__file__).parents[3]
FORMATTER = Path(sys.executable).with_name("clang-format")


def test_every_folder_belongs_to_one_unit():
    folders = sorted(folder for unit in build.UNITS.values() for folder in unit)
    assert folders == sorted(
        {path.parent.relative_to(build.SOURCES).as_posix() for path in build.SOURCES.rglob("*.cpp")}
    )


def test_units_have_every_source_once_and_similar_sizes():
    units = build.units()
    paths = [path for unit in units.values() for path in unit]
    assert sorted(paths) == sorted(build.SOURCES.rglob("*.cpp"))
    assert len(set(paths)) == len(paths)
    sizes = [sum(path.stat().st_size for path in unit) for unit in units.values()]
    assert max(sizes) < 230_000  # One changed file compiles its unit: about 20 seconds.
    assert min(sizes) > 20_000


def test_macros_of_a_source_file_are_its_own():
    """Files of a unit share their macros: a second definition would change the first file's
    meaning, or be a warning at most."""
    for unit in build.units().values():
        names = [
            name
            for path in unit
            for name in re.findall(r"^#define (\w+)", path.read_text(), re.MULTILINE)
            if f"#undef {name}\n" not in path.read_text()
        ]
        assert sorted(set(names)) == sorted(names)


@pytest.mark.skipif(
    not FORMATTER.exists(),
    reason="clang-format is not installed (tools/environment/requirements.txt)",
)
def test_sources_are_formatted():
    sources = sorted(path for path in build.SOURCES.rglob("*") if path.suffix in (".cpp", ".h"))
    done = subprocess.run(
        [FORMATTER, "--dry-run", "--Werror", *sources],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    files = sorted(
        {line.partition(":")[0] for line in done.stderr.splitlines() if "error:" in line}
    )
    assert not files, f"format with: clang-format -i {' '.join(files)}"


@pytest.mark.parametrize("unit", build.UNITS)
def test_every_unit_depends_on_the_headers_before_torch(unit, tmp_path):
    """Otherwise an object file of other headers would be taken from the cache."""
    headers = [path.read_bytes() for path in build.ATEN.rglob("*.h")]
    assert len(headers) == 2
    contents = build._read(build.units()[unit], tmp_path)
    assert [header for header in headers if header not in contents] == []


def test_object_files_are_removed_when_no_build_uses_them(tmp_path):
    used, kept, old = (tmp_path / name for name in ("used.o", "kept.o", "old.o"))
    for path in (used, kept, old):
        path.touch()
    for path in (used, old):
        os.utime(path, (0, 0))
    build._remove_unused(tmp_path, [used, tmp_path / "missing.o"])
    assert sorted(tmp_path.iterdir()) == [kept, used]


@pytest.mark.parametrize(
    ("version", "known"),
    [("2.13.0", True), ("2.13.0.post2", True), ("2.13.0+git1234", False), ("2.13.0.dev1", False)],
)
def test_layouts_of_atb_are_known_for_releases(monkeypatch, version, known):
    """A torch_npu that somebody built may have another op-plugin than the release of
    that number."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert (cann_names.atb_without_layout() == []) == known
