# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Directory as a pool: one file per chunk, on a local disk or a shared mount."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascend_platform import extension
from vllm.v1.kv_offload.base import Medium
from vllm.v1.kv_offload.tiering.fs.io import O_DIRECT, probe_o_direct

from ascend_kv_connector.config import Positive
from ascend_kv_connector.store.pool import LOADED, STORED
from ascend_kv_connector.store.tier import PoolTier, TierOptions

ABANDONED_SECONDS = 3600.0
"""Age of a temporary file whose writer has certainly ended."""

CLEAN_SECONDS = 60.0
"""Interval at which the size of the pool is compared with its quota."""

EVICTED_TO = 0.9
"""Part of the quota that is left after files were removed."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class DiskPool:
    """See :class:`~ascend_kv_connector.store.pool.Pool`. Reads and writes use O_DIRECT if the disk
    supports it."""

    def __init__(self, path: str, quota: int | None = None) -> None:
        """Create the directory. ``quota``: bytes beyond which the chunks that were not used for
        longest are removed.

        Raises:
            RefusedError: it is not writable, or others may write there, and hence plant KV cache.
        """
        self.root = Path(path)
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            ours, status = self._probe(), self.root.stat()
        except OSError as error:
            raise extension.RefusedError(
                f"disk_path {path} is not writable ({error}); fix: choose a writable directory"
            ) from None
        if status.st_mode & stat.S_IWOTH or status.st_uid not in (ours.st_uid, 0):
            raise extension.RefusedError(
                f"disk_path {path} belongs to user {status.st_uid} with mode"
                f" {stat.S_IMODE(status.st_mode):o}: other users may write KV cache there, which"
                " this instance would load; fix: chmod o-w it, or choose a directory of this user"
            )
        self.description = f"disk {path}"
        self._direct = O_DIRECT if probe_o_direct(path) else 0
        self._quota, self._written, self._closed = quota, 0, False
        self._changed = threading.Condition()
        threading.Thread(target=self._clean, name="kv-clean", daemon=True).start()

    def buffer(self, size: int) -> memoryview:
        return memoryview(mmap.mmap(-1, size))

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [self._path(name).exists() for name in names]

    def put(self, names: Sequence[str], records: Sequence[memoryview]) -> list[str]:
        return [
            self._write(self._path(name), record)
            for name, record in zip(names, records, strict=True)
        ]

    def get(self, names: Sequence[str], records: Sequence[memoryview]) -> list[str]:
        return [
            self._read(self._path(name), record)
            for name, record in zip(names, records, strict=True)
        ]

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            with suppress(OSError):
                self._path(name).unlink()

    def close(self) -> None:
        """End the cleaning thread; no files stay open."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _probe(self) -> os.stat_result:
        """Status of a new file there: owner and time as the file system sees them, which may be a
        mount with another clock."""
        with _create(probe := self.root / f".{secrets.token_hex(8)}.tmp") as file:
            status = os.fstat(file)
        probe.unlink()
        return status

    def _clean(self) -> None:
        """Remove temporary files of writers that were killed; then keep to the quota: at the start,
        as the pool grows, and every minute, for what other instances write. Errors, such as a
        directory that is removed meanwhile, end one pass only."""
        self._attempt(self._remove_abandoned)
        enough = int((self._quota or 0) * (1 - EVICTED_TO) / 2)
        while not self._closed and self._quota is not None:
            self._attempt(self._evict)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._written > enough, CLEAN_SECONDS
                )
                self._written = 0

    def _attempt(self, clean: Callable[[], None]) -> None:
        try:
            clean()
        except OSError as error:
            extension.logger.warning(
                "KV cache in %s cannot be cleaned now: %s", self.description, error
            )

    def _remove_abandoned(self) -> None:
        now = self._probe().st_mtime
        for part in self.root.glob("*/*/.*.tmp"):
            with suppress(OSError):
                if now - part.stat().st_mtime > ABANDONED_SECONDS:
                    part.unlink()

    def _evict(self) -> None:
        """Remove the files that were not read or written for longest, if all together exceed the
        quota."""
        assert self._quota is not None
        files, quota = [], self._quota
        for path in self.root.glob("*/*/*.kv"):
            with suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        excess = sum(size for _, size, _ in files) - quota
        if excess <= 0:
            return
        excess += int(quota * (1 - EVICTED_TO))
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            with suppress(OSError):
                path.unlink()
            excess -= size

    def _path(self, name: str) -> Path:
        space, _, chunk = name.partition("/")
        return self.root / space / chunk[:3] / f"{chunk}.kv"

    def _write(self, path: Path, record: memoryview) -> str:
        """Write to a temporary file and rename it, so that readers see the whole chunk or none."""
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _create(part, self._direct) as file:
                if (written := os.write(file, record)) < len(record):
                    raise OSError(errno.ENOSPC, f"{written} of {len(record)} bytes written")
            part.replace(path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            return "full" if error.errno in NO_SPACE else "failed"
        with self._changed:
            self._written += len(record)
            self._changed.notify()
        return STORED

    def _read(self, path: Path, record: memoryview) -> str:
        try:
            # A FIFO of that name would be waited for.
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | self._direct)
            try:
                is_file = stat.S_ISREG(os.fstat(file).st_mode)
                read = os.readv(file, [record]) if is_file else 0
            finally:
                os.close(file)
        except FileNotFoundError:
            return "missing"
        except OSError:
            return "failed" if path.is_file() else "cut"
        with suppress(OSError):
            # Mark it as used, because not all mounts update the access time.
            os.utime(path)
        return LOADED if read == len(record) else "cut"


@contextmanager
def _create(path: Path, flags: int = 0) -> Iterator[int]:
    """Descriptor of a new file, which no link may be in the place of."""
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY | flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


@dataclass(frozen=True)
class DiskEntry(TierOptions):
    """Entry of a DiskTier with the directory ``path``, limited to ``quota`` bytes."""

    path: str = ""
    quota: Positive | None = None


class DiskTier(PoolTier):
    """Tier over a DiskPool."""

    medium, entry = Medium.STORAGE, DiskEntry

    @classmethod
    def check_entry(cls, entry: Mapping[str, Any], where: str) -> None:
        super().check_entry(entry, where)
        if not entry.get("path"):
            raise extension.RefusedError(
                f"{where} has no path; fix: set it to a directory that instances share"
            )

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        path: str,
        quota: int | None = None,
        **more: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, DiskPool(path, quota), **more)
