# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The V1 model runner can be deleted by its path: nothing else imports or names what is in it."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.checkout import ROOT
from packaging.version import Version

PLATFORM = ROOT / "packages" / "ascend-platform"
SOURCE = PLATFORM / "src" / "ascend_platform"
OF_V1 = (
    SOURCE / "runners" / "v1",
    PLATFORM / "tests" / "v1",
)
"""The path that is deleted with the V1 runner, and that of its tests, which are skipped then."""

NAMES = re.compile(r"\brunners[./]v1\b|from ascend_platform\.runners import [^\n]*\bv1\b")
LISTS = (
    "packages/*/src/**/*.py",
    "packages/*/tests/**/*.py",
    "tests/**/*.py",
    "harness/**/*.py",
    "tools/**/*",
)

IMPORT_ALL = """
import importlib, json, pkgutil, sys
import ascend_platform
from ascend_platform.overrides import table
from ascend_platform.config import runners
failed = {}
for module in pkgutil.walk_packages(ascend_platform.__path__, "ascend_platform."):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        failed[module.name] = [error.name or "", str(error)]
print(json.dumps({
    "file": ascend_platform.__file__,
    "failed": failed,
    "tables": {name: len(rows) for name, rows in table.tables().items()},
    "has_v1": runners.has_v1(),
    "loaded": [name for name in sys.modules if name.startswith("ascend_platform.")],
}))
"""


def is_of_v1(path: Path) -> bool:
    return any(path == each or each in path.parents for each in OF_V1)


def test_no_other_file_names_a_module_of_v1() -> None:
    named = []
    for path in sorted(path for pattern in LISTS for path in ROOT.glob(pattern)):
        if path.is_file() and not is_of_v1(path):
            match = NAMES.search(path.read_text(errors="replace"))
            named += [(str(path.relative_to(ROOT)), match[0])] if match else []
    assert named == []


@pytest.mark.parametrize(
    "line",
    [
        "from ascend_platform.runners.v1.runner import NPUModelRunner",
        "from ascend_platform.runners import v1, v2",
        '"""See ``runners/v1/overrides.toml``."""',
    ],
)
def test_name_is_recognized(line: str) -> None:
    assert NAMES.search(line)


def test_every_other_module_is_imported_without_v1(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "ascend_platform")
    for path in OF_V1[:1]:
        copied = tmp_path / path.relative_to(SOURCE.parent)
        assert copied.exists(), f"{path} is no path of V1"
        shutil.rmtree(copied) if copied.is_dir() else copied.unlink()
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["file"].startswith(str(tmp_path))
    assert list(answer["tables"]) == ["common", "states", "v2"]
    assert not answer["has_v1"]
    assert not [name for name in answer["loaded"] if ".v1" in name]
    if Version(importlib.metadata.version("vllm")) >= Version("0.33"):
        assert answer["failed"] == {}
    for name, (missing, error) in answer["failed"].items():  # vLLM 0.32 has another V2 runner
        assert name.startswith(
            ("ascend_platform.runners.v2.", "ascend_platform.runners.v2.kernels.")
        ), error
        assert missing.startswith("vllm."), error
