# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Conformance suite on this wheel's connectors, with the KV cache on an emulated NPU."""

import ctypes
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar

import pytest
import torch
from ascend_kv_connector.auth import SECRET_ENV
from ascend_kv_connector.connector import AscendP2PConnector
from ascend_kv_connector.p2p.transfers import Done
from ascend_kv_connector.testing import (
    ConnectorTests,
    Engine,
    HandoffTests,
    Pages,
    one_rank,  # noqa: F401
)
from ascend_platform.extension import RefusedError

pytest.importorskip(
    "mooncake.engine",
    exc_type=ImportError,
    reason="Mooncake lacks a library: apt-get install libibverbs1",
)

P2P: dict[str, Any] = {
    "kv_connector": "AscendP2PConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "host": "127.0.0.1",
        "insecure": True,
        "chunk_mib": 1,
        "answer_timeout": 5,
        "transfer_timeout": 20,
    },
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
    return STORE | {
        "kv_connector_extra_config": STORE["kv_connector_extra_config"]
        | {"disk_path": str(tmp_path)}
    }


class Busy:
    """A stream that executes nothing after :meth:`start` until it is released, as an NPU that is
    busy with a step."""

    def __init__(self) -> None:
        self.stream, self.released = torch.npu.Stream(), threading.Event()
        self._wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
            lambda _: self.released.wait(60) and None
        )

    def start(self) -> None:
        library = ctypes.CDLL("libascendcl.so")
        assert (
            library.aclrtLaunchHostFunc(ctypes.c_void_p(self.stream.npu_stream), self._wait, None)
            == 0
        )


@contextmanager
def busy() -> Iterator[Busy]:
    suite = Busy()
    try:
        yield suite
    finally:
        suite.released.set()
        suite.stream.synchronize()


class TestAscendP2PConnector(HandoffTests):
    transfer: ClassVar[dict[str, Any]] = P2P
    device = "npu"

    def test_addresses_of_a_client_are_not_contacted(
        self, engine: Callable[..., Engine], tmp_path: Path
    ) -> None:
        (tmp_path / "secret").write_text("sixteen bytes or more")
        options = P2P["kv_connector_extra_config"] | {"secret_file": str(tmp_path / "secret")}
        one, other = (
            engine(kv_role=role, kv_connector_extra_config=options)
            for role in ("kv_producer", "kv_consumer")
        )
        prompt = list(range(60))
        sent = self.prefill_all(one, {"a": prompt})["a"]
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(0.3)
            port = listener.getsockname()[1]
            chosen = {
                "metaserver": {
                    "do_remote_prefill": True,
                    "metaserver": f"http://127.0.0.1:{port}/",
                },
                "ranks": sent | {"remote_ranks": [["127.0.0.1", port]]},
                "reader": sent
                | {"do_remote_prefill": False, "do_remote_decode": True, "remote_reader": "r"},
            }
            chosen["reader"]["remote_ranks"] = [["127.0.0.1", port]]
            for name, params in chosen.items():
                target = one if name == "reader" else other
                target.add(name, prompt, 2, params)
                while target.scheduler.has_unfinished_requests():
                    target.step()
                assert target.ended[name][0] == "length"
            with pytest.raises(TimeoutError):
                listener.accept()
        other.add("a", prompt, 2, sent)
        other.run(lambda step: one.step())
        self.check(other, dict.fromkeys(("metaserver", "ranks", "a"), prompt), 2)
        assert other.loaded["a"] >= 48

    def test_mooncake_without_a_secret_is_refused(
        self, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By the configuration, and by each rank, whose machine may have another file."""
        options = {"transport": "mooncake", "host": "127.0.0.1"}
        refused = pytest.raises(RefusedError, match=r"Mooncake listens on all addresses .*; fix: ")
        monkeypatch.delenv(SECRET_ENV, raising=False)
        config = self.config(P2P | {"kv_connector_extra_config": options | {"insecure": True}})
        config.kv_transfer_config.kv_connector_extra_config = options
        monkeypatch.setattr(type(self), "config", lambda *_: config)
        with refused:
            AscendP2PConnector.check_config(config)
        with refused:
            engine()
        monkeypatch.setenv(SECRET_ENV, "sixteen bytes or more")
        AscendP2PConnector.check_config(config)

    def test_request_that_waits_longer_than_the_lease(self, engine: Callable[..., Engine]) -> None:
        options = P2P["kv_connector_extra_config"] | {"lease": 3}
        one, other = (
            engine(kv_role=role, kv_connector_extra_config=options)
            for role in ("kv_producer", "kv_consumer")
        )
        prompt, until = list(range(60)), monotonic() + 6
        params = self.prefill_all(one, {"a": prompt})["a"]
        for number in range(8):  # as many as run at once
            other.add(f"busy-{number}", [number, 1, 2], 500)
        other.step()
        other.add("a", prompt, 2, params)
        while monotonic() < until:
            one.step()
            other.step()
            sleep(0.05)
        assert "a" not in other.loaded
        assert one.held
        for number in range(8):
            other.abort(f"busy-{number}")
        other.run(lambda step: one.step())
        one.run()
        self.check(other, {"a": prompt}, 2)
        assert other.loaded["a"] >= 48

    def test_transfers_do_not_wait_for_later_steps(self, engine: Callable[..., Engine]) -> None:
        one, other = engine(kv_role="kv_producer"), engine(kv_role="kv_consumer")
        given = {"a": list(range(30)), "b": list(range(1, 31))}
        params = self.prefill_all(one, given)  # In one step, so both leases belong to the next one.
        with busy() as on_one, busy() as on_other:
            with torch.npu.stream(on_other.stream):
                other.add("a", given["a"], 3, params["a"])
                other.step()
                on_other.start()
                other.add("b", given["b"], 3, params["b"])
                other.step()
            transfers = dict(other.worker._worker._consumer._transfers)
            with torch.npu.stream(on_one.stream):
                on_one.start()
                one.step()  # the leases
            until = monotonic() + 10
            while transfers["a"].outcome is None and monotonic() < until:
                sleep(0.01)
            assert isinstance(transfers["a"].outcome, Done)
            assert transfers["b"].outcome is None, "its blocks may still be used by the step before"
        other.run(lambda step: one.step())
        one.run()
        self.check(other, given, 3)


class TestAscendP2PConnectorWithWindows(HandoffTests):
    transfer: ClassVar[dict[str, Any]] = P2P
    device, windowed = "npu", (1,)


class TestAscendP2PConnectorWithLatents(HandoffTests):
    transfer: ClassVar[dict[str, Any]] = P2P
    device, latent = "npu", True


class TestOffloadingConnector(ConnectorTests):
    transfer: ClassVar[dict[str, Any]] = HOST
    device, keeps = "npu", True


class TestOffloadingConnectorWithWindows(TestOffloadingConnector):
    windowed = (1,)


class TestOffloadingConnectorWithLatents(TestOffloadingConnector):
    latent = True


class KernelBlocks(ConnectorTests):
    """A block of the scheduler is two of the attention's, as with ``--block-size 256`` and kernels
    for 128 tokens."""

    __test__ = False

    def make_caches(self, layers: int, blocks: int) -> list[Any]:
        return [
            Pages(*(part.unflatten(1, (2, -1)).flatten(0, 1) for part in pages))
            for pages in super().make_caches(layers, blocks)
        ]


class TestOffloadingConnectorWithKernelBlocks(KernelBlocks, TestOffloadingConnector):
    __test__ = True


class TestAscendStoreConnector(ConnectorTests):
    device, keeps = "npu", True

    @pytest.fixture(autouse=True)
    def on_disk(self, store: dict[str, Any]) -> None:
        self.transfer = store  # type: ignore[misc]


class TestAscendStoreConnectorWithWindows(TestAscendStoreConnector):
    windowed = (1,)


class TestAscendStoreConnectorWithLatents(TestAscendStoreConnector):
    latent = True


class TestAscendStoreConnectorWithKernelBlocks(KernelBlocks, TestAscendStoreConnector):
    __test__ = True


class TestMultiConnector(HandoffTests):
    """The combination with OffloadingConnector is in ``tests/e2e/test_kv_connector.py``."""

    prefill: ClassVar[dict[str, Any]] = {}
    decode: ClassVar[dict[str, Any]] = {}
    device, keeps = "npu", True

    @pytest.fixture(autouse=True)
    def on_disk(self, store: dict[str, Any]) -> None:
        parts = {"kv_connector_extra_config": {"connectors": [P2P, store]}}
        self.transfer = {"kv_connector": "MultiConnector", "kv_role": "kv_both"} | parts  # type: ignore[misc]
