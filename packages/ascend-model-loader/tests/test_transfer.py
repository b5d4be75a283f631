"""Weights from a server to a peer, byte for byte; what ends a transfer, and what is refused."""

import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from ascend_model_loader import peer, wire
from ascend_model_loader.options import Options
from ascend_model_loader.report import Report
from ascend_model_loader.wire import PeerError
from harness.weights.peers import IDENTITY, SECRET, Cut, as_bytes, room, weights


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("checksum", ["xxh3", "blake3"])
@pytest.mark.parametrize("connections", [1, 4])
def test_bytes_are_the_peers(serving: Any, device: str, checksum: str, connections: int) -> None:
    into = room(device)
    report = serving(device=device, checksum=checksum).fetch(into, connections=connections)
    assert as_bytes(into) == as_bytes(weights())
    assert report.phases[-1].bytes == sum(map(len, as_bytes(into)))


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_tensors_whose_elements_lie_in_another_order_are_filled_too(serving: Any, device: str) -> None:
    made = torch.arange(6000, dtype=torch.float32).view(2, 30, 100)
    into = {"t": torch.zeros(100, 30, 2, device=device).permute(2, 1, 0), "u": torch.zeros(5, device=device)}
    serving({"t": made, "u": torch.ones(5)}).fetch(into)
    assert torch.equal(into["t"].cpu(), made)
    assert torch.equal(into["u"].cpu(), torch.ones(5))


@pytest.mark.parametrize("tenth", range(10))
def test_peer_that_dies_leaves_only_right_bytes_and_says_so(serving: Any, tenth: int) -> None:
    """Whatever has come is the peer's, the rest is as it was; nothing waits for the deadline."""
    served = serving()
    total = sum(map(len, as_bytes(served.tensors)))
    into, begin = room(), time.monotonic()
    with Cut(served.server.port, total * tenth // 10) as cut, pytest.raises(PeerError, match=r"^the peer (ended|is gone)"):
        peer.fetch(
            ("127.0.0.1", cut.port), into, IDENTITY, Options(timeout=30, deadline=60), SECRET, torch.device("cpu"), Report()
        )
    assert time.monotonic() - begin < 15
    got, sent = (np.frombuffer(b"".join(as_bytes(each)), np.uint8) for each in (into, served.tensors))
    assert ((got == sent) | (got == 0)).all()
    right = (got[sent != 0] != 0).mean()
    assert max(0, tenth / 10 - 0.45) <= right < 1  # four connections with a piece of 4 of 39 MB each


def test_weights_that_have_changed_since_they_were_loaded_are_not_taken(serving: Any) -> None:
    served = serving()
    served.tensors["head.weight"][12_000_000] += 1
    with pytest.raises(PeerError, match=r"piece \d+ of 10 \(head.weight\) does not meet its checksum: changed on its way"):
        served.fetch(room())


def test_bytes_that_are_changed_on_their_way_are_not_taken(serving: Any) -> None:
    served = serving()
    into = room()
    with Cut(served.server.port, None, flip=20_000_000) as cut, pytest.raises(PeerError, match="does not meet its checksum"):
        peer.fetch(("127.0.0.1", cut.port), into, IDENTITY, Options(connections=1), SECRET, torch.device("cpu"), Report())


def test_header_that_is_changed_on_its_way_is_not_taken(serving: Any) -> None:
    with (
        Cut(serving().server.port, None, flip=300) as cut,
        pytest.raises(PeerError, match="not made with the secret, or was changed"),
    ):
        peer.fetch(("127.0.0.1", cut.port), room(), IDENTITY, Options(), SECRET, torch.device("cpu"), Report())


@pytest.mark.parametrize(
    ("identity", "said"),
    [
        ({"config": "d"}, "its weights are others: config: the peer has c, this engine d"),
        ({"dtype": "float16"}, "its weights are others: dtype: the peer has bfloat16, this engine float16"),
        ({"tensor parallelism": "rank 1 of 2"}, "tensor parallelism: the peer has rank 0 of 1, this engine rank 1 of 2"),
        ({"checkpoint": "bad"}, "its weights are others: checkpoint: the peer has c0ffee, this engine bad"),
        ({"checkpoint": "", "name": "n@main"}, "its weights are others: name: the peer has m@main, this engine n@main"),
    ],
)
def test_other_weights_are_refused_with_what_was_found(serving: Any, identity: dict[str, str], said: str) -> None:
    into = room()
    with pytest.raises(PeerError, match=said):
        serving().fetch(into, IDENTITY | identity)
    assert not any(map(any, as_bytes(into)))


@pytest.mark.parametrize("identity", [{"name": "elsewhere"}, {"checkpoint": ""}])
def test_names_count_where_there_are_no_files_to_compare(serving: Any, identity: dict[str, str]) -> None:
    serving().fetch(room(), IDENTITY | identity)


def test_other_tensors_are_refused_with_the_first_that_differs(serving: Any) -> None:
    served = serving()
    into = room()
    into["scale"] = torch.zeros(3)
    with pytest.raises(PeerError, match=r"it has \('scale', 'float32', \[\]\), and this engine \('scale', 'float32', \[3\]\)"):
        served.fetch(into)
    del into["flag"], into["scale"]
    with pytest.raises(PeerError, match="its tensors are others"):
        served.fetch(into)


def test_another_secret_is_refused_on_both_sides(serving: Any) -> None:
    served = serving()
    with pytest.raises(PeerError, match=r"^it answers: the secret is another one$"):
        served.fetch(room(), secret=b"fedcba9876543210")
    listening = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listening.getsockname())
    theirs, _ = listening.accept()
    answering = threading.Thread(target=_pretend_to_know, args=[theirs])
    answering.start()
    with pytest.raises(PeerError, match=r"^it does not have this engine's secret$"):
        wire.Channel(ours, 5, time.monotonic() + 5).prove(SECRET)
    answering.join()


def _pretend_to_know(connection: socket.socket) -> None:
    channel = wire.Channel(connection, 5, time.monotonic() + 5)
    channel.send(wire.Challenge(bytes(32)))
    answer, _ = channel.receive(wire.Answer)
    channel.send(wire.Welcome(answer.proof))  # the client's own


def test_sleeping_engine_says_so_and_shutting_waits_for_readers(serving: Any) -> None:
    served = serving()
    with served.server.gate.reading():
        assert not served.server.gate.shut(0.05)
    assert served.server.gate.shut(0.05)
    with pytest.raises(PeerError, match=r"^it answers: the engine is asleep or does not serve yet$"):
        served.fetch(room())
    served.server.gate.open()
    served.fetch(room())


def test_bandwidth_is_limited_over_all_connections(serving: Any) -> None:
    served = serving(max_bytes_per_second=40e6)
    begin = time.monotonic()
    served.fetch(room(), connections=3)
    assert 0.8 < time.monotonic() - begin < 3  # 39 MB


def test_connections_are_limited_and_fewer_than_asked_for_are_enough(serving: Any) -> None:
    served = serving(max_connections=2)
    idle = [socket.create_connection(("127.0.0.1", served.server.port))]
    time.sleep(0.1)
    into = room()
    served.fetch(into, connections=4)
    assert as_bytes(into) == as_bytes(weights())
    idle.append(socket.create_connection(("127.0.0.1", served.server.port)))
    time.sleep(0.1)
    with pytest.raises(PeerError, match=r"^it answers: all 2 connections are in use$"):
        served.fetch(into)
    for each in idle:
        each.close()


def test_nobody_there_and_nobody_who_answers_end_in_time() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    port = silent.getsockname()[1]
    given = (room(), IDENTITY, Options(connect_timeout=1, timeout=0.3, deadline=5), SECRET, torch.device("cpu"), Report())
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"^the peer sent nothing for 0\.3 s$"):
        peer.fetch(("127.0.0.1", port), *given)
    silent.close()
    for address in (("127.0.0.1", port), ("127.0.0.1", 70000), ("a" * 70, 1)):
        with pytest.raises(PeerError, match=r"^it cannot be reached: "):
            peer.fetch(address, *given)
    assert time.monotonic() - begin < 2


def test_peer_that_sends_a_byte_at_a_time_meets_the_deadline(serving: Any) -> None:
    served, begin = serving(), time.monotonic()
    given = Options(timeout=5, deadline=1)
    with Cut(served.server.port, None, delay=0.05) as cut, pytest.raises(PeerError, match=r"^the deadline has passed$"):
        peer.fetch(("127.0.0.1", cut.port), room(), IDENTITY, given, SECRET, torch.device("cpu"), Report())
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (wire.PREFIX.pack(b"HTTP", 1, 0), "a frame begins with 48545450, not with 41575031: the peer does not speak"),
        (wire.PREFIX.pack(b"AWP1", 4097, 0), "a header of 4097 bytes was announced; at most 4096 are taken here"),
        (wire.PREFIX.pack(b"AWP1", 2**32 - 1, 2**64 - 1), "a header of 4294967295 bytes was announced; at most 4096 are"),
        (wire.PREFIX.pack(b"AWP1", 3, 0) + b"\x80\x80\x80", "a header is not Ask: Object missing required field `type`"),
        (wire.PREFIX.pack(b"AWP1", 10, 9) + b"\x81\xa4type\xa3Ask", "9 bytes were announced behind Ask, which has none"),
        (wire.PREFIX.pack(b"AWP1", 10, 0) + b"\x81\xa4ty", "the peer ended the connection after 4 of 10 bytes"),
    ],
)
def test_malformed_and_oversized_frames_are_refused_in_one_line(frame: bytes, said: str) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(listening.getsockname()) as theirs:
        theirs.sendall(frame)
    ours, _ = listening.accept()
    with pytest.raises(PeerError) as caught:
        wire.Channel(ours, 5, time.monotonic() + 5).receive(wire.Ask)
    assert str(caught.value).startswith(said)
