# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Transfers over HCCL and Mooncake: byte equality, and servers stopped or killed between a chunk's
header and its payload."""

import importlib.util
import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_model_loader import transports, wire
from ascend_model_loader.chunks import CHECKSUMS
from ascend_model_loader.options import Options
from ascend_platform.plugins import slots
from ascend_transfer.engine import Runs
from ascend_transfer.errors import TransferError
from ascend_transfer.mooncake import MooncakeEngine
from harness.engines import npus
from harness.weights.peers import SECRET, as_bytes, room, weights

PROGRAM = Path(__file__).with_name("run_transports.py")
NAMES = ["hccl", "mooncake"]


@pytest.fixture(scope="module")
def scenarios() -> dict[str, Any]:
    pytest.importorskip(
        "mooncake.engine",
        exc_type=ImportError,
        reason="Mooncake lacks a library: apt-get install libibverbs1",
    )
    done = npus.run(2, sys.executable, str(PROGRAM), timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (result,) = npus.results(done.stdout)
    return dict(result)


@pytest.mark.parametrize("name", NAMES)
def test_received_bytes_equal_the_peers_after_a_lost_client(
    scenarios: dict[str, Any], name: str
) -> None:
    result = scenarios[name]
    assert (result["whole"]["error"], result["whole"]["arrived"]) == ("", 1)
    assert result["whole"]["phases"] == ["manifest", f"peer to NPU, {name}"]
    assert re.match(f"by {name}: (the peer |mooncake failed )", result["the control ends"]["error"])
    assert result["and again"]["error"] == ""


@pytest.mark.parametrize("name", NAMES)
def test_checksum_mismatch_is_rejected(scenarios: dict[str, Any], name: str) -> None:
    assert "fails its checksum" in scenarios[name]["changed since"]["error"]


@pytest.mark.parametrize(
    ("name", "case", "message", "seconds"),
    [
        (
            "hccl",
            "stopped",
            "by hccl: (no answer in |HCCL did not receive |the peer sent nothing)",
            12,
        ),
        ("hccl", "killed", "by hccl: (the peer |nothing listens at |HCCL )", 12),
        (
            "mooncake",
            "stopped",
            r"by mooncake: (mooncake failed to read \d+ bytes|the peer sent nothing)",
            15,
        ),
        ("mooncake", "killed", "by mooncake: (mooncake failed|the peer )", 15),
    ],
)
def test_peer_lost_between_header_and_payload_times_out(
    scenarios: dict[str, Any], name: str, case: str, message: str, seconds: float
) -> None:
    result = scenarios[name][case]
    assert re.match(message, result["error"]), result
    assert "\n" not in result["error"]
    assert result["seconds"] < seconds
    assert result["right"]
    assert 0.1 < result["arrived"] < 0.95


@pytest.mark.parametrize("name", NAMES)
def test_next_transport_is_tried_if_the_peer_lacks_one(
    scenarios: dict[str, Any], name: str
) -> None:
    result = scenarios[name]["the next transport"]
    assert (result["error"], result["arrived"]) == ("", 1)
    assert result["phases"] == ["manifest", f"peer to NPU, {name} (failed)", "peer to NPU"]


def test_chunks_are_verified_while_the_next_ones_are_read(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(
        "mooncake.engine",
        exc_type=ImportError,
        reason="Mooncake lacks a library: apt-get install libibverbs1",
    )
    reading, reads = threading.Event(), []

    def read(self: MooncakeEngine, session: str, runs: Runs, seconds: float) -> None:
        reads.append(runs.total)
        if len(reads) == 2:
            reading.set()
        plain_read(self, session, runs, seconds)

    def hashed(data: memoryview) -> bytes:
        assert reading.wait(60), "the first chunk is verified before the second request is read"
        return plain_hash(data)

    served = serving(transport="mooncake")
    plain_read, plain_hash = MooncakeEngine.read, CHECKSUMS["xxh3"]
    monkeypatch.setattr(MooncakeEngine, "read", read)
    monkeypatch.setitem(CHECKSUMS, "xxh3", hashed)
    into = room()
    served.fetch(into, transport="mooncake", connections=1, timeout=60.0, deadline=200.0)
    assert as_bytes(into) == as_bytes(weights())
    assert [size >> 20 for size in reads[:-1]] == [16, 16]


@pytest.mark.parametrize(
    ("transport", "message"),
    [
        ("hccl", "by hccl: transport hccl needs weights on an NPU; these are on cpu, by tcp: "),
        (
            "mooncake",
            (
                "by mooncake: the peer refused: transport mooncake is not served; supported: tcp,"
                " by tcp: "
            ),
        ),
    ],
)
def test_unavailable_transport_is_reported(serving: Any, transport: str, message: str) -> None:
    served = serving()
    into = room()
    served.fetch(into, transport=(transport, "tcp"))
    assert as_bytes(into) == as_bytes(weights())
    served.server.gate.close(1)
    with pytest.raises(Exception, match="asleep"):
        served.fetch(into, transport=(transport, "tcp"))


def test_missing_mooncake_is_reported(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        Exception,
        match=(
            r"^by mooncake: Mooncake's transfer engine is not installed; fix: pip install mooncake"
        ),
    ):
        serving().fetch(room(), transport="mooncake")


def test_missing_hccl_link_is_reported(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(slots._offers, "transfer_engine.hccl", raising=False)
    served = serving(device="npu")
    served.device = torch.device("npu", 0)
    with pytest.raises(Exception, match=r"^by hccl: hccl needs ascend-communicator, which is "):
        served.fetch(room("npu"), transport="hccl")


class Unusable:
    """An engine that takes no memory if there is an error."""

    name, session, on_device, closed = "unusable", "a session", False, 0

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def register(self, buffer: torch.Tensor) -> None:
        if self.error:
            raise self.error

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (None, wire.PeerError),  # the other side is gone
        (TransferError("transport", "no memory can be registered"), wire.PeerError),
        (torch.OutOfMemoryError("too little memory"), torch.OutOfMemoryError),
    ],
)
def test_an_engine_that_cannot_be_used_is_closed(
    monkeypatch: pytest.MonkeyPatch, side: str, error: Exception | None, raised: type[Exception]
) -> None:
    engine = Unusable(error)
    monkeypatch.setattr(transports, "_make_engine", lambda *_: engine)
    deadline = time.monotonic() + 20
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as ours,
        listening.accept()[0] as theirs,
    ):
        wire.Channel(theirs, 5.0, deadline).send(wire.ReadableRegion("a session", 0))
        channel = wire.Channel(ours, 5.0, deadline)
        if error is None:
            ours.shutdown(socket.SHUT_RDWR)
        make = getattr(transports, f"make_{side}")
        with pytest.raises(raised):
            make("mooncake", channel, torch.device("cpu"), Options(transport="mooncake"), SECRET)
    assert engine.closed == 1
