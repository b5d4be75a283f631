# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run programs as forks of one process that has imported what they import first.

Programs that begin with `import harness.engines.imports` find torch, torch_npu, transformers and
vLLM imported; scripts of :mod:`harness.engines.scripts` only the libraries, without vLLM. These
imports take seven to ten seconds of a processor, more than the engine of a small model. No device
is open in the process, so a fork is what a start of the program would be.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple

from harness import checkout

THREADS = "OMP_NUM_THREADS"
READ_LATE = (
    "ASCEND_EMULATOR_MEMORY",
    "ASCEND_EMULATOR_TIME",
    "ASCEND_EMULATOR_TRACE",
    "HCCL_",
    "PYTEST_CURRENT_TEST",
    "VLLM_HOST_IP",
    THREADS,
)
"""Prefixes of variables that nothing reads during the imports, and the number of threads, which a
fork sets."""

READ_BY_LIBRARIES = ("ASCEND_", "HF_", "LD_", "OMP_", "PYTHON", "TORCH", "TRANSFORMERS_")
"""Prefixes of variables that torch, torch_npu and transformers read when they are imported."""


class Kind(NamedTuple):
    """Imports of a zygote, and the variables that are read before it forks.

    Attributes:
        imports: the module that imports what the programs share.
        is_late: whether nothing reads a variable during these imports.
        absent: prefixes of variables that the zygote does not have.
    """

    imports: str
    is_late: Callable[[str], bool]
    absent: tuple[str, ...]


def _is_late_for_libraries(variable: str) -> bool:
    return variable.startswith((*READ_LATE, "PYTHONPATH")) or not variable.startswith(
        READ_BY_LIBRARIES
    )


ENGINES = Kind("harness.engines.imports", lambda name: name.startswith(READ_LATE), READ_LATE)
SCRIPTS = Kind(
    "harness.engines.libraries", _is_late_for_libraries, (*READ_LATE, "PYTHONPATH", "VLLM_")
)
KINDS = {kind.imports: kind for kind in (ENGINES, SCRIPTS)}

IMPORTS = 300
"""Seconds that the imports may take."""


class Fork:
    """A running program, with the part of `subprocess.Popen`'s interface that
    `harness.engines.npus` uses."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.zygote, self.pid = zygote, pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """The exit code, negative after a signal."""
        code = int(self.zygote.answers.readline())
        self.zygote.lock.release()
        return code


class Zygote:
    """A process that forks itself for each program."""

    _all: ClassVar[dict[frozenset[tuple[str, str]], Zygote]] = {}

    def __init__(self, command: list[str], environ: dict[str, str], kind: Kind) -> None:
        """Start it; `command` runs a Python program with NPUs, in the variables of `environ`."""
        self.lock, self.kind = threading.Lock(), kind
        self.socket, other = socket.socketpair()
        self.answers = self.socket.makefile()
        with other:
            self.process = subprocess.Popen(
                [
                    *command,
                    *(sys.executable, "-m", "harness.engines.zygote"),
                    *(str(other.fileno()), kind.imports),
                ],
                env={k: v for k, v in environ.items() if not k.startswith(kind.absent)},
                cwd=checkout.ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )

    @classmethod
    def of(cls, command: list[str], environ: dict[str, str], kind: Kind = ENGINES) -> Zygote:
        """The zygote for these variables; the last three remain."""
        read = {name: value for name, value in environ.items() if not kind.is_late(name)}
        key = frozenset([("", kind.imports), *read.items()])
        zygote = cls._all.pop(key, None)
        if zygote is None or zygote.process.poll() is not None:
            zygote = cls(command, environ, kind)
        cls._all[key] = zygote
        if len(cls._all) > 3:
            cls._all.pop(next(iter(cls._all))).stop()
        return zygote

    def start(
        self,
        program: list[str],
        environ: dict[str, str],
        *outputs: int,
        directory: Path | None = None,
    ) -> Fork | None:
        """Fork; `outputs` are the files of stdout and stderr. None: another program runs."""
        if not self.lock.acquire(blocking=False):
            return None
        request = {name: value for name, value in environ.items() if self.kind.is_late(name)}
        message = json.dumps([program, str(directory or Path.cwd()), request]).encode()
        socket.send_fds(self.socket, [len(message).to_bytes(8, "big") + message], outputs)
        self.socket.settimeout(IMPORTS)
        pid = int(self.answers.readline())
        self.socket.settimeout(None)  # harness.engines.npus kills the program at its deadline.
        return Fork(self, pid)

    def stop(self) -> None:
        """End it, when its program has ended."""
        self.answers.close()
        self.socket.close()
        self.process.wait()


def _serve(channel: socket.socket, kind: Kind) -> list[str]:
    """Fork for each request; returns in a fork, with the arguments of its program."""
    importlib.import_module(kind.imports)
    if kind is ENGINES:
        from harness.engines import model_infos

        model_infos.fill()
    while True:
        head, outputs, _, _ = socket.recv_fds(channel, 8, 2)
        if not head:
            sys.exit()
        text, size = b"", int.from_bytes(head, "big")
        while len(text) < size:
            text += channel.recv(size - len(text))
        program, directory, variables = json.loads(text)
        child = os.fork()
        if not child:
            channel.close()
            for number, output in enumerate(outputs, 1):
                os.dup2(output, number)
                os.close(output)
            os.chdir(directory)
            for name in [*filter(kind.is_late, os.environ)]:
                del os.environ[name]
            os.environ.update(variables)
            if THREADS in variables:
                import torch

                torch.set_num_threads(int(variables[THREADS]))
            return program
        for output in outputs:
            os.close(output)
        channel.sendall(f"{child}\n".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        channel.sendall(f"{code}\n".encode())


if __name__ == "__main__":
    kind = KINDS[sys.argv[2]]
    sys.argv = _serve(socket.socket(fileno=int(sys.argv[1])), kind)
    if kind is SCRIPTS:  # as `python -c SCRIPT ARGUMENTS`
        sys.argv[:2], script = ["-c"], sys.argv[1]
        added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:1] = ["", *filter(None, added)]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(script, "<string>", "exec"), vars(module))
    else:
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
