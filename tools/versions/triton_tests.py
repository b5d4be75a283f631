# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run the tests of Triton's kernels on emulated NPUs in an environment of their own.

    tools/check triton                  all of test_triton.py
    tools/check triton -k softmax       with arguments for pytest

The environment, .compat/triton, has the extra ascend-emulator[triton] and this checkout's emulator,
and finds the rest in .venv. The extra is not installed there, because vLLM cannot be imported
beside triton-ascend.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import environment

ROOT = environment.ROOT
VENV = ROOT / ".compat" / "triton"
PROJECT = ROOT / "packages" / "ascend-emulator"
TESTS = "packages/ascend-emulator/tests/test_triton.py"


def prepare() -> None:
    """Make the environment, or bring it up to date."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    wanted = "\n".join([*project["optional-dependencies"]["triton"], f"-e {PROJECT}", ""])
    installed = VENV / "installed.txt"
    if installed.exists() and installed.read_text() == wanted:
        return
    environment.create(VENV)
    packages = next(VENV.glob("lib/python*/site-packages"))
    # The first to be read; .pth files of .venv are not.
    (packages / "00-checkout.pth").write_text(f"{environment.VENV / packages.relative_to(VENV)}\n")
    requirements = VENV / "requirements.txt"
    requirements.write_text(wanted)
    environment.install(VENV, requirements, "installing ascend-emulator[triton] into .compat")
    installed.write_text(wanted)


def main() -> int:
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print((__doc__ or "").strip())
        return 0
    prepare()
    command = [str(VENV / "bin" / "python"), "-m", "pytest", *(sys.argv[1:] or ["-q"]), TESTS]
    variables = environment.variables() | {"VIRTUAL_ENV": str(VENV)}
    variables["PATH"] = f"{VENV / 'bin'}{os.pathsep}{variables['PATH']}"
    return subprocess.run(command, cwd=ROOT, env=variables).returncode
