# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fuzzing of the weight transfer protocol, server and client, from a seed."""

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from ascend_model_loader import peer, wire
from ascend_model_loader.options import Options
from ascend_model_loader.report import Report
from harness.weights.peers import IDENTITY, SECRET, Serving, as_bytes

KINDS: list[type[wire.Message]] = wire.Message.__subclasses__()
PICKLE = b"cposix\nsystem\n(S'touch executed-by-a-pickle'\ntR."


def value(draw: random.Random, depth: int = 0) -> Any:
    """A random MessagePack value, often at the end of a range."""
    kind = draw.randrange(9 if depth < 4 else 7)
    if kind == 0:
        return draw.choice(
            [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, draw.randrange(2**20)]
        )
    if kind == 1:
        return draw.choice(
            [
                "",
                "type",
                "Get",
                "\x00",
                "é" * 50,
                "a" * draw.randrange(3000),
                "../../etc/passwd",
                "\n\x1b[31m",
            ]
        )
    if kind == 2:
        return draw.randbytes(draw.choice([0, 1, 31, 32, 33, 5000]))
    if kind == 3:
        return draw.choice([None, True, False, 0.5, float("nan"), float("inf"), -0.0])
    if kind == 4:
        return PICKLE
    if kind in (5, 6):
        return draw.randrange(200)
    if kind == 7:
        return [value(draw, depth + 1) for _ in range(draw.randrange(6))]
    return {
        draw.choice(["type", "first", "last", "nonce", "proof", "x"]): value(draw, depth + 1)
        for _ in range(draw.randrange(5))
    }


def header(draw: random.Random) -> bytes:
    """A header: valid except for its values, or random, or truncated and changed."""
    kind = draw.choice(KINDS)
    fields = {name: value(draw) for name in kind.__struct_encode_fields__ if draw.random() < 0.95}
    cut = draw.choice(
        [
            lambda: msgspec.msgpack.encode({"type": kind.__struct_config__.tag} | fields),
            lambda: msgspec.msgpack.encode(value(draw)),
            lambda: draw.randbytes(draw.randrange(200)),
            lambda: b"\x91" * draw.randrange(4096),
            lambda: PICKLE,
        ]
    )()
    if cut and draw.random() < 0.3:
        changed = bytearray(cut)
        for _ in range(draw.randrange(1, 5)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        cut = bytes(changed[: draw.randrange(1, len(changed) + 1)])
    return cut


def frame(draw: random.Random, channel: wire.Channel) -> bytes:
    """A frame whose sizes, MAC and magic mostly match its header."""
    content = header(draw)
    odd = [
        0,
        1,
        wire.MAX_HEADER_BYTES,
        wire.MAX_HEADER_BYTES + 1,
        wire.MAX_MANIFEST_BYTES + 1,
        2**31,
        2**32 - 1,
    ]
    length = len(content) if draw.random() < 0.8 else draw.choice(odd)
    payload = 0 if draw.random() < 0.7 else draw.choice([1, 4 << 20, 2**40, 2**64 - 1])
    prefix = wire.PREFIX.pack(
        wire.MAGIC if draw.random() < 0.9 else draw.randbytes(4), length, payload
    )
    mac = channel._mac(channel._is_server, channel._sent, prefix, content)
    channel._sent += 1
    if mac and draw.random() < 0.2:
        mac = draw.randbytes(len(mac))
    return prefix + content + mac + draw.randbytes(draw.choice([0, 0, 0, 1, 500]))


def to_server(draw: random.Random, port: int) -> str:
    """One connection of a malicious client; returns its outcome."""
    connection = socket.create_connection(("127.0.0.1", port), 5)
    channel = wire.Channel(connection, 0.5, time.monotonic() + 5)
    kind = draw.choice(
        [
            "bytes",
            "before the proof",
            "instead of the proof",
            "behind the proof",
            "behind the proof",
            "gone",
        ]
    )
    with contextlib.suppress(OSError), contextlib.closing(connection):
        try:
            if kind == "bytes":
                connection.sendall(draw.randbytes(draw.randrange(2000)))
            elif kind == "before the proof":
                connection.sendall(frame(draw, channel))
            elif kind == "instead of the proof":
                channel.receive(wire.Challenge)
                connection.sendall(frame(draw, channel))
            elif kind == "gone":
                channel.authenticate_as_client(SECRET)
                channel.send(wire.GetChunks(0, 5))
                return kind
            else:
                channel.authenticate_as_client(SECRET)
                for _ in range(draw.randrange(1, 4)):
                    connection.sendall(frame(draw, channel))
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(5)
            while connection.recv(1 << 20):
                pass
        except wire.PeerError:
            pass
    return kind


class BadServer:
    """A server that follows the protocol up to a random point."""

    def __init__(
        self, draw: random.Random, tensors: dict[str, torch.Tensor], honest: wire.Manifest
    ) -> None:
        self._draw, self._tensors, self._honest = draw, tensors, honest
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(
                    target=self._play,
                    args=[connection, random.Random(self._draw.random())],
                    daemon=True,
                ).start()

    def _play(self, connection: socket.socket, draw: random.Random) -> None:
        channel = wire.Channel(connection, 2, time.monotonic() + 5)
        with contextlib.suppress(wire.PeerError, OSError), contextlib.closing(connection):
            if draw.random() < 0.2:
                connection.sendall(
                    draw.choice([draw.randbytes(draw.randrange(1, 2000)), frame(draw, channel)])
                )
                return
            channel.authenticate_as_server(SECRET)
            channel.receive(wire.GetManifest)
            if draw.random() < 0.4:
                channel.send(self._manifest(draw))
                channel.receive(wire.GetChunks)
            elif draw.random() < 0.5:
                connection.sendall(frame(draw, channel))
                return
            else:
                channel.send(self._honest)
                channel.receive(wire.GetChunks)
            connection.sendall(frame(draw, channel))
            if draw.random() < 0.5:
                channel.send(
                    wire.Chunk(0), memoryview(draw.randbytes(draw.choice([1, 1000, 4 << 20])))
                )

    def _manifest(self, draw: random.Random) -> wire.Manifest:
        fields = msgspec.structs.asdict(self._honest)
        key = draw.choice(sorted(fields))
        changed: dict[str, Callable[[], Any]] = {
            "identity": lambda: (
                fields["identity"] | {draw.choice(sorted(fields["identity"])): "\x1b[31m\n" * 300}
            ),
            "tensors": lambda: draw.sample(
                fields["tensors"], draw.randrange(len(fields["tensors"]))
            ),
            "chunk_bytes": lambda: draw.choice([0, -1, 1, 2**63 - 1]),
            "checksum": lambda: draw.choice(["", "none", "__import__('os')"]),
            "digests": lambda: [
                draw.randbytes(16)
                for _ in range(draw.choice([0, 1, 10_000, len(fields["digests"])]))
            ],
        }
        return wire.Manifest(**fields | {key: changed[key]()})


def fuzz(seconds: float, seed: int, say: Callable[[str], None] = lambda line: None) -> Counter[str]:
    """Fuzz a server, which has to go on serving, for half of the time, and a client for the other
    half.

    Raises:
        AssertionError: the server does not serve right afterwards, or the client does not refuse
            with a PeerError.
    """
    draw, counts = random.Random(seed), Counter[str]()
    served = Serving(
        {"a": torch.arange(100_000.0), "b": torch.ones(300_000)}, timeout=1.0, max_connections=8
    )
    into = {name: torch.zeros_like(each) for name, each in served.tensors.items()}
    threads = threading.active_count()
    Path("executed-by-a-pickle").unlink(missing_ok=True)
    try:
        end, next_report = time.monotonic() + seconds / 2, time.monotonic() + 30
        while time.monotonic() < end:
            counts[f"to the server: {to_server(draw, served.server.port)}"] += 1
            if sum(counts.values()) % 50 == 0:
                check(served, into, counts)
            if time.monotonic() > next_report:
                next_report += 30
                say(str(dict(counts)))
        check(served, into, counts)
        end = time.monotonic() + seconds / 2
        while time.monotonic() < end:
            bad = BadServer(random.Random(draw.random()), served.tensors, served.server._manifest)
            given = Options(timeout=1, deadline=3, connections=draw.choice([1, 3]))
            try:
                peer.Fetch(
                    into,
                    IDENTITY,
                    given,
                    SECRET,
                    torch.device("cpu"),
                    Report(),
                ).from_peer(("127.0.0.1", bad.port))
            except wire.PeerError as error:
                counts["to the client: refused"] += 1
                said_of_it = str(error)
            else:
                assert as_bytes(into) == as_bytes(served.tensors)
                counts["to the client: nothing was wrong"] += 1
                said_of_it = ""
            assert said_of_it == "" or said_of_it.isprintable(), said_of_it
            bad.close()
            if time.monotonic() > next_report:
                next_report += 30
                say(str(dict(counts)))
        check(served, into, counts)
        until = time.monotonic() + 15
        while threading.active_count() > threads and time.monotonic() < until:
            time.sleep(0.1)
        assert threading.active_count() <= threads, threading.enumerate()
        assert not Path("executed-by-a-pickle").exists()
    finally:
        served.server.stop()
    return counts


def check(served: Serving, into: dict[str, torch.Tensor], counts: Counter[str]) -> None:
    """Check that the server serves correct bytes, at the latest when it has dropped the bad
    connections."""
    for each in into.values():
        each.zero_()
    until = time.monotonic() + 20
    while True:
        try:
            served.fetch(into)
            break
        except wire.PeerError as error:
            if "connections are in use" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.1)
    assert as_bytes(into) == as_bytes(served.tensors)
    counts["right transfers in between"] += 1
