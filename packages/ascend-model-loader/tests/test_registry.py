# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Peer registry: entries of live servers."""

import functools
import os
import time
from pathlib import Path
from typing import Any

import pytest
from ascend_model_loader import identity, registry
from harness.weights.peers import IDENTITY


def test_find_returns_live_entries_most_recent_first(tmp_path: Path) -> None:
    first = registry.Registration(str(tmp_path), "key", "a:1")
    registry.Registration(str(tmp_path), "key", "b:2")
    registry.Registration(str(tmp_path), "other", "c:3")
    os.utime(first.path, (time.time() + 1, time.time() + 1))
    assert registry.find(str(tmp_path), "key") == ["a:1", "b:2"]
    os.utime(first.path, (time.time() - 61, time.time() - 61))
    assert registry.find(str(tmp_path), "key") == ["b:2"]
    first.heartbeat()
    assert sorted(registry.find(str(tmp_path), "key")) == ["a:1", "b:2"]
    first.remove()
    assert registry.find(str(tmp_path), "key") == ["b:2"]


def test_find_skips_invalid_entries(tmp_path: Path) -> None:
    assert registry.find(str(tmp_path / "nowhere"), "key") == []
    for number, content in enumerate(
        [
            b"",
            b"{}",
            b'{"address": 1}',
            b'{"address": "a:1", "more": 2}',
            b'{"address": "' + b"a" * 5000,
        ]
    ):
        (tmp_path / f"key-{number}.json").write_bytes(content)
    (tmp_path / "key-directory.json").mkdir()
    os.mkfifo(tmp_path / "key-fifo.json")  # Opening it would wait for a writer.
    ahead = registry.Registration(str(tmp_path), "key", "ahead:1")
    os.utime(ahead.path, (time.time() + 1000, time.time() + 1000))
    assert registry.find(str(tmp_path), "key") == []


def test_ages_are_by_the_clock_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.Registration(str(tmp_path), "key", "a:1")
    for there in (time.time() - 1000.0, time.time() + 1000.0):
        monkeypatch.setattr(registry.time, "time", functools.partial(float, there))
        assert registry.find(str(tmp_path), "key") == ["a:1"]


def test_entry_that_was_cleaned_is_written_again(tmp_path: Path) -> None:
    registered = registry.Registration(str(tmp_path), "key", "a:1")
    registered.path.unlink()
    registered.heartbeat()
    assert registry.find(str(tmp_path), "key") == ["a:1"]


def test_server_is_registered_until_it_stops(serving: Any, tmp_path: Path) -> None:
    served = serving(registry=str(tmp_path))
    assert registry.find(str(tmp_path), identity.registry_key(IDENTITY)) == [
        f"127.0.0.1:{served.server.port}"
    ]
    assert (
        registry.find(str(tmp_path), identity.registry_key(IDENTITY | {"dtype": "float16"})) == []
    )
    served.server.stop()
    assert registry.find(str(tmp_path), identity.registry_key(IDENTITY)) == []
