# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run `python -c SCRIPT` without the imports of torch and transformers, which take most of its
time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from harness.engines import zygote


def run(
    script: str,
    *arguments: str,
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """The outcome of `python -c script arguments`, a fork of a process that has imported libraries.

    Args:
        script: Python; nothing of vLLM or of the wheels is imported before it.
        timeout: seconds, without those of the libraries.
        env: as that of `subprocess.run`.
        cwd: as that of `subprocess.run`.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    environ = dict(os.environ if env is None else env)
    command = ["-c", script, *arguments]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        files = output.fileno(), errors.fileno()
        start = zygote.Zygote.of([], environ, zygote.SCRIPTS).start
        process = start(command, environ, *files, directory=cwd) or subprocess.Popen(
            [sys.executable, *command], env=environ, cwd=cwd, stdout=files[0], stderr=files[1]
        )
        end, killer = time.monotonic() + timeout, threading.Timer(timeout, process.kill)
        killer.start()
        code = process.wait()
        killer.cancel()
        output.seek(0)
        errors.seek(0)
        printed, log = output.read(), errors.read()
    if time.monotonic() >= end:
        raise subprocess.TimeoutExpired(command, timeout, printed.encode(), log.encode())
    return subprocess.CompletedProcess(command, code, printed, log)
