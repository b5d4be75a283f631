# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Replies of several ranks after a call that failed or timed out: each call's own with the patch,
an earlier one's in vLLM."""

import pytest
from harness.engines import scripts

NAME = "multiproc_executor.collective_rpc"
# vLLM's executor and the loops of two of its workers, on threads, connected by vLLM's queues.
SCRIPT = """
import collections, os, threading
from ascend_patches import enter
enter("engine")
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

late = threading.Event()

class Worker:
    def __init__(self, rank):
        self.rank = rank
    def echo(self, value):
        return value
    def fail_on(self, ranks):
        if self.rank in ranks:
            raise ValueError(f"refused by {self.rank}")
        return "done"
    def wait_on(self, rank):
        if self.rank == rank:
            late.wait(60)
        return "late"

def join(writer):
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    waiting = threading.Thread(target=writer.wait_until_ready)
    waiting.start()
    reader.wait_until_ready()
    waiting.join()
    return reader

executor = object.__new__(MultiprocExecutor)
executor.is_failed, executor.futures_queue, executor.response_mqs = False, collections.deque(), []
executor.rpc_broadcast_mq = MessageQueue(2, 2)
for rank in (0, 1):
    process = object.__new__(WorkerProc)
    process.rank, process.worker, process.use_async_scheduling = rank, Worker(rank), False
    process.rpc_broadcast_mq = MessageQueue.create_from_handle(executor.rpc_broadcast_mq.export_handle(), rank)
    process.worker_response_mq = MessageQueue(1, 1)
    def serve(process=process):
        process.rpc_broadcast_mq.wait_until_ready()
        process.worker_busy_loop()
    threading.Thread(target=serve, daemon=True).start()
    executor.response_mqs.append(join(process.worker_response_mq))
executor.rpc_broadcast_mq.wait_until_ready()

call = executor.collective_rpc

def ends(function):
    try:
        return function()
    except Exception as error:
        return type(error).__name__

def check(name, failed, *expected):
    ok = failed in expected
    for value in range(3):
        ok &= ends(lambda: call("echo", 60, (value,))) == [value, value]
        ok &= ends(lambda: call("echo", 60, (value,), unique_reply_rank=1)) == value
        ok &= ends(lambda: call("echo", 60, (value,), unique_reply_rank=0)) == value
    print(name, "right" if ok else "wrong", flush=True)

check("no failure", ends(lambda: call("echo", 60, (7,))), [7, 7])
check("all ranks", ends(lambda: call("fail_on", 60, ((0, 1),))), "RuntimeError")
check("the first", ends(lambda: call("fail_on", 60, ((0,),))), "RuntimeError")
check("the last", ends(lambda: call("fail_on", 60, ((1,),))), "RuntimeError")
check("one reply", ends(lambda: call("fail_on", 60, ((0, 1),), unique_reply_rank=1)), "RuntimeError")
class Second:
    def aggregate(self, outputs, output_rank):
        return outputs[output_rank]
futures = [call("fail_on", 60, ((0,),), None, True), call("echo", 60, (8,), None, True, 1, kv_output_aggregator=Second())]
check("futures", [ends(future.result) for future in futures], ["RuntimeError", 8])
check("not sent", ends(lambda: call("echo", 60, (threading.Lock(),))), "TypeError")
failed = ends(lambda: call("wait_on", 0.1, (0,)))
late.set()
check("timeout", failed, "TimeoutError")
os._exit(0)
"""


@pytest.mark.parametrize("disabled", ["", NAME], ids=["patched", "without"])
def test_replies_belong_to_their_calls(disabled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ASCEND_DISABLE_PATCHES", disabled)
    done = scripts.run(SCRIPT)
    cases = (
        "no failure",
        "all ranks",
        "the first",
        "the last",
        "one reply",
        "futures",
        "not sent",
        "timeout",
    )
    right = ("no failure",) if disabled else cases
    expected = [f"{case} {'right' if case in right else 'wrong'}" for case in cases]
    assert done.stdout.splitlines() == expected, done.stderr
