# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Paths of this checkout, and the uv that its environment was made with."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "harness" / "programs"
TOOLS = ROOT / "tools"
ADDER = TOOLS / "models" / "adder"
REQUIREMENTS = TOOLS / "environment" / "requirements.txt"


def run_tool(script: str) -> str:
    """Run a script in a process that can import the modules of tools/; returns its
    standard output."""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=TOOLS, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def import_tool(name: str) -> Any:
    """Import a module of tools/, whose pure functions a test calls in its own process."""
    sys.path.insert(0, str(TOOLS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(TOOLS))


def find_uv() -> tuple[str, dict[str, str]]:
    """The path of uv, and the environment variables to run it with (``find_uv`` of
    tools/environment)."""
    uv, variables = json.loads(
        run_tool("import json, environment; print(json.dumps(environment.find_uv()))").splitlines()[
            -1
        ]
    )
    return uv, variables
