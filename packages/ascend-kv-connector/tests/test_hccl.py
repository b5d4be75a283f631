# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""HCCL transport between two processes: reads, and reads whose peer sends or replies nothing."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
import torch
from ascend_platform import extension
from ascend_platform.plugins import slots
from ascend_platform.transfer import engine, hccl
from ascend_platform.transfer.errors import TransferError
from harness import npus


def test_reads_succeed_and_failures_are_bounded_in_time() -> None:
    done = npus.run(
        2,
        sys.executable,
        str(Path(__file__).parent / "run_hccl_reads.py"),
        VLLM_PLUGINS="",
        timeout=120,
    )
    found = npus.by_name(done)
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
    assert found["read"]["right"] == {name: [True] * count for name, count in right.items()}
    assert found["not registered here"]["cause"] == "the memory is not registered"
    assert found["not registered there"]["kind"] == "transport"
    assert (
        "bytes were requested outside of the peer's registered memory"
        in found["not registered there"]["cause"]
    )
    assert found["another secret"]["cause"].startswith("authentication failed: the secrets differ")
    assert found["another secret"]["seconds"] < 5
    assert found["nothing is sent"]["cause"] == "HCCL did not receive 4194304 bytes in time"
    assert found["link is not destroyed"]["cause"] == "HCCL did not receive 4194304 bytes in time"
    assert [name for name, result in found.items() if not result.get("settled", True)] == [
        "link is not destroyed"
    ]
    assert found["stopped"]["cause"].startswith("no answer in ")
    for name in ("nothing is sent", "stopped"):
        assert 0.4 < found[name]["seconds"] < 5
    # Whichever notices first, the connection or HCCL.
    assert found["killed"]["kind"] in ("peer", "transport")
    assert found["killed"]["seconds"] < 5
    assert (found["killed"]["sum"], found["killed"]["closed"] < 10) == (4950, True)
    assert (found["gone"]["kind"], found["gone"]["cause"][:18]) == ("peer", "nothing listens at")


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
            self.made.append(self)

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
    link = type("TestLink", (Link,), {"made": [], "may_connect": threading.Event()})
    monkeypatch.setattr(hccl.HcclEngine, "set_device", lambda engine: None)
    made = [hccl.HcclEngine("127.0.0.1") for _ in range(2)]
    for each in made:
        each.link = link
        each.register(torch.zeros(8, dtype=torch.uint8))
    yield made
    for each in made:
        each.close()


def links_end() -> None:
    """Let readers' threads that make links end."""
    for thread in threading.enumerate():
        if thread.name == "transfer-hccl" and "connect" in repr(thread._target):
            thread.join(10)


@pytest.mark.parametrize("made", ["before it is given up", "after it was given up"])
def test_link_that_is_made_too_late_is_destroyed(
    made: str, engines: list[hccl.HcclEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, peer = engines
    abandon, early = hccl.HcclReader._abandon, made == "before it is given up"

    def make_link() -> None:
        reader.link.may_connect.set()
        links_end()

    monkeypatch.setattr(
        hccl.HcclReader, "_abandon", lambda each: (early and make_link(), abandon(each))[1]
    )
    with pytest.raises(TransferError, match=r"HCCL did not connect the two NPUs in 0\.\d+ s"):
        reader.connect(peer.session, 0.5)
    make_link()
    assert [link.destroyed for link in reader.link.made] == [1]


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
    assert [link.destroyed for link in one.link.made] == [1]
    one.connect(peer.session, 5.0)
    assert len(one.link.made) == 2
