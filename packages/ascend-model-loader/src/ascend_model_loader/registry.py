# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Peer registry: a shared directory with one file per serving rank, holding its address.

A server updates its file's mtime while it lives; a file not updated for a minute is stale. The
registry is not trusted: a peer found there must still know the secret.
"""

import contextlib
import os
import stat
import tempfile
import time
import uuid
from pathlib import Path

import msgspec

TTL = 60.0
"""Seconds after its last heartbeat for which an entry is valid."""
HEARTBEAT_INTERVAL = 15.0
"""Seconds between updates of an entry."""
MAX_ENTRY_BYTES = 4096


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a registry file."""

    address: str


class Registration:
    """A server's entry in the registry, until ``remove``.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: str, key: str, address: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.path, self._address = Path(directory) / f"{key}-{uuid.uuid4().hex}.json", address
        self._write()

    def heartbeat(self) -> None:
        with contextlib.suppress(OSError):
            try:
                os.utime(self.path)
            except FileNotFoundError:  # somebody has cleaned the directory
                self._write()

    def _write(self) -> None:
        unfinished = self.path.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode(Entry(self._address)))
        unfinished.rename(self.path)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


def find(directory: str, key: str) -> list[str]:
    """Addresses of servers whose weights have this key, the most recently updated first. Unreadable
    entries are skipped."""
    addresses = []
    with contextlib.suppress(OSError):
        now = _time_there(directory)
        for path in Path(directory).glob(f"{key}-*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                age, content = _read(path, now)
                if -TTL < age < TTL:
                    addresses.append((age, msgspec.json.decode(content, type=Entry).address))
    return [address for _, address in sorted(addresses)]


def _time_there(directory: str) -> float:
    """The time by the clock of the file system, which updates the entries' times; this machine's if
    it cannot be asked."""
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return time.time()


def _read(path: Path, now: float) -> tuple[float, bytes]:
    """Age in seconds and content of a file; of anything else, such as a FIFO, which would block,
    nothing."""
    with open(
        path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    ) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_ENTRY_BYTES:
            return TTL, b""
        return now - status.st_mtime, file.read(MAX_ENTRY_BYTES)
