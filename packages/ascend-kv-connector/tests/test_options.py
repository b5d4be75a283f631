# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Connector names and options; invalid ones are refused in one line."""

from importlib.metadata import entry_points

import pytest
from ascend_kv_connector import CONNECTORS
from ascend_kv_connector.config import Options
from ascend_platform import extension
from ascend_platform.plugins import registry, slots
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def test_defaults_and_values() -> None:
    assert Options.from_config({}) == Options()
    assert Options.from_config({"lease": 3, "verify": True, "prefill": {"tp_size": 2}}) == Options(
        lease=3, verify=True
    )
    assert Options.from_config({"chunk_mib": 2}).chunk_bytes == 2 << 20
    assert Options.from_config({"metaserver": "http://r"}).metaservers == ["http://r"]
    assert Options.from_config({"peers": ["10.0.0.0/8", "p"]}).peer_hosts == ["10.0.0.0/8", "p"]
    assert Options.from_config({"ports": "20000-20002"}).port_range == range(20000, 20003)
    assert (Options().port_range, Options().metaservers, Options().peer_hosts) == (None, [], [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"leese": 3}, r"no key 'leese'; fix: use 'lease'"),
        ({"xyz": 3}, r"no key 'xyz'; fix: use one of answer_timeout, chunk_mib, expose_cache,"),
        ({"lease": 0}, "lease is 0; supported: a number above 0 .seconds.; fix: "),
        ({"lease": True}, "lease is True; supported: a number above 0"),
        ({"slots": 1.5}, "slots is 1.5; supported: an integer of at least 1"),
        ({"verify": 1}, "verify is 1; supported: true, false"),
        ({"host": 7}, "host is 7; supported: a string"),
        (
            {"ports": "20002-20000"},
            "ports is '20002-20000'; fix: give the first and the last port, such as",
        ),
        ({"mode": "both"}, "mode is 'both'; supported: pull, push"),
        ({"metaserver": ["http://r", "r:80"]}, "metaserver is 'r:80'; fix: give a URL"),
        ({"metaserver": {"a": 1}}, "supported: a string, a list of strings"),
        ({"peers": 7}, "peers is 7; supported: a string, a list of strings"),
        ({"mode": "push", "metaserver": "r:80"}, "metaserver is 'r:80'; fix: give a URL"),
    ],
)
def test_invalid_options_are_refused(given: dict, message: str) -> None:
    with pytest.raises(extension.RefusedError, match=message):
        Options.from_config(given)


def test_unsupported_kv_caches_are_refused() -> None:
    import torch
    from ascend_kv_connector.config import sliding_windows
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheGroupSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
    full = KVCacheGroupSpec(["a"], FullAttentionSpec(**shape))
    window = KVCacheGroupSpec(["b"], SlidingWindowSpec(**shape, sliding_window=32))
    assert sliding_windows("X", [full, window, full]) == (0, 32, 0)
    latent = KVCacheGroupSpec(
        ["e"], MLAAttentionSpec(**shape | {"num_kv_heads": 1, "head_size": 576})
    )
    assert sliding_windows("X", [latent]) == (0,)
    chunks = KVCacheGroupSpec(["c"], ChunkedLocalAttentionSpec(**shape, attention_chunk_size=32))
    larger = KVCacheGroupSpec(["d"], FullAttentionSpec(**shape | {"block_size": 32}))
    for groups, what in (
        ([full, chunks], "ChunkedLocalAttentionSpec"),
        ([full, larger], "blocks of 16, 32 tokens"),
    ):
        with pytest.raises(
            ValueError,
            match=f"X supports KV caches of full, latent and sliding-window attention.*{what}",
        ):
            sliding_windows("X", groups)


def test_entry_point_registers_all_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setattr(slots, "_offers", {})
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    (entry_point,) = entry_points(group="vllm.general_plugins", name="ascend_kv_connector")
    register = entry_point.load()
    register()
    register()
    assert extension.state("ascend-kv-connector") == f"active ({', '.join(CONNECTORS)})"
    for name in CONNECTORS:
        config = KVTransferConfig(kv_connector=name, kv_role="kv_both")
        result = KVConnectorFactory.get_connector_class(config)
        assert f"{result.__module__}.{result.__name__}" == CONNECTORS[name]
        assert KVConnectorFactory.supports_hma_config(config)
