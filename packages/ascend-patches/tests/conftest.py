# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A plugin with patches, and something to patch, both real packages on the path of a process of
their own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ascend_platform import extension
from harness.project.distributions import write_metadata

HEAD = """
optional = true
scope = "platform"
vllm = ">=0"
why = "r"
upstream = "u"
remove_when = "w"
"""


class World:
    """A directory with the package ``victim`` and the plugin ``plugin_p``, whose entry point is
    ``p``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.variables: dict[str, str] = {}
        for package in ("victim", "plugin_p"):
            (directory / package).mkdir()
            (directory / package / "__init__.py").touch()
        points = "[vllm_ascend.overrides]\np = plugin_p\n"
        write_metadata(directory, "plugin-p", entry_points=points)

    def victim(self, module: str, text: str) -> None:
        self.directory.joinpath("victim", f"{module}.py").write_text(text)

    def patch(
        self, name: str, target: str, result: str, fingerprint: str | None = None, **fields: str
    ) -> None:
        """Adds a patch ``p.<name>`` that makes `result`, an expression in which ``original`` stands
        for the original."""
        module, _, qualname = target.partition(":")
        path = self.directory.joinpath(*module.split(".")).with_suffix(".py")
        if fingerprint is None:
            fingerprint = extension.fingerprint(path.read_text(), qualname)
        table, file = (
            self.directory / "plugin_p" / name for name in ("overrides.toml", "patch_p.py")
        )
        row = {"target": target, "by": f"patch_p:{name}"} | fields
        lines = [f"{key} = {json.dumps(value)}" for key, value in row.items()]
        lines.append(f'sources = {{ "0.31" = {json.dumps(fingerprint)} }}')
        rows = table.read_text() if table.exists() else HEAD
        table.write_text("\n".join([rows, "[[override]]", *lines, ""]))
        with file.open("a") as functions:
            functions.write(f"def {name}(original):\n    return {result}\n")

    def run(self, script: str) -> tuple[str, str]:
        """A script's output on stdout and stderr; ascend-platform's lines are on the latter."""
        path = os.pathsep.join(filter(None, [str(self.directory), os.environ.get("PYTHONPATH")]))
        inherited = {
            k: v
            for k, v in os.environ.items()
            if k not in ("VLLM_PLUGINS", "VLLM_VERSION", "VLLM_ASCEND_DISABLE_PATCHES")
        }
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=inherited | {"PYTHONPATH": path} | self.variables,
            capture_output=True,
            text=True,
            cwd=self.directory,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr.strip()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def command(world: World) -> Callable[..., tuple[int, str, str]]:
    """Runs ``vllm-ascend patches …`` in the world; gives the exit status, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        out, err = world.run(
            f"from ascend_cli.main import main; print('STATUS', main({['patches', *arguments]!r}))"
        )
        text, _, status = out.rpartition("STATUS ")
        return int(status), text, err

    return run
