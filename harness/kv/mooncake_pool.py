# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Mooncake's master and a client that lends it memory, started as an operator starts them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep

import psutil
from harness.engines.ports import free_port

PROGRAMS = Path(sys.executable).parent


class MooncakePool:
    """``config`` is the path of the configuration for instances; ``processes`` are by name,
    ``master`` and ``owner``."""

    def __init__(self, directory: Path, mib: int) -> None:
        self.directory, self.mib = directory, mib
        self.config = directory / "mooncake.json"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = self._start("master", _master)
        known = {
            "master_server_address": f"127.0.0.1:{self.port}",
            "protocol": "tcp",
            "local_hostname": "127.0.0.1",
        }
        self.config.write_text(json.dumps(known | {"metadata_server": "P2PHANDSHAKE"}))
        self.start_owner()

    def start_master(self) -> None:
        """Start it again on its port, which instances know."""
        self._start("master", _master, self.port)

    def start_owner(self) -> None:
        size, where = (
            f"--global_segment_size={self.mib} MB",
            f"--master_server_address=127.0.0.1:{self.port}",
        )
        common = (
            size,
            where,
            "--metadata_server=P2PHANDSHAKE",
            "--host=127.0.0.1",
            "--protocol=tcp",
        )
        self._start("owner", lambda port: ("mooncake_client", *common, f"--port={port}"))

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait(20)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(20)

    def _start(
        self, name: str, command: Callable[[int], tuple[str, ...]], known: int | None = None
    ) -> int:
        """Start a process and return the port that it listens on, another one if somebody took the
        first meanwhile."""
        for _ in range(5):
            port = known or free_port()
            program, *options = command(port)
            with (self.directory / f"{name}.log").open("ab") as log:
                process = subprocess.Popen(
                    [str(PROGRAMS / program), *options], stdout=log, stderr=subprocess.STDOUT
                )
            self.processes[name] = process
            if _listens(process, port):
                return port
            process.kill()
            process.wait(20)
        logs = "".join(
            file.read_text(errors="replace")[-2000:] for file in self.directory.glob("*.log")
        )
        raise TimeoutError(f"Mooncake's {name} listens on no port\n{logs}")


def _master(port: int) -> tuple[str, ...]:
    return "mooncake_master", f"--rpc_port={port}", f"--metrics_port={free_port()}"


def _listens(process: subprocess.Popen[bytes], port: int, seconds: float = 30.0) -> bool:
    """Whether the process itself listens on the port, in time; another process may have
    taken it."""
    seen = psutil.Process(process.pid)
    until = monotonic() + seconds
    while monotonic() < until and process.poll() is None:
        with contextlib.suppress(psutil.Error):
            if any(
                each.status == psutil.CONN_LISTEN and each.laddr.port == port
                for each in seen.net_connections("tcp")
            ):
                return True
        sleep(0.05)
    return False


@contextlib.contextmanager
def mooncake_pool(mib: int = 512) -> Iterator[MooncakePool]:
    with tempfile.TemporaryDirectory() as directory:
        pool = MooncakePool(Path(directory), mib)
        try:
            yield pool
        finally:
            pool.close()
