# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""HCCL transport between two processes: reads, and reads whose peer sends or replies nothing."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import msgspec
import pytest
import torch
from ascend_communicator import hccl_engine as hccl
from ascend_communicator import hccl_sender
from ascend_communicator.hccl_sender import MAX_CONNECTING, Connect, RootInfo, Send
from ascend_platform import extension
from ascend_platform.plugins import slots
from ascend_transfer import engine
from ascend_transfer.errors import TransferError
from ascend_transfer.messages import Ack, Refused
from harness.engines import npus


def test_reads_succeed_and_failures_are_bounded_in_time() -> None:
    done = npus.run(
        2,
        sys.executable,
        str(Path(__file__).parent / "run_hccl_reads.py"),
        VLLM_PLUGINS="",
        timeout=120,
    )
    results = npus.by_name(done)
    right = {
        "some": 4,
        "from another engine": 1,
        "idle here": 3,
        "idle there": 4,
        "after a refusal": 1,
        "after nothing was sent": 1,
        "after it was stopped": 1,
    }
    right["after a link was not destroyed"] = 1
    assert results["read"]["right"] == {name: [True] * count for name, count in right.items()}
    assert results["not registered here"]["cause"] == "the memory is not registered"
    assert results["not registered there"]["kind"] == "transport"
    assert (
        "bytes were requested outside of the peer's registered memory"
        in results["not registered there"]["cause"]
    )
    assert results["another secret"]["cause"].startswith(
        "authentication failed: the secrets differ"
    )
    assert results["another secret"]["seconds"] < 5
    assert results["nothing is sent"]["cause"] == "HCCL did not receive 4194304 bytes in time"
    assert results["link is not destroyed"]["cause"] == "HCCL did not receive 4194304 bytes in time"
    assert [name for name, result in results.items() if not result.get("settled", True)] == [
        "link is not destroyed"
    ]
    assert results["stopped"]["cause"].startswith("no answer in ")
    for name in ("nothing is sent", "stopped"):
        assert 0.4 < results[name]["seconds"] < 5
    # Whichever notices first, the connection or HCCL.
    assert results["killed"]["kind"] in ("peer", "transport")
    assert results["killed"]["seconds"] < 5
    assert results["killed"]["sum"] == 4950
    assert results["killed"]["closed"] < 10
    assert (results["gone"]["kind"], results["gone"]["cause"][:18]) == (
        "peer",
        "nothing listens at",
    )


def test_hccl_is_refused_without_ascend_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_offers", {})
    with pytest.raises(
        extension.RefusedError,
        match=r"fix: pip install ascend-communicator, and add ascend_communicator to",
    ):
        engine.check("hccl", "transport")
    assert hccl.HcclEngine.on_device


class Link:
    """A link between NPUs that takes its time at the reader's side."""

    def __init__(self, rank: int, info: bytes) -> None:
        self.rank, self.destroyed = rank, 0
        if rank == 1:
            self.may_connect.wait(10)
            self.links.append(self)

    @staticmethod
    def root_info() -> bytes:
        return b"root"

    def destroy(self) -> None:
        self.destroyed += 1


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[hccl.HcclEngine]]:
    """Two engines of this process, between which :class:`Link` is made."""
    import ascend_communicator

    ascend_communicator.register()
    link = type("TestLink", (Link,), {"links": [], "may_connect": threading.Event()})
    monkeypatch.setattr(hccl.HcclEngine, "set_device", lambda engine: None)
    engines_of_ranks = [hccl.HcclEngine("127.0.0.1") for _ in range(2)]
    for each in engines_of_ranks:
        each.link = link
        each.register(torch.zeros(8, dtype=torch.uint8))
    yield engines_of_ranks
    for each in engines_of_ranks:
        each.close()


def links_end() -> None:
    """Let readers' threads that make links end."""
    for thread in threading.enumerate():
        if thread.name == "transfer-hccl" and "connect" in repr(thread._target):
            thread.join(10)


@pytest.mark.parametrize("is_connected", ["before it is given up", "after it was given up"])
def test_link_that_is_made_too_late_is_destroyed(
    is_connected: str, engines: list[hccl.HcclEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, peer = engines
    abandon, early = hccl.HcclReader._abandon, is_connected == "before it is given up"

    def make_link() -> None:
        reader.link.may_connect.set()
        links_end()

    monkeypatch.setattr(
        hccl.HcclReader, "_abandon", lambda each: (early and make_link(), abandon(each))[1]
    )
    with pytest.raises(TransferError, match=r"HCCL did not connect the two NPUs in 0\.\d+ s"):
        reader.connect(peer.session, 0.5)
    make_link()
    assert [link.destroyed for link in reader.link.links] == [1]


def test_reader_that_was_given_up_makes_no_link(engines: list[hccl.HcclEngine]) -> None:
    """A thread may have waited for it meanwhile."""
    one, peer = engines
    one.link.may_connect.set()
    one.connect(peer.session, 5.0)
    reader = one._readers[peer.session]
    reader._abandon()
    with pytest.raises(TransferError, match="failed in another read"):
        reader.connect(monotonic() + 5.0)
    links_end()
    assert [link.destroyed for link in one.link.links] == [1]
    one.connect(peer.session, 5.0)
    assert len(one.link.links) == 2


class SlowLink(Link):
    """A link that is made, and sends, when its reader does so."""

    def __init__(self, rank: int, info: bytes) -> None:
        self.links.append(self)
        self.destroyed, self.sent = 0, 0
        self.may_connect.wait(10)

    def send(self, tensor: torch.Tensor) -> None:
        self.sent += 1

    def wait(self, seconds: float) -> bool:
        return self.may_send.wait(seconds)


def own_threads() -> int:
    return sum(thread.name == "transfer-hccl" for thread in threading.enumerate())


def test_links_to_readers_are_limited(
    engines: list[hccl.HcclEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a reader that restarts in a loop, or of one that never connects."""
    _, peer = engines
    monkeypatch.setattr(hccl_sender, "MAX_LINKS", 40)
    events = {"may_connect": threading.Event(), "may_send": threading.Event()}
    peer.link = type("TestLink", (SlowLink,), {"links": [], **events})
    ask, before = peer._senders.answer, own_threads()
    replies = [ask(Connect(f"10.0.0.1:{number}/a")) for number in range(600)]
    assert sum(isinstance(each, RootInfo) for each in replies) == MAX_CONNECTING
    assert all(each.again for each in replies if isinstance(each, Refused))
    assert own_threads() - before == MAX_CONNECTING
    events["may_connect"].set()
    until = monotonic() + 10
    while sum(each.ready for each in peer._senders._senders.values()) < MAX_CONNECTING:
        assert monotonic() < until
    # The last one is sending; of the others the one that was not used for longest makes way.
    used = f"10.0.0.1:{MAX_CONNECTING - 1}/a"
    address = peer._memory.buffers[0].data_ptr()
    assert ask(Send(used, [address], [8], float("inf"))) == Ack()
    for number in range(100):
        while isinstance(reply := ask(Connect(f"10.0.0.2:{number}/a")), Refused):
            assert reply.again
            assert monotonic() < until
        assert isinstance(reply, RootInfo)
    assert len(peer._senders._senders) == 40
    assert used in peer._senders._senders
    for _ in range(hccl_sender.MAX_QUEUED + 2):
        last = ask(Send(used, [address], [8], 1.0))
    assert isinstance(last, Refused)
    assert last.again


def test_send_ends_whatever_its_reader_says(
    engines: list[hccl.HcclEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, peer = engines
    monkeypatch.setattr(hccl_sender, "MAX_SEND_SECONDS", 0.3)
    events = {"may_connect": threading.Event(), "may_send": threading.Event()}
    events["may_connect"].set()
    peer.link = type("TestLink", (SlowLink,), {"links": [], **events})
    ask, address, until = peer._senders.answer, peer._memory.buffers[0].data_ptr(), monotonic() + 10
    ask(Connect("r/a"))
    while isinstance(ask(Send("r/a", [address], [8], float("inf"))), Refused):
        assert monotonic() < until
    sending = peer._senders._senders["r/a"]
    while not sending.failed:
        assert monotonic() < until
    reply = ask(Send("r/a", [address], [8], 1.0))
    assert isinstance(reply, Refused)
    assert reply.cause == "the reader did not receive 8 bytes in 0.3 s"
    with pytest.raises(msgspec.ValidationError):  # not a number
        hccl_sender.CODEC.decode_query(
            hccl_sender.CODEC.encode(Send("r/a", [address], [8], float("nan")))
        )


def test_memory_is_looked_up_while_more_is_registered() -> None:
    engine = hccl.HcclEngine.__new__(hccl.HcclEngine)
    engine._lock, engine._memory = threading.Lock(), hccl.Memory([], [])
    buffers = [torch.zeros(64, dtype=torch.uint8) for _ in range(400)]
    threads = [
        threading.Thread(target=lambda part=part: [engine.register(each) for each in part])
        for part in (buffers[::2], buffers[1::2])
    ]
    for thread in threads:
        thread.start()
    result = 0
    while any(thread.is_alive() for thread in threads) or not result:
        slices = engine.registered_slices([buffers[0].data_ptr() + 3], [8])
        result += slices is not None
        assert slices is None or slices[0].data_ptr() == buffers[0].data_ptr() + 3
    assert all(engine.registered_slices([each.data_ptr()], [64]) for each in buffers)
