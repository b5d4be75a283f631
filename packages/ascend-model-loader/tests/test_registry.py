"""The registry: a directory in which servers are found, as long as they live."""

import os
import time
from pathlib import Path
from typing import Any

from ascend_model_loader import identity, registry
from harness.weights.peers import IDENTITY


def test_those_that_live_are_found_by_their_weights_latest_first(tmp_path: Path) -> None:
    first = registry.Lease(str(tmp_path), "key", "a:1")
    registry.Lease(str(tmp_path), "key", "b:2")
    registry.Lease(str(tmp_path), "other", "c:3")
    os.utime(first.path, (time.time() + 1, time.time() + 1))
    assert registry.find(str(tmp_path), "key") == ["a:1", "b:2"]
    os.utime(first.path, (time.time() - 61, time.time() - 61))
    assert registry.find(str(tmp_path), "key") == ["b:2"]
    first.renew()
    assert sorted(registry.find(str(tmp_path), "key")) == ["a:1", "b:2"]
    first.end()
    assert registry.find(str(tmp_path), "key") == ["b:2"]


def test_what_is_no_entry_is_left_out(tmp_path: Path) -> None:
    assert registry.find(str(tmp_path / "nowhere"), "key") == []
    for number, content in enumerate(
        [b"", b"{}", b'{"address": 1}', b'{"address": "a:1", "more": 2}', b'{"address": "' + b"a" * 5000]
    ):
        (tmp_path / f"key-{number}.json").write_bytes(content)
    (tmp_path / "key-directory.json").mkdir()
    assert registry.find(str(tmp_path), "key") == []


def test_server_is_there_until_it_stops(serving: Any, tmp_path: Path) -> None:
    served = serving(registry=str(tmp_path))
    assert registry.find(str(tmp_path), identity.key(IDENTITY)) == [f"127.0.0.1:{served.server.port}"]
    assert registry.find(str(tmp_path), identity.key(IDENTITY | {"dtype": "float16"})) == []
    served.server.stop()
    assert registry.find(str(tmp_path), identity.key(IDENTITY)) == []
