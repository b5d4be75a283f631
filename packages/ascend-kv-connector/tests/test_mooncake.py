"""Transfers over Mooncake's transfer engine on the loopback interface."""

import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch
from ascend_kv_connector.errors import TransferError
from ascend_kv_connector.transfers import Done

pytest.importorskip("mooncake.engine", exc_type=ImportError, reason="Mooncake lacks a library: apt-get install libibverbs1")

from ascend_kv_connector.mooncake import MooncakeTransport


class Loopback:
    """Network of the Instance class: Mooncake transports on 127.0.0.1."""

    def make_transport(self) -> MooncakeTransport:
        return MooncakeTransport("127.0.0.1", "tcp")


@pytest.mark.parametrize(("one", "other"), [({}, {}), ({"tp": 2}, {}), ({}, {"tp": 2})], ids=["1 to 1", "2 to 1", "1 to 2"])
def test_tokens_are_transferred(one: dict, other: dict, instances: Callable) -> None:
    producer, consumer = instances("p", chunk_bytes=4096, **one), instances("d", chunk_bytes=4096, verify=True, **other)
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
        consumer.holds(name, blocks, 0, tokens) for (name, blocks), tokens in zip(wanted.items(), (1, 17, 80), strict=True)
    )
    assert all(producer.all_free(name) for name in wanted)


def serve(pipe: Connection, host: str = "127.0.0.1") -> None:
    transport = MooncakeTransport(host, "tcp")
    buffer = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
    transport.register(buffer)
    pipe.send((transport.session, buffer.data_ptr()))
    pipe.recv()


def read_over_ipv6(pipe: Connection, session: str, address: int) -> None:
    transport, buffer = MooncakeTransport("::1", "tcp"), torch.zeros(1 << 20, dtype=torch.int32)
    transport.register(buffer.view(torch.uint8))
    transport.read(session, address, buffer.data_ptr(), 4 << 20, 10.0)
    pipe.send(torch.equal(buffer, torch.arange(1 << 20, dtype=torch.int32)))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 on this machine")
def test_ipv6_address() -> None:
    """In processes of their own: Mooncake has one address family in a process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, "::1"))
    server.start()
    try:
        assert ours.poll(120)
        session, address = ours.recv()
        assert session.startswith("[::1]:")
        received, sent = context.Pipe()
        reader = context.Process(target=read_over_ipv6, args=(sent, session, address))
        reader.start()
        assert received.poll(120)
        assert received.recv()
        reader.join(60)
    finally:
        server.kill()


def test_killed_peer_is_an_error() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    try:
        assert ours.poll(60)
        session, address = ours.recv()
        transport = MooncakeTransport("127.0.0.1", "tcp")
        buffer = torch.zeros(4 << 20, dtype=torch.uint8)
        transport.register(buffer)
        transport.read(session, address, buffer.data_ptr(), buffer.numel(), 10)
        assert torch.equal(buffer.view(torch.int32), torch.arange(1 << 20, dtype=torch.int32))
    finally:
        process.kill()
        process.join()
    with pytest.raises(TransferError, match="mooncake failed to read 4194304 bytes"):
        transport.read(session, address, buffer.data_ptr(), buffer.numel(), 10)
