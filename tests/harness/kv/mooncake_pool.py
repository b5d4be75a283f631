"""Mooncake's master and a client that lends it memory, started as an operator starts them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

PROGRAMS = Path(sys.executable).parent


class MooncakePool:
    """``config`` is the path of the configuration for instances; ``processes`` are by name, ``master`` and ``owner``."""

    def __init__(self, directory: Path, mib: int) -> None:
        self.directory, self.mib, self.port = directory, mib, _free_port()
        self.config = directory / "mooncake.json"
        known = {"master_server_address": f"127.0.0.1:{self.port}", "protocol": "tcp", "local_hostname": "127.0.0.1"}
        self.config.write_text(json.dumps(known | {"metadata_server": "P2PHANDSHAKE"}))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.start_master()
        self.start_owner()

    def start_master(self) -> None:
        self._start("master", "mooncake_master", f"--rpc_port={self.port}", f"--metrics_port={_free_port()}")
        self._wait(self.port)

    def start_owner(self) -> None:
        port = _free_port()
        size, where = f"--global_segment_size={self.mib} MB", f"--master_server_address=127.0.0.1:{self.port}"
        meta = "--metadata_server=P2PHANDSHAKE"
        self._start("owner", "mooncake_client", size, where, "--host=127.0.0.1", f"--port={port}", meta, "--protocol=tcp")
        self._wait(port)

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait(20)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(20)

    def _start(self, name: str, *command: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            program = str(PROGRAMS / command[0])
            self.processes[name] = subprocess.Popen([program, *command[1:]], stdout=log, stderr=subprocess.STDOUT)

    def _wait(self, port: int, seconds: float = 30.0) -> None:
        until = monotonic() + seconds
        while monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                sleep(0.05)
        logs = "".join(file.read_text(errors="replace")[-2000:] for file in self.directory.glob("*.log"))
        raise TimeoutError(f"no Mooncake process listens on port {port} after {seconds:g} s\n{logs}")


@contextmanager
def mooncake_pool(mib: int = 512) -> Iterator[MooncakePool]:
    with tempfile.TemporaryDirectory() as directory:
        pool = MooncakePool(Path(directory), mib)
        try:
            yield pool
        finally:
            pool.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
