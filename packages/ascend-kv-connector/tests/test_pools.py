# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Pools without an engine: files on a disk, and Mooncake's store."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from time import monotonic, sleep

import pytest
from ascend_kv_connector.store.chunk_format import (
    FOOTER_BYTES,
    is_intact,
    read_footer,
    write_footer,
)
from ascend_kv_connector.store.disk import DiskPool
from ascend_kv_connector.store.pool import PoolError
from ascend_kv_connector.testing import one_rank  # noqa: F401
from ascend_platform.extension import RefusedError


def test_temporary_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    (tmp_path / "space" / "abc").mkdir(parents=True)
    old, young, chunk = (
        tmp_path / "space" / "abc" / name
        for name in (".abcd.kv.1.2.tmp", ".abce.kv.1.2.tmp", "abcf.kv")
    )
    for file in (old, young, chunk):
        file.write_bytes(b"part")
    for file in (old, chunk):
        os.utime(file, (1e9, 1e9))
    DiskPool(str(tmp_path))
    until = monotonic() + 30
    while old.exists() and monotonic() < until:
        sleep(0.01)
    assert [file.exists() for file in (old, young, chunk)] == [False, True, True]


def test_other_files_in_the_place_of_a_chunk_are_not_waited_for(tmp_path: Path) -> None:
    """A load thread that opened a FIFO would wait for good. What can be removed is stored again."""
    pool, size = DiskPool(str(tmp_path)), 8192
    record = pool.buffer(size)
    record[:] = b"\x11" * size
    result = {}
    for what in ("fifo", "zero", "directory"):
        path = pool._path(name := f"space/000{what}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if what == "fifo":
            os.mkfifo(path)
        elif what == "zero":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()

        def load(name: str = name, what: str = what) -> None:
            result[what] = pool.get([name], [record])
            pool.remove([name])
            result[what] += pool.put([name], [record])

        thread = threading.Thread(target=load, daemon=True)
        thread.start()
        thread.join(10)
    stored = {"fifo": ["cut", "stored"], "zero": ["cut", "stored"]}
    assert result.pop("directory")[1] == "failed"
    assert result == stored


def test_disk_keeps_to_its_quota_and_evicts_least_recently_used(tmp_path: Path) -> None:
    size, count = 1 << 20, 10
    pool = DiskPool(str(tmp_path), quota=count * size)
    buffer = pool.buffer(size)
    names = [f"space/{number:08x}" for number in range(count + 2)]
    assert pool.put(names[:count], [buffer] * count) == ["stored"] * count
    for age, name in enumerate(names[:count]):
        os.utime(pool._path(name), (1e9 - age, 1e9 - age))  # the last one is the oldest
    assert pool.get([names[count - 1]], [buffer]) == ["loaded"]  # and is used
    pool.put(names[count:], [buffer] * 2)
    until = monotonic() + 60
    while sum(pool.exists(names)) > count and monotonic() < until:
        sleep(0.01)
    there = pool.exists(names)
    assert there[count - 1 :] == [True] * 3
    assert there[: count - 1] == sorted(there[: count - 1], reverse=True)
    assert 0.8 * count <= sum(there) <= count
    pool.close()


def test_cleaning_goes_on_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is removed while it is listed, or a stale handle of a mount."""
    monkeypatch.setattr("ascend_kv_connector.store.disk.CLEAN_SECONDS", 0.01)
    passes, done = list[int](), threading.Event()

    def evict(pool: DiskPool) -> None:
        passes.append(1)
        if len(passes) < 3:
            raise OSError(errno.ESTALE, "Stale file handle")
        done.set()

    monkeypatch.setattr(DiskPool, "_evict", evict)
    pool = DiskPool(str(tmp_path / "pool"), quota=1 << 20)
    assert done.wait(60)
    pool.close()


def test_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    with pytest.raises(
        RefusedError,
        match=r"disk_path .*shared belongs to user \d+ with mode 777: .*; fix: chmod o-w",
    ):
        DiskPool(str(shared))
    assert list(shared.iterdir()) == []


def test_links_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if their names are guessed."""
    monkeypatch.setattr(
        "ascend_kv_connector.store.disk.secrets.token_hex", lambda size: "0" * 2 * size
    )
    (victim := tmp_path / "victim").write_bytes(b"of another program")
    pool = DiskPool(str(tmp_path / "pool"))
    (folder := tmp_path / "pool" / "m" / "abc").mkdir(parents=True)
    (folder / f".abc.kv.{'0' * 16}.tmp").symlink_to(victim)
    record = pool.buffer(2 * FOOTER_BYTES)
    assert pool.put(["m/abc"], [record]) == ["failed"]
    # The first pool's cleaner has files of this name in its own directory.
    (other := tmp_path / "other").mkdir()
    (other / f".{'0' * 16}.tmp").symlink_to(victim)
    with pytest.raises(RefusedError, match="is not writable"):
        DiskPool(str(other))
    assert victim.read_bytes() == b"of another program"
    pool.close()


def test_files_are_written_atomically(tmp_path: Path) -> None:
    pool = DiskPool(str(tmp_path))
    size, name = 1 << 20, "m/abc"
    buffer = pool.buffer(size)
    buffer[:] = os.urandom(size - FOOTER_BYTES) + bytes(FOOTER_BYTES)
    write_footer(name, buffer, buffer[:-FOOTER_BYTES])
    read, ended, seen = pool.buffer(size), threading.Event(), set()

    def watch() -> None:
        while not ended.is_set():
            seen.update(pool.get([name], [read]))

    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(50):
        assert pool.put([name], [buffer]) == ["stored"]
    ended.set()
    thread.join()
    assert seen <= {"missing", "loaded"}
    # prompts are in them
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.kv")} == {0o600}
    assert is_intact(name, read[:-FOOTER_BYTES], read_footer(read))
    assert not is_intact("m/abd", read[:-FOOTER_BYTES], read_footer(read))


def test_mooncake_reports_an_outcome_per_chunk(one_rank: None) -> None:  # noqa: F811
    pytest.importorskip(
        "mooncake.store",
        exc_type=ImportError,
        reason="Mooncake lacks a library: apt-get install libibverbs1",
    )
    from ascend_kv_connector.store.mooncake import MooncakeConfig, MooncakePool
    from harness.kv import mooncake_pool

    size = 1 << 20
    with mooncake_pool.mooncake_pool(mib=32) as processes:
        pool = MooncakePool(MooncakeConfig.read(str(processes.config)))
        buffer = pool.buffer(3 * size)
        one, other, small = (
            buffer[:size],
            buffer[size : 2 * size],
            buffer[2 * size : 2 * size + FOOTER_BYTES],
        )
        one[:] = os.urandom(size)
        assert pool.put(["m/a", "m/b"], [one, small]) == ["stored", "stored"]
        assert pool.put(["m/a"], [one]) == ["stored"]  # already stored
        assert pool.exists(["m/a", "m/c"]) == [True, False]
        assert pool.get(["m/a", "m/c"], [other, small]) == ["loaded", "missing"]
        assert other == one
        assert pool.get(["m/b"], [other]) == ["cut"]  # fewer bytes than requested
        pool.remove(["m/a"])
        assert pool.exists(["m/a"]) == [False]
        assert "full" in pool.put([f"m/{number}" for number in range(40)], [one] * 40)
        processes.signal("owner", signal.SIGKILL)
        assert pool.put(["m/d"], [one]) in (["full"], ["failed -800"])
        processes.signal("master", signal.SIGKILL)
        with pytest.raises(PoolError, match="the master does not respond"):
            pool.exists(["m/a"])
        with pytest.raises(PoolError, match="the master does not respond"):
            pool.put(["m/e"], [one])
        pool.close()
        pool.close()
        with pytest.raises(RefusedError, match="no master at"):
            MooncakePool(MooncakeConfig.read(str(processes.config)))
