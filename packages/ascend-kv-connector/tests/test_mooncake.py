# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Transfers over Mooncake's transfer engine on the loopback interface."""

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from multiprocessing.connection import Connection
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from ascend_kv_connector.p2p.transfers import Done
from ascend_transfer.engine import Runs
from ascend_transfer.errors import TransferError

pytest.importorskip(
    "mooncake.engine",
    exc_type=ImportError,
    reason="Mooncake lacks a library: apt-get install libibverbs1",
)

from ascend_transfer import mooncake
from ascend_transfer.mooncake import MooncakeEngine, SharedEngine


class Loopback:
    """Network of the Instance class: Mooncake transports on 127.0.0.1."""

    def make_transport(self) -> MooncakeEngine:
        return MooncakeEngine("127.0.0.1", "tcp")


@pytest.mark.parametrize(
    ("one", "other"),
    [({}, {}), ({"tp": 2}, {}), ({}, {"tp": 2})],
    ids=["1 to 1", "2 to 1", "1 to 2"],
)
def test_tokens_are_transferred(one: dict, other: dict, instances: Callable) -> None:
    producer, consumer = (
        instances("p", chunk_bytes=4096, **one),
        instances("d", chunk_bytes=4096, verify=True, **other),
    )
    producer.network = consumer.network = Loopback()
    producer.produce()
    consumer.consume()
    wanted = {}
    for number, tokens in enumerate((1, 17, 80)):
        source, _ = producer.fill(f"r{number}", tokens)
        wanted[f"r{number}"] = blocks = consumer.take(tokens)
        for rank in consumer.consumers:
            rank.start(f"r{number}", source, blocks, 0, tokens)
    ended = consumer.wait(len(wanted))
    assert all(isinstance(outcome, Done) for rank in ended for outcome in rank), ended
    assert all(
        consumer.holds(name, blocks, 0, tokens)
        for (name, blocks), tokens in zip(wanted.items(), (1, 17, 80), strict=True)
    )
    assert all(producer.all_free(name) for name in wanted)


class Moving:
    """Mooncake's asynchronous calls: the state of each run after 0.05 s, and the requests to it.

    A batch is freed when its end is returned, after which it may not be asked for.
    """

    def __init__(self, *states: int) -> None:
        self.states, self.submitted, self.looks, self.began = list(states), 0, 0, monotonic()
        self.freed: set[int] = set()

    def submit(self, session: str, local: list[int], remote: list[int], size: list[int]) -> int:
        self.submitted += 1
        return 0 if local == [13] else self.submitted  # 0: Mooncake could not submit it

    def transfer_check_status(self, batch: int) -> int:
        self.looks += 1
        assert batch not in self.freed
        state = self.states[batch - 1] if monotonic() > self.began + 0.05 else 0
        self.freed |= {batch} if state in (1, -1) else set()
        return state


@pytest.mark.parametrize(
    ("states", "locals", "code", "left"),
    [
        ((1, 1), [10, 11], 0, 0),
        ((1, -1), [10, 11], -1, 0),
        ((-1, 0), [10, 11], -1, 1),
        ((1, -2), [10, 11], -2, 1),
        ((1, 0, 0), [10, 11, 12], -1, 2),
        ((0,), [10, 13, 11], -1, 1),
    ],
    ids=["done", "failed", "failed before the last", "slices late", "timeout", "not submitted"],
)
def test_runs_are_waited_for_asleep(
    states: tuple[int, ...], locals: list[int], code: int, left: int
) -> None:
    """After an error, the remaining runs are polled until they have ended, which frees them."""
    moving = Moving(*states)
    shared = SharedEngine.__new__(SharedEngine)
    shared.engine, shared.timeout = moving, 0.2
    runs = Runs([0] * len(locals), locals, [1] * len(locals))
    result, settled = shared.run(moving.submit, "peer", runs)
    assert result == code
    assert moving.submitted == (2 if 13 in locals else len(locals))
    assert moving.looks < 500  # Without a pause there would be about 100,000 in this time.
    sleep(0.06)
    for number in range(left):
        assert not settled()
        moving.states[
            next(index for index, state in enumerate(moving.states) if state in (0, -2))
        ] = (-1) ** number
    assert settled()
    assert settled()
    assert moving.freed == set(range(1, len(states) + 1))


@pytest.mark.parametrize(
    ("acknowledged", "variable", "can"),
    [
        ("0.3.11.post1", "", False),
        ("0.3.12.post1", "", True),
        ("0.3.13", "1", False),
        ("1.0", "2", True),
        (None, "", False),
    ],
)
def test_pushes_need_writes_that_are_acknowledged(
    acknowledged: str | None, variable: str, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without, a push counts as done while its bytes are in transit."""

    def version(wheel: str) -> str:
        if acknowledged is None or wheel != "mooncake-transfer-engine":
            raise metadata.PackageNotFoundError(wheel)
        return acknowledged

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setenv("MC_TCP_PROTO", variable)
    assert MooncakeEngine("127.0.0.1", "tcp").can_write == can


def test_more_runs_are_read_than_mooncakes_queue_takes() -> None:
    transport, count, size = MooncakeEngine("127.0.0.1", "tcp"), 4096, 64
    sent, received = (
        torch.randint(256, (count, size), dtype=torch.uint8),
        torch.zeros(count, size, dtype=torch.uint8),
    )
    for buffer in (sent, received):
        transport.register(buffer.view(-1))
    remote = [sent.data_ptr() + size * run for run in range(count)]
    transport.read(
        transport.session,
        Runs(remote, [received[-1 - run].data_ptr() for run in range(count)], [size] * count),
        30,
    )
    assert torch.equal(received.flip(0), sent)
    transport.close()


def serve(pipe: Connection) -> None:
    transport = MooncakeEngine("127.0.0.1", "tcp")
    buffer = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
    transport.register(buffer)
    pipe.send((transport.session, buffer.data_ptr()))
    pipe.recv()


def test_process_has_one_engine_and_memory_has_several_users() -> None:
    one, other = (MooncakeEngine("127.0.0.1", "tcp") for _ in range(2))
    assert one.session == other.session
    sent, received = (
        torch.arange(1 << 20, dtype=torch.uint8),
        torch.zeros(1 << 20, dtype=torch.uint8),
    )
    runs = Runs([sent.data_ptr()], [received.data_ptr()], [len(sent)])
    for engine in (one, other):
        engine.register(sent)
        engine.register(received)
    one.close()
    other.read(one.session, runs, 10)
    assert torch.equal(sent, received)
    other.close()
    again = MooncakeEngine("127.0.0.1", "tcp")
    again.register(sent)  # Mooncake refuses what is registered
    again.close()


IPV6 = """
import torch
from ascend_transfer.mooncake import MooncakeEngine
from ascend_transfer.engine import Runs

one, other = (MooncakeEngine("::1", "tcp", None, range(20000, 20300)) for _ in range(2))
sent, received = torch.arange(1 << 16, dtype=torch.int32), torch.zeros(1 << 16, dtype=torch.int32)
for transport, buffer in ((one, sent), (other, received)):
    transport.register(buffer.view(torch.uint8))
other.read(one.session, Runs([sent.data_ptr()], [received.data_ptr()], [4 << 16]), 10.0)
print("result", torch.equal(sent, received), one.session)
"""


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 on this machine")
def test_ipv6_address_and_ports_of_a_range() -> None:
    """In a process of its own: Mooncake reads both settings when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", IPV6], capture_output=True, text=True, timeout=300, check=False
    )
    assert re.search(r"^result True \[::1\]:20[0-2]\d\d/\w{8}$", done.stdout, re.MULTILINE), (
        done.stdout + done.stderr
    )


def test_mooncake_listens_on_all_addresses() -> None:
    """The reason for which an instance needs a secret, or "insecure": true, also with a loopback
    host. If this fails, Mooncake binds to its host, and the rule of ``auth.require_secret`` can be
    that of the other transports again."""
    transport = MooncakeEngine("127.0.0.1", "tcp")
    socket.create_connection(("127.0.0.2", transport._shared.engine.get_rpc_port()), 10).close()
    transport.close()


def test_peers_that_had_the_same_port_have_different_names() -> None:
    """Mooncake keeps by name by which port it reads a peer, and never looks again. It reads the
    port as a number."""
    shared = SharedEngine.__new__(SharedEngine)
    shared._names, shared._known, shared._lock = {}, Counter(), threading.Lock()
    sessions = [
        "10.0.0.1:15000/aa",
        "10.0.0.1:15001/bb",
        "10.0.0.1:15000/cc",
        "10.0.0.1:15000/aa",
        "[fd00::7]:15000/dd",
        "[fd00::7]:15000",
    ]
    names = [
        "10.0.0.1:15000",
        "10.0.0.1:15001",
        "10.0.0.1:015000",
        "10.0.0.1:15000",
        "[fd00::7]:15000",
        "[fd00::7]:015000",
    ]
    assert [shared.peer_name(session) for session in sessions] == names


def test_peer_is_read_by_a_name_with_zeros() -> None:
    """As one that was restarted at the port of another, which Mooncake cannot be made to forget."""
    transport = MooncakeEngine("127.0.0.1", "tcp")
    sent, received = (
        torch.arange(1 << 20, dtype=torch.uint8),
        torch.zeros(1 << 20, dtype=torch.uint8),
    )
    for buffer in (sent, received):
        transport.register(buffer)
    restarted = transport.session + "restarted"
    transport._shared._known[transport.session.partition("/")[0]] = 3
    assert ":000" in transport._shared.peer_name(restarted)
    transport.read(restarted, Runs([sent.data_ptr()], [received.data_ptr()], [len(sent)]), 10)
    assert torch.equal(sent, received)
    transport.close()


def test_read_that_ended_with_a_closed_connection_is_repeated() -> None:
    """Each of the connections to a peer that was restarted fails once."""
    transport, codes = MooncakeEngine("127.0.0.1", "tcp"), list[int]()
    runs, ends = Runs([0], [0], [1]), [True]

    def attempt(direction: str, name: str, runs: Runs) -> tuple[int, Any]:
        return codes.pop(0), lambda: ends[0]

    transport._attempt = attempt
    codes[:] = [-1, -1, -1, -1, 0]
    transport.read("peer:1", runs, 10)
    assert codes == []
    # Bytes of the first attempt may still arrive.
    for direction, ended in (("write", True), ("read", False)):
        codes[:], ends[0] = [-1, 0], ended
        with pytest.raises(TransferError, match=f"mooncake failed to {direction} 1 bytes"):
            transport._run(direction, "peer:1", runs)
        assert codes == [0]
    codes[:], ends[0] = [-1] * 9, True
    with pytest.raises(TransferError):
        transport.read("peer:1", runs, 10)
    assert len(codes) == 4
    transport.close()


def test_version_that_was_not_tested_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    monkeypatch.setattr(
        mooncake.logger, "warning", lambda line, *values: lines.append(line % values)
    )
    monkeypatch.setattr(
        mooncake.metadata,
        "version",
        {mooncake.WHEELS[0]: "0.3.13.post1", mooncake.WHEELS[1]: "0.4.0"}.get,
    )
    monkeypatch.setattr(mooncake, "WHEELS", mooncake.WHEELS[:2])
    mooncake._note_version.__wrapped__()
    (line,) = lines
    assert line.startswith(
        "mooncake-transfer-engine-non-cuda 0.4.0 was not tested with this version; fix: pip"
        " install "
    )


def test_paused_and_killed_peer() -> None:
    """Bytes that arrive after a read has failed, when the peer goes on, arrive before the read is
    settled."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    try:
        assert ours.poll(240)
        session, address = ours.recv()
        transport = MooncakeEngine("127.0.0.1", "tcp", timeout=5.0)
        buffer = torch.zeros(4 << 20, dtype=torch.uint8)
        transport.register(buffer)
        whole = Runs([address], [buffer.data_ptr()], [buffer.numel()])
        transport.read(session, whole, 10)
        values = torch.arange(1 << 20, dtype=torch.int32)
        assert torch.equal(buffer.view(torch.int32), values)
        os.kill(process.pid or 0, signal.SIGSTOP)
        runs = Runs(
            *([start + (at << 16) for at in range(64)] for start in (address, buffer.data_ptr())),
            [1 << 16] * 64,
        )
        with pytest.raises(TransferError, match="mooncake failed to read") as failed:
            transport.read(session, runs, 10)
        assert not failed.value.settled()
        buffer.zero_()
        os.kill(process.pid or 0, signal.SIGCONT)
        until = monotonic() + 60
        while not failed.value.settled() and monotonic() < until:
            sleep(0.01)
        assert failed.value.settled()
        assert bool(buffer.any()), "no bytes were late, so that this test has shown nothing"
        buffer.zero_()  # the next request's
        sleep(1.0)
        assert not bool(buffer.any())
        transport.read(session, whole, 10)
        assert torch.equal(buffer.view(torch.int32), values)
    finally:
        process.kill()
        process.join()
    with pytest.raises(TransferError, match="mooncake failed to read 4194304 bytes"):
        transport.read(session, whole, 10)
    transport.close()
