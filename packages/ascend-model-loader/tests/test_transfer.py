# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Transfers from a weight server: byte equality, interrupted transfers, and refusals."""

import contextlib
import os
import resource
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ascend_model_loader import peer, server, wire
from ascend_model_loader.chunks import CHECKSUMS, host_bytes
from ascend_model_loader.options import Options
from ascend_model_loader.report import Report
from ascend_model_loader.wire import PeerError
from harness.weights.peers import IDENTITY, SECRET, Cut, as_bytes, room, weights


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("checksum", ["xxh3", "blake3"])
@pytest.mark.parametrize("connections", [1, 4])
def test_received_bytes_equal_the_peers(
    serving: Any, device: str, checksum: str, connections: int
) -> None:
    into = room(device)
    report = serving(device=device, checksum=checksum).fetch(into, connections=connections)
    assert as_bytes(into) == as_bytes(weights())
    assert report.phases[-1].bytes == sum(map(len, as_bytes(into)))


def test_checksum_that_an_attacker_can_forge_is_not_accepted(serving: Any) -> None:
    with pytest.raises(
        PeerError, match="its checksums are xxh3; this engine's option checksum is blake3"
    ):
        serving(checksum="xxh3").fetch(room(), checksum="blake3")


def test_verified_bytes_are_the_bytes_that_are_used() -> None:
    """Others can write to an engine's receive buffer: here between the checksum and the copy."""
    buffer, used = torch.arange(100, dtype=torch.uint8), list[torch.Tensor]()
    wanted = buffer.clone()

    def hashed(data: memoryview) -> bytes:
        digest = CHECKSUMS["xxh3"](data)
        buffer.fill_(7)
        return digest

    transfer = peer._Transfer.__new__(peer._Transfer)
    transfer._hashed, transfer._lock, transfer._written = hashed, threading.Lock(), 0
    transfer._manifest = SimpleNamespace(digests=[CHECKSUMS["xxh3"](host_bytes(buffer))])
    transfer.layout = SimpleNamespace(size=lambda index: 100)
    copier = SimpleNamespace(write=lambda index, chunk: used.append(chunk.clone()))
    transfer._write_all(copier, range(1), buffer)
    assert torch.equal(used[0], wanted)


def test_listener_may_have_any_file_number(serving: Any) -> None:
    """select() takes none above 1023."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit < 2048:
        pytest.skip("a process may open few files here")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, before[0]), hard_limit))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        source = stack.enter_context(open(__file__, "rb"))
        while (file := os.dup(source.fileno())) < 1030:
            stack.callback(os.close, file)
        stack.callback(os.close, file)
        into = room()
        served = serving()
        assert served.server._listening.fileno() > 1023
        served.fetch(into)
    assert as_bytes(into) == as_bytes(weights())


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_non_contiguous_tensors_are_filled(serving: Any, device: str) -> None:
    base = torch.arange(6000, dtype=torch.float32).view(2, 30, 100)
    into = {
        "t": torch.zeros(100, 30, 2, device=device).permute(2, 1, 0),
        "u": torch.zeros(5, device=device),
    }
    serving({"t": base, "u": torch.ones(5)}).fetch(into)
    assert torch.equal(into["t"].cpu(), base)
    assert torch.equal(into["u"].cpu(), torch.ones(5))


@pytest.mark.parametrize("tenth", range(10))
def test_dying_peer_leaves_only_verified_bytes(serving: Any, tenth: int) -> None:
    """Received bytes are the peer's, the rest is unchanged, and nothing waits for the deadline."""
    served = serving()
    total = sum(map(len, as_bytes(served.tensors)))
    into, begin = room(), time.monotonic()
    with (
        Cut(served.server.port, total * tenth // 10) as cut,
        pytest.raises(PeerError, match=r"^the peer (closed|is gone)"),
    ):
        peer.Fetch(
            into,
            IDENTITY,
            Options(timeout=30, deadline=60),
            SECRET,
            torch.device("cpu"),
            Report(),
        ).from_peer(("127.0.0.1", cut.port))
    assert time.monotonic() - begin < 15
    got, sent = (
        np.frombuffer(b"".join(as_bytes(each)), np.uint8) for each in (into, served.tensors)
    )
    assert ((got == sent) | (got == 0)).all()
    right = (got[sent != 0] != 0).mean()
    # Two connections with a chunk of 4 MB of 39 MB each.
    assert max(0, tenth / 10 - 0.45) <= right < 1


def test_weights_changed_after_loading_are_rejected(serving: Any) -> None:
    served = serving()
    served.tensors["head.weight"][12_000_000] += 1
    with pytest.raises(
        PeerError,
        match=r"chunk \d+ of 10 \(head.weight\) fails its checksum: it changed in transit",
    ):
        served.fetch(room())


def test_bytes_corrupted_in_transit_are_rejected(serving: Any) -> None:
    served = serving()
    into = room()
    with (
        Cut(served.server.port, None, flip=20_000_000) as cut,
        pytest.raises(PeerError, match="fails its checksum"),
    ):
        peer.Fetch(
            into,
            IDENTITY,
            Options(connections=1),
            SECRET,
            torch.device("cpu"),
            Report(),
        ).from_peer(("127.0.0.1", cut.port))


def test_header_corrupted_in_transit_is_rejected(serving: Any) -> None:
    with (
        Cut(serving().server.port, None, flip=300) as cut,
        pytest.raises(PeerError, match="HMAC is wrong: it was made with another secret"),
    ):
        peer.Fetch(
            room(),
            IDENTITY,
            Options(),
            SECRET,
            torch.device("cpu"),
            Report(),
        ).from_peer(("127.0.0.1", cut.port))


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"config": "d"}, "its weights differ: config: the peer has c, this engine d"),
        (
            {"dtype": "float16"},
            "its weights differ: dtype: the peer has bfloat16, this engine float16",
        ),
        (
            {"tensor parallelism": "rank 1 of 2"},
            "tensor parallelism: the peer has rank 0 of 1, this engine rank 1 of 2",
        ),
        (
            {"checkpoint": "bad"},
            "its weights differ: checkpoint: the peer has c0ffee, this engine bad",
        ),
        (
            {"checkpoint": "", "name": "n@main"},
            "its weights differ: name: the peer has m@main, this engine n@main",
        ),
    ],
)
def test_mismatched_identity_is_refused_with_the_difference(
    serving: Any, identity: dict[str, str], message: str
) -> None:
    into = room()
    with pytest.raises(PeerError, match=message):
        serving().fetch(into, IDENTITY | identity)
    assert not any(map(any, as_bytes(into)))


@pytest.mark.parametrize("identity", [{"name": "elsewhere"}, {"checkpoint": ""}])
def test_names_are_compared_without_checkpoint_files(
    serving: Any, identity: dict[str, str]
) -> None:
    serving().fetch(room(), IDENTITY | identity)


def test_mismatched_tensors_are_refused_with_a_difference(serving: Any) -> None:
    served = serving()
    into = room()
    into["scale"] = torch.zeros(3)
    with pytest.raises(
        PeerError,
        match=(
            r"the peer has \('scale', 'float32', \[\]\), this engine \('scale', 'float32', \[3\]\)"
        ),
    ):
        served.fetch(into)
    del into["flag"], into["scale"]
    with pytest.raises(PeerError, match="its tensors differ"):
        served.fetch(into)


def test_wrong_secret_is_refused_on_both_sides(serving: Any) -> None:
    served = serving()
    with pytest.raises(PeerError, match=r"^the peer refused: the secrets differ$"):
        served.fetch(room(), secret=b"fedcba9876543210")
    listening = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listening.getsockname())
    theirs, _ = listening.accept()
    answering = threading.Thread(target=_pretend_to_know, args=[theirs])
    answering.start()
    with pytest.raises(PeerError, match=r"^the peer does not have this engine's secret$"):
        wire.Channel(ours, 5, time.monotonic() + 5).authenticate_as_client(SECRET)
    answering.join()


def _pretend_to_know(connection: socket.socket) -> None:
    channel = wire.Channel(connection, 5, time.monotonic() + 5)
    channel.send(wire.Challenge(bytes(32)))
    answer, _ = channel.receive(wire.Answer)
    channel.send(wire.Welcome(answer.proof))  # the client's own


def test_sleeping_engine_refuses_and_closing_waits_for_readers(serving: Any) -> None:
    served = serving()
    with served.server.gate.reading():
        assert not served.server.gate.close(0.05)
    assert served.server.gate.close(0.05)
    with pytest.raises(PeerError, match=r"^the peer refused: the engine is asleep or not ready$"):
        served.fetch(room())
    served.server.gate.open()
    served.fetch(room())


def test_rate_limit_applies_to_all_connections(serving: Any) -> None:
    served = serving(max_bytes_per_second=40e6)
    begin = time.monotonic()
    served.fetch(room(), connections=3)
    assert 0.8 < time.monotonic() - begin < 30  # 39 MB


def test_connection_limit_and_transfer_over_fewer_connections(serving: Any) -> None:
    served = serving(max_connections=2)
    address, until = ("127.0.0.1", served.server.port), time.monotonic() + 300
    idle = [peer.connect(address, Options(), SECRET, until)]
    into = room()
    served.fetch(into, connections=4)
    assert as_bytes(into) == as_bytes(weights())
    begin = time.monotonic()
    # Until the server has noticed the end of that transfer.
    while len(idle) < 2 and time.monotonic() < begin + 30:
        with contextlib.suppress(PeerError):
            idle.append(peer.connect(address, Options(), SECRET, until))
    with pytest.raises(PeerError, match=r"^the peer refused: all 2 connections are in use$"):
        served.fetch(into)
    for each in idle:
        each.close()


def test_refused_extra_connections_do_not_end_a_transfer(serving: Any) -> None:
    # 25 chunks are too many for the requests of one connection.
    tensors = {"weight": torch.arange(25 << 19, dtype=torch.int64)}
    served, into = (
        serving(tensors, max_connections=1, max_bytes_per_second=400e6),
        {"weight": torch.zeros(25 << 19, dtype=torch.int64)},
    )
    served.fetch(into, connections=4, timeout=60.0, deadline=200.0)
    assert torch.equal(into["weight"], tensors["weight"])


def test_client_of_a_busy_peer_waits_and_finds_the_next_one(serving: Any) -> None:
    """Another engine has loaded the weights meanwhile, and serves them."""
    root = serving(max_connections=1, timeout=300.0, deadline=300.0)
    idle = peer.connect(("127.0.0.1", root.server.port), Options(), SECRET, time.monotonic() + 300)
    result = [[("127.0.0.1", root.server.port)]]

    def find() -> list[tuple[str, int]]:
        if len(result) == 3:
            result.append([("127.0.0.1", serving().server.port), *result[0]])
        else:
            result.append(result[0])
        return result[-1]

    into, given = room(), Options(timeout=60, deadline=200)
    _, address = peer.Fetch(
        into, IDENTITY, given, SECRET, torch.device("cpu"), Report()
    ).from_first(find)
    assert as_bytes(into) == as_bytes(weights())
    assert (address, len(result)) == (result[-1][0], 4)
    with pytest.raises(
        PeerError, match=r"^127\.0\.0\.1:\d+: the peer refused: all 1 connections are in use$"
    ):
        peer.Fetch(
            into,
            IDENTITY,
            Options(busy_timeout=0.1),
            SECRET,
            torch.device("cpu"),
            Report(),
        ).from_first(lambda: result[0])
    idle.close()


def test_slow_peer_is_left(serving: Any) -> None:
    slow = serving(max_bytes_per_second=1e6, timeout=300.0, deadline=300.0)
    given = Options(timeout=5, deadline=300, min_bytes_per_second=20e6, connections=1)
    with pytest.raises(
        PeerError, match=r"^it sends [\d.]+ MB/s, less than min_bytes_per_second, 20 MB/s$"
    ):
        peer.Fetch(
            room(),
            IDENTITY,
            given,
            SECRET,
            torch.device("cpu"),
            Report(),
        ).from_peer(("127.0.0.1", slow.server.port))


def test_clients_without_the_secret_do_not_keep_others_out(
    serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE", 600.0)
    served = serving(max_connections=2, timeout=600.0)
    strangers = [socket.create_connection(("127.0.0.1", served.server.port)) for _ in range(80)]
    time.sleep(0.1)
    into = room()
    served.fetch(into)
    assert as_bytes(into) == as_bytes(weights())
    strangers[0].settimeout(60.0)
    while strangers[0].recv(4096):  # The oldest is disconnected, long before its handshake ends.
        pass
    for each in strangers:
        each.close()


def test_unreachable_and_silent_peers_time_out() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    given = (
        room(),
        IDENTITY,
        Options(connect_timeout=1, timeout=0.3, deadline=60),
        SECRET,
        torch.device("cpu"),
        Report(),
    )
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"^the peer sent nothing for 0\.3 s$"):
        peer.Fetch(*given).from_peer(("127.0.0.1", port))
    silent.close()
    for address in (("127.0.0.1", port), ("127.0.0.1", 70000), ("a" * 70, 1)):
        with pytest.raises(PeerError, match=r"^cannot be reached: "):
            peer.Fetch(*given).from_peer(address)
    assert time.monotonic() - begin < 20


def test_deadline_is_for_all_peers_together() -> None:
    silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(8)]
    addresses = [each.getsockname() for each in silent]
    given = Options(timeout=1.0, deadline=2.5)
    began = time.monotonic()
    with pytest.raises(
        PeerError,
        match=(
            r"sent nothing for 1 s, .*the deadline of 2\.5 s has passed, and further peers were not"
        ),
    ):
        peer.Fetch(room(), IDENTITY, given, SECRET, torch.device("cpu"), Report()).from_first(
            lambda: addresses
        )
    assert time.monotonic() - began < 6
    for each in silent:
        each.close()


def test_slow_peer_is_stopped_by_the_deadline(serving: Any) -> None:
    served, begin = serving(), time.monotonic()
    given = Options(timeout=60, deadline=1)
    with (
        Cut(served.server.port, None, delay=0.05) as cut,
        pytest.raises(PeerError, match=r"^the deadline has passed$"),
    ):
        peer.Fetch(room(), IDENTITY, given, SECRET, torch.device("cpu"), Report()).from_peer(
            ("127.0.0.1", cut.port)
        )
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (
            wire.PREFIX.pack(b"HTTP", 1, 0),
            "a frame begins with 48545450 instead of 41575031: the peer does not use",
        ),
        (
            wire.PREFIX.pack(b"AWP1", 4097, 0),
            "the peer announced a header of 4097 bytes; the limit is 4096",
        ),
        (
            wire.PREFIX.pack(b"AWP1", 2**32 - 1, 2**64 - 1),
            "the peer announced a header of 4294967295 bytes; the limit is 4096",
        ),
        (
            wire.PREFIX.pack(b"AWP1", 3, 0) + b"\x80\x80\x80",
            "a header is not GetManifest: Object missing required field `type`",
        ),
        (
            wire.PREFIX.pack(b"AWP1", 18, 9) + b"\x81\xa4type\xabGetManifest",
            "the peer announced a payload of 9 bytes with GetManifest, which has none",
        ),
        (
            wire.PREFIX.pack(b"AWP1", 10, 0) + b"\x81\xa4ty",
            "the peer closed the connection after 4 of 10 bytes",
        ),
    ],
)
def test_malformed_and_oversized_frames_are_refused(frame: bytes, message: str) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(listening.getsockname()) as theirs:
        theirs.sendall(frame)
    ours, _ = listening.accept()
    with pytest.raises(PeerError) as caught:
        wire.Channel(ours, 5, time.monotonic() + 5).receive(wire.GetManifest)
    assert str(caught.value).startswith(message)
