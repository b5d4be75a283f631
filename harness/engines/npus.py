# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run programs on several NPUs, which are emulated if the test session's are, and read their
results."""

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ascend_emulator.activation import parse_size
from harness import checkout
from harness.engines import zygote
from harness.progress import Progress


def path() -> str:
    """PYTHONPATH with this package."""
    return os.pathsep.join(filter(None, [str(checkout.ROOT), os.environ.get("PYTHONPATH", "")]))


def run(
    npus: int,
    *command: str,
    memory: str = "1GiB",
    timeout: float = 600,
    progress: Progress | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command with this many NPUs; output is captured.

    They are emulated if those of the session are; otherwise the test is skipped where there are not
    as many. `memory` is what each emulated one has; a variable with the value "" is taken out. The
    command can import this package. `progress` advances with each result that is printed. After
    `timeout` seconds the command is killed, and what its own processes print is not waited for.
    """
    environ = {name: value for name, value in (os.environ | variables).items() if value}
    environ["PYTHONPATH"] = path()
    module = sys.modules.get("ascend_platform.process.environment")
    # An engine's configuration in this process has set it.
    if module is not None and module.requested_runner is None:
        environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    emulated: list[str] = []
    if "ASCEND_EMULATOR_NPUS" in environ:
        # Two buffers per communicator; 200 MiB unless set.
        environ.setdefault("HCCL_BUFFSIZE", "16")
        options = ["--npus", str(npus), "--soc", environ["ASCEND_EMULATOR_SOC"], "--memory", memory]
        emulated = [sys.executable, "-m", "ascend_emulator.cli", "run", *options, "--"]
        environ |= {
            "ASCEND_EMULATOR_NPUS": str(npus),
            "ASCEND_EMULATOR_MEMORY": str(parse_size(memory)),
        }
    elif (num_npus := _device_count()) < npus:
        import pytest

        pytest.skip(f"needs {npus} NPUs; there are {num_npus}")
    read, write = os.pipe()
    with tempfile.TemporaryFile("w+") as errors, os.fdopen(read, "rb", buffering=0) as output:
        process = _start(emulated, list(command), environ, write, errors.fileno())
        os.close(write)
        end, killer = time.monotonic() + timeout, threading.Timer(timeout, process.kill)
        killer.start()
        lines: list[str] = []
        for line in _lines(output.fileno(), end):
            lines.append(line)
            if progress is not None:
                for result in results(line):
                    progress.advance(result.get("name", ""))
        code, is_late = process.wait(), time.monotonic() >= end
        killer.cancel()
        errors.seek(0)
        printed, log = "".join(lines), errors.read()
    if is_late:
        raise subprocess.TimeoutExpired(command, timeout, printed.encode(), log.encode())
    return subprocess.CompletedProcess(command, code, printed, log)


def _lines(pipe: int, end: float) -> Iterator[str]:
    """Lines until all writers have closed the pipe, or until this time of `time.monotonic`:
    processes that the program started may outlive it."""
    rest, ready = b"", select.poll()
    ready.register(pipe, select.POLLIN)
    while ready.poll(max(0.0, end - time.monotonic()) * 1000) and (data := os.read(pipe, 65536)):
        *whole, rest = (rest + data).split(b"\n")
        yield from (line.decode() + "\n" for line in whole)
    if rest:
        yield rest.decode()


def _start(
    emulated: list[str], command: list[str], environ: dict[str, str], stdout: int, stderr: int
) -> subprocess.Popen[bytes] | zygote.Fork:
    """Fork a process that has imported vLLM already, if the program begins with that."""
    program = command[1] if command[0] == sys.executable else ""
    if program.endswith(".py") and "\nimport harness.engines.imports" in Path(program).read_text():
        forked = zygote.Zygote.of(emulated, environ).start(command[1:], environ, stdout, stderr)
        if forked is not None:
            return forked
    return subprocess.Popen([*emulated, *command], env=environ, stdout=stdout, stderr=stderr)


def results(output: str) -> list[Any]:
    """Parse the lines `RESULT {json}` of a program's output."""
    return [
        json.loads(line.removeprefix("RESULT "))
        for line in output.splitlines()
        if line.startswith("RESULT ")
    ]


def by_name(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Results of a program that succeeded, by their `name`."""
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {result["name"]: result for result in results(done.stdout)}


def take_streams(left: int | None) -> list[Any]:
    """Capture graphs, each of which holds a stream, until an Ascend910B1 has ``left``; none for
    None."""
    import torch

    if left is None:
        return []
    x, stream, graphs = torch.ones(1, device="npu"), torch.npu.Stream(), []
    for _ in range(1984 - left):
        graphs.append(torch.npu.NPUGraph())
        with torch.npu.graph(graphs[-1], stream=stream):
            x.add_(1)
    return graphs


def _device_count() -> int:
    import torch

    return torch.npu.device_count()
