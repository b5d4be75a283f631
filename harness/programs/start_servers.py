# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_multi_node.py: start servers on one or several simulated machines, send requests, and
kill a part.

    python harness/programs/start_servers.py '[{"name": ..., "machines": [{"command": [...]}],
    "prompts": [[1, 2]], …}]'

A machine is a command with environment variables and a temporary directory of its own; the last one
serves. With `hides`, it has a mount namespace of its own, in which these directories are empty.
With `ready`, the next waits until that is in its output. With `kill`, a part of a name or the
number of a machine, the last process of that name or all of that machine die by SIGKILL while a
request is answered, or without one if the case is `idle`. Prints one line `RESULT {json}` a case.
Every process that a case starts stays below this one, which ends those that are left after it has
counted them.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from harness.engines.launcher import shared_memory
from harness.engines.ports import free_port

PR_SET_CHILD_SUBREAPER = 36
READY = 400.0  # Seconds until all processes of a case have started.
GONE = 40.0  # Seconds until a process exits after a kill.
HIDE = (
    'while [ "$1" != -- ]; do mkdir -p "$1" && mount -t tmpfs none "$1" || exit; shift; done;'
    ' shift; exec "$@"'
)
started: dict[int, psutil.Popen] = {}
seen: set[str] = set()  # Shared memory of the descendants of this process.


class Case:
    """One case, with its machines, in a directory of its own for sockets and logs."""

    def __init__(self, case: dict[str, Any], directory: Path) -> None:
        self.case, self.directory = case, directory
        self.port = free_port()
        self.fields = {
            "port": str(self.port),
            "other": str(free_port()),
            "directory": str(directory),
        }
        self.running: list[psutil.Popen] = []

    def start(self) -> None:
        for number, machine in enumerate(self.case["machines"]):
            command = machine["command"]
            if hides := machine.get("hides"):
                command = ["unshare", "--mount", "sh", "-c", HIDE, "sh", *hides, "--", *command]
            command = [self.fill(word) for word in command]
            environ = os.environ | {
                name: self.fill(value) for name, value in machine.get("environ", {}).items()
            }
            environ = {name: value for name, value in environ.items() if value}
            environ["TMPDIR"] = str(self.temporary(number))
            self.temporary(number).mkdir(exist_ok=True)
            with open(self.log(number), "w") as log:
                process = psutil.Popen(
                    command,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self.running.append(process)
            started[process.pid] = process
            if text := machine.get("ready"):
                self.until(lambda number=number, text=text: text in self.log(number).read_text())  # type: ignore[misc]

    def fill(self, word: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda match: self.fields[match[1]], word)

    def temporary(self, number: int) -> Path:
        return self.directory / str(number)

    def log(self, number: int) -> Path:
        return self.directory / f"machine{number}.log"

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY
        while not true():
            ended = [
                number for number, process in enumerate(self.running) if process.poll() is not None
            ]
            if ended or time.monotonic() > deadline:
                logs = "".join(
                    self.log(number).read_text()[-3000:] for number in range(len(self.running))
                )
                raise RuntimeError(f"machines that ended: {ended}; the last lines:\n{logs}")
            time.sleep(0.2)

    def healthy(self) -> bool:
        with contextlib.suppress(OSError), self.get("/health") as answer:
            return bool(answer.status == 200)
        return False

    def get(self, path: str, body: dict[str, Any] | None = None, timeout: float = 60) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        return urllib.request.urlopen(request, timeout=timeout)

    def ask(self, prompt: list[int], length: int) -> dict[str, Any]:
        asked = {
            "prompt": prompt,
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
        }
        with self.get(
            "/v1/completions", {"model": "m", "return_token_ids": True} | asked
        ) as answer:
            choice = json.load(answer)["choices"][0]
        return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}

    def engines(self) -> int:
        """Number of data-parallel engines that have served requests."""
        with self.get("/metrics") as answer:
            counts = re.findall(
                r'^vllm:request_success_total{engine="(\d+)".* (\S+)$',
                answer.read().decode(),
                re.MULTILINE,
            )
        return len({engine for engine, count in counts if float(count)})

    def kill(self) -> dict[str, Any]:
        """Kill a part while a request is answered; what the client reads, and after how many
        seconds what ends."""
        victims = self.victims()
        shared = shared_memory(below())
        seen.update(shared)
        # Shared memory of that machine is lost with it; here the others may have it open.
        if isinstance(self.case["kill"], int):
            shared -= shared_memory(victims)
        message = ""
        if self.case.get("idle"):
            for process in victims:
                process.kill()
            return {"said": message, "answered": 0.0} | self.end(time.monotonic(), shared)
        began = 0.0
        body = {
            "model": "m",
            "prompt": self.case["prompts"][0],
            "max_tokens": 900,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            with self.get("/v1/completions", body, GONE) as lines:
                for number, line in enumerate(lines):
                    if number == 20:
                        began = time.monotonic()
                        for process in victims:
                            process.kill()
                    if b'"error"' in line:
                        message = line.decode().strip()
                        break
        except OSError as error:
            message = f"{type(error).__name__}: {error}"
        return {
            "killed": len(victims),
            "said": message,
            "answered": time.monotonic() - began,
        } | self.end(began, shared)

    def end(self, began: float, shared: set[str]) -> dict[str, Any]:
        """Processes, shared memory and files that are left after the shutdown, or after a
        timeout."""
        while time.monotonic() - began < GONE and self.left():
            time.sleep(0.1)
        return {
            "codes": [process.poll() for process in self.running],
            "gone": time.monotonic() - began,
            "left": self.left(),
            "shared": sorted(name for name in shared if Path(name).exists()),
            "files": self.files(),
        }

    def files(self) -> list[str]:
        """Files left in the temporary directories of the surviving machines, except
        torch's cache."""
        living = [
            self.temporary(number)
            for number in range(len(self.running))
            if number != self.case["kill"]
        ]
        names = [path.name for directory in living for path in directory.iterdir()]
        return sorted(name for name in names if not name.startswith("torchinductor"))

    def victims(self) -> list[psutil.Process]:
        what = self.case["kill"]
        if isinstance(what, int):
            machine = self.running[what]
            return [machine, *machine.children(recursive=True)]
        return [process for process in below() if what in title(process)][-1:]

    def left(self) -> list[str]:
        """Processes that should have ended with the server. Nodes of Ray live on, without the
        engine's workers."""
        kept = set()
        for machine in (
            self.running[:-1]
            if any("ray" in each["command"] for each in self.case["machines"])
            else []
        ):
            with contextlib.suppress(psutil.NoSuchProcess):
                kept |= {machine, *machine.children(recursive=True)}
        return [
            title(process)
            for process in below()
            if process not in kept or "RayWorkerProc" in title(process)
        ]


def title(process: psutil.Process) -> str:
    try:
        return " ".join(word for word in process.cmdline() if word) or process.name()
    except psutil.Error:
        return ""


def below() -> list[psutil.Process]:
    """All live descendants of this process, in the order of starting."""
    descendants = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                descendants.append(process)
            elif process.pid in started:
                # Its main thread has exited, others have not yet.
                if started[process.pid].poll() is None:
                    descendants.append(process)
            elif process.ppid() == os.getpid():
                # An orphan that was reparented to this process.
                os.waitpid(process.pid, os.WNOHANG)
    return descendants


@contextlib.contextmanager
def cleared() -> Iterator[None]:
    """End what is left below this process, by SIGTERM, then by SIGKILL, and remove the shared
    memory of killed machines."""
    try:
        yield
    finally:
        seen.update(shared_memory(below()))
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in below():
                with contextlib.suppress(psutil.Error):
                    end(process)
            deadline = time.monotonic() + 10
            while below() and time.monotonic() < deadline:
                time.sleep(0.1)
        for name in seen:
            Path(name).unlink(missing_ok=True)


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="m", ignore_cleanup_errors=True) as directory,
        cleared(),
    ):
        one = Case(case, Path(directory))
        began = time.monotonic()
        one.start()
        one.until(one.healthy)
        record: dict[str, Any] = {"seconds": time.monotonic() - began}
        with ThreadPoolExecutor() as threads:  # Together, so that data-parallel engines share them.
            record["results"] = [
                [answer] for answer in threads.map(one.ask, case["prompts"], case["lengths"])
            ]
        record["engines"] = one.engines()
        if "kill" in case:
            record |= one.kill()
        if os.environ.get("SERVER_CASES_LOGS"):
            for number in range(len(one.running)):
                Path(os.environ["SERVER_CASES_LOGS"], f"{case['name']}.{number}.log").write_text(
                    one.log(number).read_text()
                )
        return record


if __name__ == "__main__":
    # orphans become children of this process
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for each in json.loads(sys.argv[1]):
        try:
            result = outcome(each)
        except (RuntimeError, OSError) as problem:
            result = {"failed": str(problem)}
        print("RESULT", json.dumps({"name": each["name"], **result}), flush=True)
