# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Streams, events, graphs and memory used by several threads, two of which capture at a time: for
the thread sanitizer.

ASCEND_EMULATOR_SANITIZE=thread OMP_NUM_THREADS=1 TASK_QUEUE_ENABLE=0 ascend-emulator run --npus 2
-- python threads.py
"""

import ctypes
import threading
import time

import torch
import torch_npu  # noqa: F401
from runtime_calls import begin, call, copy, end, fill, memory, new, replay, stream

ROUNDS = 8


def capture_and_replay(device):
    """Captures with a side stream, in a mode that another thread's capture does not disturb."""
    torch.npu.set_device(device)
    main, side, x = torch.npu.Stream(), torch.npu.Stream(), torch.ones(64, device="npu")
    for turn in range(ROUNDS):
        graph = torch.npu.NPUGraph()
        main.synchronize()
        # torch.npu.graph would synchronize all NPUs, which the other capture forbids.
        with torch.npu.stream(main):
            graph.capture_begin(capture_error_mode="thread_local")
            y = x * turn
            side.wait_stream(main)
            with torch.npu.stream(side):
                z = y + 1
            main.wait_stream(side)
            z = z * 2
            graph.capture_end()
            graph.replay()
            total = z.sum()
        main.synchronize()
        assert total.item() == 64 * 2 * (turn + 1)


def captured_by_two_threads(device):
    """One capture in mode relaxed that two threads feed, each on its own stream."""
    call("aclrtSetDevice", device)
    main, side = stream(), stream()
    fork, join = new("aclrtCreateEventWithFlag", 0), new("aclrtCreateEventWithFlag", 0)
    blocks = [memory() for _ in range(4)]

    def feed(on, at, to):
        call("aclrtSetDevice", device)
        for value in range(8):
            fill(at, value, on)
            copy(to, at, on)

    for _ in range(ROUNDS):
        begin(main)
        call("aclrtRecordEvent", fork, main)
        call("aclrtStreamWaitEvent", side, fork)
        feeders = [
            threading.Thread(target=feed, args=each)
            for each in ((main, *blocks[:2]), (side, *blocks[2:]))
        ]
        for feeder in feeders:
            feeder.start()
        for feeder in feeders:
            feeder.join()
        call("aclrtRecordEvent", join, side)
        call("aclrtStreamWaitEvent", main, join)
        graph = end(main)
        for _ in range(3):
            replay(graph, main)
        call("aclmdlRIDestroy", graph)
    for block in blocks:
        call("aclrtFree", block)


def events_between_streams(device):
    torch.npu.set_device(device)
    streams, x = [torch.npu.Stream() for _ in range(4)], torch.zeros(64, device="npu")
    torch.npu.current_stream().synchronize()
    events = [torch.npu.Event(enable_timing=True) for _ in streams]
    for turn in range(ROUNDS):
        for index, on in enumerate(streams):
            with torch.npu.stream(on):
                if turn or index:
                    events[index - 1].wait(on)
                x.add_(1)
                events[index].record(on)
        events[0].query()
    for on in streams:
        on.synchronize()
    assert x[0].item() == 4 * ROUNDS
    assert events[0].elapsed_time(events[3]) >= 0


def streams_that_end(device):
    """Streams are created, aborted and destroyed while they run."""
    call("aclrtSetDevice", device)
    for turn in range(ROUNDS):
        on, block = stream(), memory(1 << 20)
        for value in range(10):
            fill(block, value, on, 1 << 20)
        if turn % 3 == 0:
            call("aclrtSynchronizeStream", on)
        call("aclrtDestroyStreamForce" if turn % 2 else "aclrtDestroyStream", on)


def allocations(device):
    call("aclrtSetDevice", device)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    for size in range(ROUNDS * 10):
        block = memory(4096 * (size % 7 + 1))
        call("aclrtGetMemInfo", 1, ctypes.byref(free), ctypes.byref(total))
        call("aclrtFree", block)


def main():
    for device in (0, 1):
        torch.ones(1, device=f"npu:{device}")
        torch.npu.synchronize(device)
    failed = []

    def run(body, device):
        try:
            body(device)
        except BaseException as error:
            failed.append(f"{body.__name__}: {error}")

    bodies = (captured_by_two_threads, events_between_streams, streams_that_end, allocations)
    work = [(capture_and_replay, 1), *((body, 0) for body in bodies)]
    threads = [threading.Thread(target=run, args=each) for each in work]
    started = time.monotonic()
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed, failed
    print(f"{len(threads)} threads, {time.monotonic() - started:.0f} s")


main()
