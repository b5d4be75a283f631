# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Interpreter that imports what an engine core imports, and waits for the API server to spawn one
(``process/early_engine.py``)."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import multiprocessing
import os
import resource
import select
import socket
import sys
import threading
from collections.abc import Sequence
from multiprocessing import resource_tracker
from typing import Any

from ascend_platform.process import early_engine, environment, startup

MODULES = ("vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor")
"""Modules that an engine core imports before it has its configuration."""
UNUSED_AFTER = 600.0  # Seconds.
HANDED_OVER = {
    # Not read when a module is imported, except by process/environment.py, which is told below.
    "VLLM_RPC_BASE_PATH": "vLLM reads it when it makes a socket",
    "VLLM_WORKER_MULTIPROC_METHOD": "vLLM reads it when it starts a process",
    "VLLM_USE_V2_MODEL_RUNNER": "vLLM reads it from a configuration",
    "VLLM_MOE_SKIP_PADDING": "vLLM reads it in a step",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "vLLM reads it in a step",
    # Libraries in the API server set these for what they load later.
    "RAY_CLIENT_MODE": "of Ray, which sets it as it is imported",
    "AITER_SITUV2_A4W4": "of AITER, a library for other devices",
    "AITER_SITUV2_A8W4": "of AITER, a library for other devices",
}
"""Variables that the API server sets after the interpreter has started, and why they may be set
after the imports. Any other must have the value that the imports have given it here."""


def program(descriptor: int, tracker: int) -> str:
    """Import modules and wait for the API server; the program that its new process would run."""
    resource_tracker._resource_tracker._fd = tracker
    first = early_engine.environment()
    reserved = _reserve()
    # Above the reserved descriptors, of which its own is one now.
    connection = socket.socket(
        fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, early_engine.RESERVED)
    )
    os.dup2(reserved[0], descriptor, inheritable=False)
    reserved.append(descriptor)
    begin = json.loads(connection.recv(1 << 20))
    listener = _Listener(connection)
    command, path = sys.argv, _import(begin)
    message, received = listener.result()
    if reason := _difference(message, first, path):
        connection.send(reason.encode())
        os._exit(0)
    sys.argv = command
    imported = len(sys.modules)
    _take(message, received, reserved, first)
    connection.send(f"yes {imported}".encode())
    connection.close()
    return str(message["program"])


def _reserve() -> list[int]:
    """Occupy the low descriptors, which those of the API server will replace."""
    null = os.open(os.devnull, os.O_RDWR)
    found = [null]
    while found[-1] < early_engine.RESERVED:
        found.append(os.dup(null))
    os.close(found.pop())
    return found


def _import(begin: dict[str, Any]) -> list[str]:
    """Import the modules as the API server does. ``sys.path`` before that."""
    startup.run_child()
    # By which scopes.scopes_here() knows an engine core.
    multiprocessing.current_process().name = early_engine.NAME
    sys.argv = begin["arguments"]
    if not sys.flags.safe_path:
        sys.path[0] = begin["directory"]
    path = sys.path.copy()
    for name in MODULES:
        # The process that is spawned imports it again, and fails.
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)
    return path


class _Listener(threading.Thread):
    """Receives the API server's message, and ends this process without one, also during imports."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(name="ascend-early-engine", daemon=True)
        self._connection = connection
        self._result: tuple[dict[str, Any], Sequence[int]] = {}, ()
        self.start()

    def run(self) -> None:
        if not select.select([self._connection], [], [], UNUSED_AFTER)[0]:
            self._connection.shutdown(socket.SHUT_RD)  # Data that has been sent is still received.
        data, received, _, _ = socket.recv_fds(self._connection, 1 << 20, 253)
        if not data:
            os._exit(0)
        self._result = json.loads(data), received

    def result(self) -> tuple[dict[str, Any], Sequence[int]]:
        self.join()
        return self._result


def _difference(message: dict[str, Any], first: dict[str, str], path: Sequence[str]) -> str:
    """Why the modules would be imported otherwise in a new process, or ""."""
    here, there = early_engine.environment(), message["environment"]
    changed = [name for name in first.keys() | there.keys() if there.get(name) != first.get(name)]
    unlike = {name for name in changed if there.get(name) != here.get(name)} - HANDED_OVER.keys()
    if unlike:
        return f"{', '.join(sorted(unlike))} changed"
    added = [each for each in message["path"] if each not in path]
    if [each for each in message["path"] if each in path] != list(path):
        return "sys.path changed"
    # Packages, such as Ray, add folders of their own.
    if not all(each.startswith(tuple(f"{known}/" for known in path)) for each in added):
        return "sys.path has other folders"
    return ""


def _take(
    message: dict[str, Any],
    received: Sequence[int],
    reserved: Sequence[int],
    first: dict[str, str],
) -> None:
    """Take what a new process would inherit: descriptors, limits and variables."""
    for number, limits in message["limits"].items():
        if tuple(limits) != resource.getrlimit(int(number)):
            resource.setrlimit(int(number), tuple(limits))
    numbers = message["descriptors"]
    for source, number in zip(received, numbers, strict=True):
        os.dup2(source, number)
        os.close(source)
    for number in set(reserved) - set(numbers):
        os.close(number)
    for name in HANDED_OVER:
        value = message["environment"].get(name)
        if value is not None and value != first.get(name):
            os.environ[name] = value
        elif value is None and name in first:
            os.environ.pop(name, None)
    if environment.RUNNER in os.environ:
        environment.note_runner()
