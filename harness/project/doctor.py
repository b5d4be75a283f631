# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run ``vllm-ascend`` commands in processes of their own, with a clean environment."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ascend_cli
import ascend_platform

CLEAN = ("VLLM_", "HCCL_", "HF_", "ASCEND_RT_", "GLOO_")
CLI = ["-c", "import sys; from ascend_cli.main import main; sys.exit(main())"]
SOURCES = os.pathsep.join(
    str(Path(str(package.__file__)).parents[1]) for package in (ascend_cli, ascend_platform)
)

Lines = dict[tuple[str, str], tuple[str, str, str]]
"""(category, title) to (state, found, fix)."""


def run(
    *arguments: str,
    before: Iterable[str] = (),
    flags: Iterable[str] = (),
    path: Iterable[str | Path] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a `vllm-ascend` command with directories prepended to the module path and variables added
    to a clean environment."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(CLEAN)}
    environ["PYTHONPATH"] = os.pathsep.join(
        [*map(str, path), SOURCES, environ.get("PYTHONPATH", "")]
    )
    command = [*before, sys.executable, *flags, *CLI, *arguments]
    return subprocess.run(
        command, env=environ | variables, capture_output=True, text=True, timeout=120
    )


def examine(*arguments: str, **broken: Any) -> tuple[int, Lines]:
    """The doctor's exit status and results: (category, title) to (state, found, fix)."""
    done = run("doctor", "--json", *arguments, **broken)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["ok"] == (done.returncode == 0)
    lines = {
        (line["category"], line["title"]): (line["state"], line["found"], line["fix"])
        for line in report["checks"]
    }
    assert len(lines) == len(report["checks"])
    assert all(bool(fix) == (state != "ok") for state, _, fix in lines.values()), lines
    return done.returncode, lines


def failing(lines: Lines) -> dict[str, tuple[str, str]]:
    return {
        title: (text, fix) for (_, title), (state, text, fix) in lines.items() if state == "fail"
    }


def bad(lines: Lines) -> dict[str, tuple[str, str]]:
    return {title: (text, fix) for (_, title), (state, text, fix) in lines.items() if state != "ok"}
