"""A directory, seen by all engines, in which each that serves has a file with its address: the registry of peers.

A file is touched as long as its engine lives; one that has not been for a minute counts as left behind. The directory is no proof
of anything: whoever is found in it has to know the secret.
"""

import contextlib
import os
import time
import uuid
from pathlib import Path

import msgspec

TTL = 60.0
HEARTBEAT_INTERVAL = 15.0
MAX_ENTRY_BYTES = 4096


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file holds."""

    address: str


class Registration:
    """An address in the registry, until ``end``.

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
    """The addresses of engines whose weights have this key, the latest seen first. What cannot be read is left out."""
    found = []
    with contextlib.suppress(OSError):
        for path in Path(directory).glob(f"{key}-*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                status = path.stat()
                if time.time() - status.st_mtime < TTL and status.st_size <= MAX_ENTRY_BYTES:
                    entry = msgspec.json.decode(path.read_bytes(), type=Entry)
                    found.append((status.st_mtime, entry.address))
    return [address for _, address in sorted(found, reverse=True)]
