# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Leases, send buffers and the queue for them with a simulated clock."""

from collections.abc import Callable

import pytest
import torch
from ascend_kv_connector.p2p.bounded import MAX_REMEMBERED, EarlyMessages
from ascend_kv_connector.p2p.producer.leases import (
    MAX_READERS,
    Leases,
    NotReadyError,
    PrefillProgress,
)
from ascend_kv_connector.p2p.producer.send_buffers import SendBuffers
from ascend_kv_connector.p2p.protocol import Ack, Fetch, Owner, Refused
from ascend_transfer.errors import TransferError
from ascend_transfer.query_queue import BusyError, QueryQueue, ReceivedQuery


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
    with (
        pytest.raises(TransferError, match="were freed: the lease of 10 s has expired"),
        leases.use("r", "d"),
    ):
        pass


def test_use_renews_the_lease_and_keeps_it(leases: Leases, clock: Clock) -> None:
    leases.grant("r", [3, 4], 7, 10)
    clock.now += 9
    with leases.use("r", "d") as lease:
        assert (lease.blocks, lease.tokens) == ([3, 4], 7)
        clock.now += 30
        assert leases.pop_ended() == {}
    assert list(leases.pop_ended()) == ["r"]


def test_waiting_reader_renews_the_lease(leases: Leases, clock: Clock) -> None:
    leases.grant("r", [3, 4], 7, 10)
    for _ in range(5):
        clock.now += 9
        leases.renew("r", "d")
        assert leases.pop_ended() == {}
    leases.finish("r", "e", 0, 1)  # another one
    assert leases.pop_ended() == {}
    leases.finish("r", "d", 0, 1)
    assert list(leases.pop_ended()) == ["r"]
    leases.renew("r", "d")
    assert len(leases) == 0


def test_suspended_leases_end_and_admit_no_reader(leases: Leases) -> None:
    leases.grant("r", [3, 4], 7, 10)
    leases.track("s", [5], 7, PrefillProgress())
    assert leases.suspend("asleep", 1.0)
    assert leases.pop_ended() == {"r": "asleep"}
    for name in ("r", "s", "t"):
        with pytest.raises(TransferError, match="asleep"), leases.use(name, "d"):
            pass
    leases.resume()
    leases.grant("t", [5], 7, 10)
    with leases.use("t", "d"):
        assert not leases.suspend("asleep", 0.01)  # it is being read


def test_aborted_request_is_not_kept(leases: Leases) -> None:
    leases.grant("r", [3, 4], 7, 10)
    leases.grant("s", [5], 7, 10)
    with leases.use("s", "d"):
        leases.end("s")
    leases.end("r")
    leases.end("unknown")
    assert leases.pop_ended() == {"r": "the router has aborted the request"}


def test_lease_ends_when_all_readers_released_it(leases: Leases) -> None:
    leases.grant("r", [3], 7, 10)
    leases.finish("r", "d", 0, 2)
    leases.finish("r", "d", 0, 2)
    assert leases.pop_ended() == {}
    leases.finish("r", "d", 1, 2)
    assert list(leases.pop_ended()) == ["r"]
    leases.finish("r", "d", 1, 2)
    assert (leases.pop_ended(), len(leases)) == ({}, 0)


def test_releases_before_the_grant_are_counted(leases: Leases) -> None:
    leases.finish("r", "d", 0, 2)
    with pytest.raises(NotReadyError), leases.use("r", "d"):
        pass
    leases.grant("r", [3], 7, 10)
    assert leases.pop_ended() == {}
    leases.finish("r", "d", 1, 2)
    assert list(leases.pop_ended()) == ["r"]
    leases.finish("s", "d", 0, 1)
    leases.grant("s", [3], 7, 10)
    assert list(leases.pop_ended()) == ["s"]


def test_request_id_can_be_reused(leases: Leases) -> None:
    for _ in range(2):
        leases.grant("r", [3], 7, 10)
        with leases.use("r", "d"):
            pass
        leases.finish("r", "d", 0, 1)
        assert list(leases.pop_ended()) == ["r"]


def test_no_tokens_are_ready_while_blocks_are_written(leases: Leases) -> None:
    written: Callable[[], bool] = iter([False, True]).__next__
    leases.grant("r", [3], 7, 10, written)
    with leases.use("r", "d") as lease:
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
    mine, other, third = Owner("r", "d", 0, "n"), Owner("r", "d", 1, "n"), Owner("s", "d", 0, "n")
    (one, buffer), (_, second_buffer) = buffers.acquire(mine, 5), buffers.acquire(other, 9)
    assert (buffer is first, second_buffer is second, buffers.acquire(third, 5)) == (
        True,
        True,
        None,
    )
    buffers.release(other, [one])  # another reader's
    assert buffers.in_use == 2
    clock.now += 5
    assert buffers.in_use == 1
    three, buffer = buffers.acquire(mine, 5)
    assert buffer is first
    buffers.release(mine, [one])  # Expired, although the same transfer has the buffer again.
    assert (buffers.in_use, buffers.acquire(third, 5)) == (2, None)
    buffers.release(other)
    assert buffers.acquire(third, 5)[1] is second
    buffers.release(mine, [three])
    assert buffers.in_use == 1


def test_a_transfer_cannot_return_its_siblings_buffers(clock: Clock) -> None:
    """With n > 1, or a repeated request, several requests of one engine read the same blocks."""
    buffers = SendBuffers([torch.empty(1) for _ in range(3)], clock)
    one, sibling, later = (
        Owner("r", "d", 0, "0_n"),
        Owner("r", "d", 0, "1_n"),
        Owner("s", "d", 0, "m"),
    )
    (ticket, _), _, _ = (buffers.acquire(each, 9) for each in (one, sibling, later))
    buffers.release(sibling, [ticket])
    assert buffers.in_use == 3
    buffers.release(one)
    assert buffers.in_use == 2
    buffers.release_request("r", "d", 0)
    assert buffers.in_use == 1


def test_lease_counts_the_readers_that_have_registered(leases: Leases, clock: Clock) -> None:
    leases.grant("r", [3], 7, 10)
    for reader in ("d", "e"):
        with leases.use("r", reader):
            pass
    leases.finish("r", "d", 0, 1)
    leases.finish("r", "d", 1, 2)  # it says 2 ranks now
    assert leases.pop_ended() == {}, "e still reads"
    leases.finish("r", "e", 0, 2)
    leases.finish("r", "e", 5, 2)  # no such rank
    assert leases.pop_ended() == {}
    leases.finish("r", "e", 1, 2)
    assert list(leases.pop_ended()) == ["r"]


def test_peers_cannot_fill_the_memory(leases: Leases) -> None:
    for number in range(MAX_READERS + 50):
        leases.finish("early", f"d{number}", 0, 2)
    assert len(leases._early_readers["early"]) == MAX_READERS
    for number in range(MAX_REMEMBERED + 50):
        leases.finish(f"r{number}", "d", 0, 2)
    assert len(leases._early_readers) == MAX_REMEMBERED


def test_invented_readers_do_not_shut_the_reader_out(leases: Leases, clock: Clock) -> None:
    leases.grant("r", [3], 7, 10)
    for number in range(2 * MAX_READERS):
        leases.renew("r", f"invented {number}")
        if number % 9 == 0:
            with leases.use("r", "d") as lease:
                assert lease.blocks == [3]
    assert len(lease.readers) == MAX_READERS
    leases.finish("r", "d", 0, 1)
    assert lease.readers["d"].has_finished
    assert leases.pop_ended() == {}, "other readers have not finished"
    clock.now += 11
    assert list(leases.pop_ended()) == ["r"]


def test_early_messages_are_kept_for_their_time(clock: Clock) -> None:
    early: EarlyMessages[int] = EarlyMessages(400, 20.0, clock)
    assert all(early.add(f"r{number}", number) for number in range(400))
    assert not early.add("one more", 1)
    assert early.add("r7", 8)  # again
    assert [early.pop("r7"), early.pop("r7"), early.pop("r399")] == [8, None, 399]
    assert early.add("one more", 1)
    clock.now += 21
    assert all(early.add(f"s{number}", number) for number in range(400))
    assert early.pop("r0") is None


def fetch(number: int) -> Fetch:
    return Fetch("r", "d", 0, f"n{number}", 0, 1, [0], 0, 1)


def test_queries_are_answered_in_their_order(clock: Clock) -> None:
    queue, free = QueryQueue(5.0, clock), 0
    replies: list[tuple[str, object]] = []

    def answer(query: Fetch) -> Ack:
        nonlocal free
        if not free:
            raise BusyError((query.transfer,), "all in use")
        free -= 1
        return Ack()

    def ask(number: int) -> None:
        queue.add(
            BusyError((f"n{number}",), "all in use"),
            ReceivedQuery(fetch(number), lambda reply: replies.append((f"n{number}", reply))),
        )

    for number in range(4):
        ask(number)
        clock.now += 1
    assert [queue.is_next((f"n{number}",)) for number in (0, 1, 7)] == [True, False, False]
    queue.serve(answer)
    assert replies == []
    free = 1
    queue.serve(answer)
    assert replies.pop() == ("n0", Ack())
    clock.now += 2.5  # 6.5 s after the first: the second query has waited for 5.5 s.
    queue.serve(answer)
    busy = Refused("deadline", "all in use", again=True, queued=True)
    assert replies.pop() == ("n1", busy)
    assert replies == []
    queue.remove(lambda place: place == ("n2",))  # its transfer has ended
    ask(1)  # repeated, and still before the others
    free = 2
    queue.serve(answer)
    assert replies == [("n1", Ack()), ("n3", Ack())]
    assert len(queue) == 0
    ask(5)
    clock.now += 6
    queue.serve(answer)
    clock.now += 6
    queue.serve(answer)  # its sender has not repeated it
    assert len(queue) == 0
