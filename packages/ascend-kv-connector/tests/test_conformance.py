"""Conformance suite on this wheel's connectors, with the KV cache on an emulated NPU."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
from ascend_kv_connector.testing import ConnectorTests, HandoffTests, one_rank  # noqa: F401

pytest.importorskip("mooncake.engine", exc_type=ImportError, reason="Mooncake lacks a library: apt-get install libibverbs1")

P2P: dict[str, Any] = {
    "kv_connector": "AscendP2PConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"host": "127.0.0.1", "chunk_mib": 1, "answer_timeout": 5, "transfer_timeout": 20},
}
HOST: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 50_000_000},
}


STORE: dict[str, Any] = {
    "kv_connector": "AscendStoreConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"backend": "disk", "cpu_bytes_to_use": 3_000_000},
}
"""Host memory holds only a part of what the tests store; the rest is loaded from disk."""


@pytest.fixture
def store(tmp_path: Path) -> dict[str, Any]:
    return STORE | {"kv_connector_extra_config": STORE["kv_connector_extra_config"] | {"disk_path": str(tmp_path)}}


class TestAscendP2PConnector(HandoffTests):
    transfer: ClassVar[dict[str, Any]] = P2P
    device = "npu"


class TestAscendP2PConnectorWithWindows(HandoffTests):
    transfer: ClassVar[dict[str, Any]] = P2P
    device, windowed = "npu", (1,)


class TestOffloadingConnector(ConnectorTests):
    transfer: ClassVar[dict[str, Any]] = HOST
    device, keeps = "npu", True


class TestOffloadingConnectorWithWindows(TestOffloadingConnector):
    windowed = (1,)


class TestAscendStoreConnector(ConnectorTests):
    device, keeps = "npu", True

    @pytest.fixture(autouse=True)
    def on_disk(self, store: dict[str, Any]) -> None:
        self.transfer = store  # type: ignore[misc]


class TestAscendStoreConnectorWithWindows(TestAscendStoreConnector):
    windowed = (1,)


class TestMultiConnector(HandoffTests):
    """The combination with OffloadingConnector is in ``tests/e2e/test_kv_connector.py``."""

    prefill: ClassVar[dict[str, Any]] = {}
    decode: ClassVar[dict[str, Any]] = {}
    device, keeps = "npu", True

    @pytest.fixture(autouse=True)
    def on_disk(self, store: dict[str, Any]) -> None:
        parts = {"kv_connector_extra_config": {"connectors": [P2P, store]}}
        self.transfer = {"kv_connector": "MultiConnector", "kv_role": "kv_both"} | parts  # type: ignore[misc]
