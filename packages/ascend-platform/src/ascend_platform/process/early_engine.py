# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Interpreter of ``vllm serve``'s engine core, started with the command, so that both import vLLM
at the same time.

vLLM starts its engine core by multiprocessing's ``spawn``: a new interpreter, in which the imports
of the API server are repeated. This one is a child process of the API server too, runs
``process/waiting_engine.py``, and has imported the same modules when the API server spawns its
engine core. It then receives what ``spawn`` gives to a new process: file descriptors, by
SCM_RIGHTS, and the program. No process is forked, so CANN's libraries are in the state that they
have in a spawned process.

The interpreter is used once, for the first process that is spawned if that is the engine core, and
only if a new process would start in the same state. Otherwise it is ended, and a new one is
started.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.context
import multiprocessing.resource_tracker
import multiprocessing.spawn
import multiprocessing.util
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from ascend_platform import host

NAME = "EngineCore"  # vllm/v1/engine/utils.py, CoreEngineProcManager
PROGRAM = "from ascend_platform.process import waiting_engine as e; exec(e.program(%d, %d))"
OTHER_ENGINES = (
    "--data-parallel",
    "-dp",
    "--headless",
    "--api-server-count",
    "-asc",
    "--nnodes",
    "--numa-bind",
    "--help",
    "--omni",
    "--config=",
    "-h",
)
"""Options of ``vllm serve`` with which the engine core is not spawned, or not by the API server, or
not as the first. A file of options may have such an option too."""
OTHER_WORKERS = (
    "--tensor-parallel",
    "-tp",
    "--pipeline-parallel",
    "-pp",
    "--distributed-executor",
    "--prefill-context",
    "-pcp",
)
"""Options with which workers may be processes of their own; OMP_NUM_THREADS is then set by the
engine core."""
ANSWER_WITHIN = 60.0  # Seconds that the interpreter may still import.
RESERVED = 256
"""File descriptors below this number are free in the interpreter, for those of the API server."""
STATUS = ("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapEff", "NoNewPrivs", "Seccomp")
STATUS_OF_CPUS = ("Cpus_allowed", "Mems_allowed")

_waiting: _Interpreter | None = None


def start() -> None:
    """Start the interpreter, if this process is ``vllm serve`` with one engine core, and there is a
    second CPU for it. Never raises."""
    global _waiting
    with contextlib.suppress(Exception):
        if _waiting is None and _is_useful(sys.orig_argv):
            _waiting = _Interpreter()
            _waiting.start()


def _is_useful(command: Sequence[str]) -> bool:
    """Whether the command is ``python [OPTION] FILE serve …`` with one engine core in a process of
    its own."""
    return (
        _arguments(command)[1:2] == ["serve"]
        and not any(word.startswith(OTHER_ENGINES) or word == "--config" for word in command)
        and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0"
        and os.environ.get("VLLM_USE_RUST_FRONTEND", "0") == "0"
        and host.usable_cpus() > 1
        and resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 4 * RESERVED
    )


def _arguments(command: Sequence[str]) -> list[str]:
    """``sys.argv`` of a command of Python that runs a file; empty for ``-m`` and ``-c``."""
    words = list(command[1:])
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-X", "-W"):
        del words[0]
    return words if words and not words[0].startswith("-") else []


def state() -> dict[str, Any]:
    """State of this thread that a child process inherits, other than environment and limits."""
    with open("/proc/thread-self/status") as status:
        lines = dict(line.rstrip("\n").split(":", 1) for line in status)
    found: dict[str, Any] = {name: lines.get(name) for name in STATUS + STATUS_OF_CPUS}
    return found | {"nice": os.getpriority(os.PRIO_PROCESS, 0), "directory": os.getcwd()}


class _Interpreter:
    """The interpreter from its start to the first spawn."""

    def start(self) -> None:
        context: Any = multiprocessing.context
        util: Any = multiprocessing.util
        script, *_ = arguments = _arguments(sys.orig_argv)
        directory = None if sys.flags.safe_path else os.path.dirname(os.path.realpath(script))
        self.executable = multiprocessing.spawn.get_executable()
        self.tracker = multiprocessing.resource_tracker.getfd()
        self.state, self.owner = state(), os.getpid()
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.ours.send(json.dumps({"arguments": arguments, "directory": directory}).encode())
            program = PROGRAM % (theirs.fileno(), self.tracker)
            flags = util._args_from_interpreter_flags()
            command = [self.executable, *flags, "-c", program, "--multiprocessing-fork"]
            with _variables(_threads(arguments)):
                descriptors = [theirs.fileno(), self.tracker]
                self.pid: int | None = util.spawnv_passfds(self.executable, command, descriptors)
        atexit.register(self.end)
        self._popen = context.SpawnProcess._Popen
        context.SpawnProcess._Popen = staticmethod(self._launch)

    def end(self) -> None:
        """End the interpreter if it still waits."""
        if self.pid is not None and os.getpid() == self.owner:  # Not in a forked child.
            pid, self.pid = self.pid, None
            self.ours.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _launch(self, process: Any) -> Any:
        """The first process that multiprocessing spawns."""
        context: Any = multiprocessing.context
        util: Any = multiprocessing.util
        context.SpawnProcess._Popen = staticmethod(self._popen)
        atexit.unregister(self.end)
        try:
            if process.name != NAME:
                return self._popen(process)
            spawn, thread = util.spawnv_passfds, threading.get_ident()

            def spawn_or_use(path: str, arguments: list[str], descriptors: Any) -> int:
                # Not another thread, nor the resource tracker.
                is_this = arguments[-1] == "--multiprocessing-fork"
                if not is_this or threading.get_ident() != thread:
                    return spawn(path, arguments, descriptors)
                pid = self._use(path, arguments, sorted(map(int, descriptors)))
                return pid or spawn(path, arguments, descriptors)

            util.spawnv_passfds = spawn_or_use
            try:
                return self._popen(process)
            finally:
                util.spawnv_passfds = spawn
        finally:
            self.end()

    def _use(self, path: str, command: list[str], descriptors: list[int]) -> int | None:
        """Process id of the interpreter if it runs the command's program, otherwise None."""
        from ascend_platform.logger import logger

        try:
            reason = self._difference(path, command, descriptors)
            reason = reason or self._request(command, descriptors)
        except (OSError, ValueError) as error:  # TimeoutError too.
            reason = f"the waiting interpreter does not answer: {error}"
        if not reason.startswith("yes "):
            logger.debug("The engine core has a new interpreter: %s", reason)
            return None
        pid, self.pid = self.pid, None
        self.ours.close()
        modules = reason.removeprefix("yes ")
        logger.debug("The engine core %d has an interpreter with %s modules", pid, modules)
        return pid

    def _difference(self, path: str, command: list[str], descriptors: list[int]) -> str:
        """Why a new process would start in another state, as known here, or ""."""
        now = state()
        different = [name for name, value in now.items() if value != self.state[name]]
        if different:
            return f"{', '.join(different)} changed"
        if path != self.executable or self.tracker not in descriptors:
            return "another executable, or another resource tracker"
        if "-c" not in command or descriptors[-1] >= RESERVED:
            return "another program, or many open files"
        if self.pid is None or os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = None
            return "the waiting interpreter has ended"
        return ""

    def _request(self, command: list[str], descriptors: list[int]) -> str:
        """Hand the program over; the answer of the interpreter, "yes" with a number of modules, or
        why it refuses."""
        limits = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
        numbers = [0, 1, 2, *descriptors]
        message = {
            "program": command[command.index("-c") + 1],
            "descriptors": numbers,
            "environment": environment(),
            "path": sys.path,
            "limits": {number: resource.getrlimit(number) for number in limits},
        }
        self.ours.settimeout(ANSWER_WITHIN)
        socket.send_fds(self.ours, [json.dumps(message).encode()], numbers)
        answer = self.ours.recv(1 << 16)
        return answer.decode() or "the waiting interpreter has ended"


def environment() -> dict[str, str]:
    """Environment of this process as a new one would have it, with what C libraries have set."""
    import ctypes

    strings = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: dict[str, str] = {}
    index = 0
    while strings and (each := strings[index]) is not None:
        name, _, value = os.fsdecode(each).partition("=")
        found.setdefault(name, value)
        index += 1
    return found


def _threads(arguments: Sequence[str]) -> dict[str, str]:
    """Variables that vLLM sets for the engine core with a worker in the same process
    (``_configure_uniproc_startup_threads``), and which libraries read when they are loaded."""
    package = host.package("vllm")
    source = package and package / "v1" / "engine" / "utils.py"
    if (
        "OMP_NUM_THREADS" in os.environ
        or any(word.startswith(OTHER_WORKERS) for word in arguments)
        or not (source and source.is_file())
        or "OMP_NUM_THREADS_SET_BY_VLLM" not in source.read_text()
    ):
        return {}
    return {
        "OMP_NUM_THREADS": str(host.usable_cpus()),
        "VLLM_OMP_NUM_THREADS_SET_BY_VLLM": "1",
    }


@contextlib.contextmanager
def _variables(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
