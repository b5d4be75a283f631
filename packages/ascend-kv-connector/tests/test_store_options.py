# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Options of AscendStoreConnector, and configurations that it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ascend_kv_connector.store.options import StoreOptions
from ascend_platform.extension import RefusedError


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bakend": "disk"}, "no key 'bakend'; fix: use 'backend'"),
        ({"backend": "memcache"}, "backend is 'memcache'; supported: mooncake, disk"),
        ({"backend": "disk"}, "backend disk needs disk_path"),
        ({"use_layerwise": True}, "use_layerwise is not supported"),
        (
            {"cpu_bytes_to_use": "4GB"},
            "cpu_bytes_to_use is '4GB'; supported: an integer of at least 1",
        ),
        ({"rest": -1}, "rest is -1; supported: a number above 0"),
    ],
)
def test_invalid_store_options_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message.replace("?", r"\?")):
        StoreOptions.from_config(given)


def test_options_of_vllm_ascend_are_accepted() -> None:
    options = StoreOptions.from_config(
        {"backend": "mooncake", "lookup_rpc_port": "0", "load_async": True, "use_layerwise": False}
    )
    assert options.backends == ["mooncake"]
    assert options.roles(SimpleNamespace(kv_role="kv_producer")) == (True, True)
    assert options.roles(SimpleNamespace(kv_role="kv_consumer")) == (True, False)


def test_unshareable_configurations_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(nnodes_within_dp=1),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="xxhash"),
        kv_events_config=None,
    )
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    with pytest.raises(RefusedError, match="differ from process to process"):
        StoreOptions.from_config({"backend": "disk", "disk_path": str(tmp_path)}).check(config)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with pytest.raises(RefusedError, match="set MOONCAKE_CONFIG_PATH"):
        StoreOptions.from_config({}).check(config)
    with pytest.raises(RefusedError, match="enable_kv_events needs --kv-events-config"):
        StoreOptions.from_config({"backend": [], "enable_kv_events": True}).check(config)
    with pytest.raises(RefusedError, match=r"/dev/shm has \d+ bytes left"):
        StoreOptions.from_config({"backend": [], "cpu_bytes_to_use": 1 << 50}).check(config)
    config.parallel_config.nnodes_within_dp = 2
    with pytest.raises(RefusedError, match="spans 2 machines"):
        StoreOptions.from_config({"backend": []}).check(config)


def test_mooncake_configuration_is_validated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ascend_kv_connector.store.mooncake import MooncakeConfig

    file = tmp_path / "mooncake.json"
    file.write_text(
        '{"master_server_address": "127.0.0.1:9", "global_segment_size": "1.5GB",'
        ' "ssd_offload_path": "/x"}'
    )
    known = MooncakeConfig.read(str(file))
    assert (known.global_segment_size, known.protocol) == (3 << 29, "tcp")
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:10")
    assert MooncakeConfig.read(str(file)).master_server_address == "127.0.0.1:10"
    for text in (
        "[]",
        "{",
        '{"master_server_address": "127.0.0.1:9", "global_segment_size": "much"}',
    ):
        file.write_text(text)
        with pytest.raises(RefusedError, match="is not a Mooncake configuration"):
            MooncakeConfig.read(str(file))
    for text in (
        '{"master_server_address": 9}',
        '{"master_server_address": "h:9", "protocol": []}',
    ):
        monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
        file.write_text(text)
        with pytest.raises(
            RefusedError, match=r"mooncake.json.\w+ is .*; supported: a string; fix: "
        ):
            MooncakeConfig.read(str(file))
    pytest.importorskip("mooncake")
    with pytest.raises(RefusedError, match=r"no master at master_server_address '127.0.0.1:10'"):
        known.__class__("127.0.0.1:10").check()
