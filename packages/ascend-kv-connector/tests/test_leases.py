"""Leases and send buffers with a simulated clock."""

from collections.abc import Callable

import pytest
import torch
from ascend_kv_connector.buffers import SendBuffers
from ascend_kv_connector.errors import TransferError
from ascend_kv_connector.leases import Leases, NotReadyError, PrefillProgress


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> Leases:
    return Leases(clock)


def test_lease_expires_once(leases: Leases, clock: Clock) -> None:
    leases.grant("r", [3, 4], 7, 10)
    clock.now += 9.9
    assert leases.pop_ended() == {}
    clock.now += 0.2
    assert leases.pop_ended() == {"r": "the lease of 10 s has expired"}
    assert leases.pop_ended() == {}
    with pytest.raises(TransferError, match="were freed: the lease of 10 s has expired"), leases.use("r"):
        pass


def test_use_renews_the_lease_and_keeps_it(leases: Leases, clock: Clock) -> None:
    leases.grant("r", [3, 4], 7, 10)
    clock.now += 9
    with leases.use("r") as lease:
        assert (lease.blocks, lease.tokens) == ([3, 4], 7)
        clock.now += 30
        assert leases.pop_ended() == {}
    assert list(leases.pop_ended()) == ["r"]


def test_lease_ends_when_all_readers_released_it(leases: Leases) -> None:
    leases.grant("r", [3], 7, 10)
    leases.release("r", "d/0", 2)
    leases.release("r", "d/0", 2)
    assert leases.pop_ended() == {}
    leases.release("r", "d/1", 2)
    assert list(leases.pop_ended()) == ["r"]
    leases.release("r", "d/1", 2)
    assert (leases.pop_ended(), len(leases)) == ({}, 0)


def test_releases_before_the_grant_are_counted(leases: Leases) -> None:
    leases.release("r", "d/0", 2)
    with pytest.raises(NotReadyError), leases.use("r"):
        pass
    leases.grant("r", [3], 7, 10)
    assert leases.pop_ended() == {}
    leases.release("r", "d/1", 2)
    assert list(leases.pop_ended()) == ["r"]
    leases.release("s", "d/0", 1)
    leases.grant("s", [3], 7, 10)
    assert list(leases.pop_ended()) == ["s"]


def test_request_id_can_be_reused(leases: Leases) -> None:
    for _ in range(2):
        leases.grant("r", [3], 7, 10)
        with leases.use("r"):
            pass
        leases.release("r", "d/0", 1)
        assert list(leases.pop_ended()) == ["r"]


def test_no_tokens_are_ready_while_blocks_are_written(leases: Leases) -> None:
    written: Callable[[], bool] = iter([False, True]).__next__
    leases.grant("r", [3], 7, 10, written)
    with leases.use("r") as lease:
        assert [lease.ready_tokens(["a layer"]), lease.ready_tokens(["a layer"])] == [0, 7]


def test_ready_tokens_is_the_minimum_over_layers() -> None:
    progress, done = PrefillProgress(), {"a": False, "b": False}
    assert progress.ready_tokens(["a", "b"]) == 0
    progress.record("a", 4, lambda: True)
    assert (progress.ready_tokens(["a"]), progress.ready_tokens(["a", "b"])) == (4, 0)
    progress.record("b", 4, lambda: True)
    progress.record("b", 9, lambda: done["b"])
    progress.record("a", 9, lambda: done["a"])
    progress.record("a", 9, lambda: True)  # recorded before: ignored
    done["b"] = True
    assert (progress.ready_tokens(["b"]), progress.ready_tokens(["a", "b"])) == (9, 4)
    done["a"] = True
    assert progress.ready_tokens(["a", "b"]) == 9


def test_send_buffers_are_lent_for_limited_time(clock: Clock) -> None:
    first, second = torch.empty(1), torch.empty(1)
    buffers = SendBuffers([first, second], clock)
    (one, buffer), (_, other) = buffers.acquire("r", "d/0", 5), buffers.acquire("r", "d/1", 9)
    assert (buffer is first, other is second, buffers.acquire("s", "d/0", 5)) == (True, True, None)
    buffers.release("r", "d/1", [one])  # another reader's
    assert buffers.in_use == 2
    clock.now += 5
    assert buffers.in_use == 1
    three, buffer = buffers.acquire("r", "d/0", 5)
    assert buffer is first
    buffers.release("r", "d/0", [one])  # expired, although the same reader has the buffer again
    assert (buffers.in_use, buffers.acquire("s", "d/0", 5)) == (2, None)
    buffers.release("r", "d/1")
    assert buffers.acquire("s", "d/0", 5)[1] is second
    buffers.release("r", "d/0", [three])
    assert buffers.in_use == 1
