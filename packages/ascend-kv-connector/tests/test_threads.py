# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""State that threads share, and threads that cannot be started."""

import threading
from collections.abc import Callable
from time import sleep
from typing import Any

import pytest
from ascend_kv_connector.p2p import worker
from ascend_kv_connector.p2p.peers import MAX_STUCK_THREADS, PeerQueues
from ascend_kv_connector.p2p.producer.leases import PrefillProgress
from ascend_kv_connector.p2p.transfers import Done, Transfer
from ascend_kv_connector.p2p.worker import P2PWorker
from ascend_platform import extension
from ascend_transfer.errors import TransferError
from harness.kv.prompts import Prompt, wait_for


def test_two_readers_of_a_layer_see_computed_tokens_only() -> None:
    progress, entered, go = PrefillProgress(), threading.Event(), threading.Event()
    counts: list[int] = []

    def first_chunk() -> bool:
        if not entered.is_set():
            entered.set()
            go.wait(1.0)  # The other reader runs between the query and its effect, if it can.
        return True

    progress.record("l", 100, first_chunk)
    progress.record("l", 200, lambda: False)
    threads = [
        threading.Thread(target=lambda: counts.append(progress.ready_tokens(["l"])))
        for _ in range(2)
    ]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    threads[1].join(0.3)
    go.set()
    for thread in threads:
        thread.join(10)
    assert counts == [100, 100]


class Interrupted:
    """A lock; when the main thread has left it, ``act`` runs in another thread before its next
    line, once."""

    def __init__(self, lock: Any, act: Callable[[], Any]) -> None:
        self.lock, self.act = lock, [act]

    def __enter__(self) -> Any:
        return self.lock.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.lock.__exit__(*error)
        if self.act and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=self.act.pop())
            thread.start()
            thread.join()


def test_transfer_that_is_announced_while_it_starts_runs_once(instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d").consume()
    prompt, rank, blocks, begun = (
        Prompt(producer, "r", 40),
        consumer.consumers[0],
        consumer.take(40),
        [],
    )
    enqueue = rank._enqueue
    rank._enqueue = lambda work: (
        begun.append(work) if isinstance(work, Transfer) else None,
        enqueue(work),
    )
    rank._lock = Interrupted(rank._lock, lambda: rank.answer(prompt.announcement()))
    rank.start("r", None, blocks, 0, 40)
    prompt.compute(40)
    assert isinstance(consumer.wait()[0][0], Done)
    assert consumer.holds("r", blocks, 0, 40)
    assert len(begun) == 1


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_requests_fail_while_no_thread_can_be_started(instances: Callable) -> None:
    """The engine goes on, and so does the peer's queue afterwards."""
    producer, consumer = (
        instances("p", expose_cache=False).produce(),
        instances("d", expose_cache=False).consume(),
    )
    rank = consumer.consumers[0]
    with pytest.MonkeyPatch.context() as patch:
        refuse_threads(patch)
        rank.start("r", source := producer.fill("r", 8)[0], consumer.take(8), 0, 8)
        rank.release(source)
        ((outcome,),) = consumer.wait()
    assert (outcome.kind, outcome.cause) == ("internal", "can't start new thread")
    assert outcome.hint == "raise the limit of processes and threads (ulimit -u, pids.max)"
    assert rank.queues.thread_count == 0
    rank.start("s", producer.fill("s", 8)[0], blocks := consumer.take(8), 0, 8)
    assert isinstance(consumer.wait()[0][0], Done)
    with pytest.MonkeyPatch.context() as patch:  # The peer's thread exists, and those that unpack.
        refuse_threads(patch)
        rank.start("t", producer.fill("t", 8)[0], blocks := consumer.take(8), 0, 8)
        assert isinstance(consumer.wait()[0][0], Done)
    assert consumer.holds("t", blocks, 0, 8)


class Waiter:
    """A worker whose work is an event to wait for."""

    def run(self, work: threading.Event) -> None:
        work.wait(30)

    def close(self) -> None:
        pass


def test_stuck_threads_of_a_peer_do_not_count_against_others() -> None:
    queues, stuck = PeerQueues[threading.Event]("test", Waiter), threading.Event()
    works = [threading.Event() for _ in range(MAX_STUCK_THREADS + 1)]
    for work in works:
        work.wait = stuck.wait  # type: ignore[method-assign]
        queues.put("a", work, 1)
        assert wait_for(
            lambda work=work: any(thread.work is work for thread in queues._peers["a"].threads)
        )
        queues.abandon(work)
    assert (len(queues._stuck), len(queues._peers["a"].threads)) == (MAX_STUCK_THREADS, 1)
    other, after = threading.Event(), threading.Event()
    queues.put("b", other, 1)
    assert wait_for(lambda: any(thread.work is other for thread in queues._peers["b"].threads))
    queues.put("b", after, 1)
    queues.abandon(other)
    assert wait_for(lambda: any(thread.work is after for thread in queues._peers["b"].threads))
    for event in (stuck, other, after):
        event.set()
    assert queues.close(10.0)


def test_cache_that_is_being_read_is_not_put_to_sleep(
    instances: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "SUSPEND_SECONDS", 0.1)
    producer = instances("p").produce()
    producer.fill("r", 8)
    p2p_worker = P2PWorker.__new__(P2PWorker)
    p2p_worker._consumer, p2p_worker._producer, p2p_worker._progress = (
        None,
        producer.producers[0],
        {},
    )
    with p2p_worker._producer.leases.use("r", "d"):
        with pytest.raises(
            extension.RefusedError,
            match=r"is still being read after 0.1 s and cannot be put to sleep; fix: call /sleep again",
        ):
            p2p_worker.set_awake(False)
        with p2p_worker._producer.leases.use("r", "e"):
            pass
    p2p_worker.set_awake(False)
    with (
        pytest.raises(TransferError, match="went to sleep"),
        p2p_worker._producer.leases.use("r", "d"),
    ):
        sleep(0)
