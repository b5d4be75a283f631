"""Peer registry: entries of live servers."""

import os
import time
from pathlib import Path
from typing import Any

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
        [b"", b"{}", b'{"address": 1}', b'{"address": "a:1", "more": 2}', b'{"address": "' + b"a" * 5000]
    ):
        (tmp_path / f"key-{number}.json").write_bytes(content)
    (tmp_path / "key-directory.json").mkdir()
    assert registry.find(str(tmp_path), "key") == []


def test_server_is_registered_until_it_stops(serving: Any, tmp_path: Path) -> None:
    served = serving(registry=str(tmp_path))
    assert registry.find(str(tmp_path), identity.registry_key(IDENTITY)) == [f"127.0.0.1:{served.server.port}"]
    assert registry.find(str(tmp_path), identity.registry_key(IDENTITY | {"dtype": "float16"})) == []
    served.server.stop()
    assert registry.find(str(tmp_path), identity.registry_key(IDENTITY)) == []
