"""Peer registry: a shared directory with one file per serving rank, holding its address.

A server updates its file's mtime while it lives; a file not updated for a minute is stale. The registry proves nothing: a peer
found there still has to know the secret.
"""

import contextlib
import os
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
        self.path = Path(directory) / f"{key}-{uuid.uuid4().hex}.json"
        unfinished = self.path.with_suffix(".new")
        unfinished.write_bytes(msgspec.json.encode(Entry(address)))
        unfinished.rename(self.path)

    def heartbeat(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


def find(directory: str, key: str) -> list[str]:
    """Addresses of servers whose weights have this key, the most recently updated first. Unreadable entries are skipped."""
    found = []
    with contextlib.suppress(OSError):
        for path in Path(directory).glob(f"{key}-*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                status = path.stat()
                if time.time() - status.st_mtime < TTL and status.st_size <= MAX_ENTRY_BYTES:
                    entry = msgspec.json.decode(path.read_bytes(), type=Entry)
                    found.append((status.st_mtime, entry.address))
    return [address for _, address in sorted(found, reverse=True)]
