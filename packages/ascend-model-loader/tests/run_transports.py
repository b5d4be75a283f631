# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Program of test_transports.py on two NPUs: chunks over HCCL and Mooncake from a server in another
process.

    python run_transports.py

Prints `RESULT {json}`: the outcome of each case for each transport.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from ascend_model_loader import peer, wire
from ascend_model_loader.options import Options
from ascend_model_loader.report import Report
from ascend_platform import extension
from harness.weights.peers import IDENTITY, SECRET, Cut, Serving, as_bytes, room, weights

TRANSPORTS = ("hccl", "mooncake")
NPU = torch.device("npu", 0)
extension.offer("transfer_engine.hccl", "ascend_communicator.hccl_engine.HcclEngine")


def serve(pipe: Connection) -> None:
    """Server on the second NPU, controlled over a pipe: it changes a weight, or sends itself a
    signal after the first header of the third request once each transport has sent that, when the
    client has read the first request's chunks."""
    torch.npu.set_device(0)
    served = Serving(device="npu:0", transport=TRANSPORTS, timeout=5.0)
    pipe.send(served.server.port)
    send, together = wire.Channel.send, threading.Barrier(len(TRANSPORTS), timeout=20)

    def send_and_end(
        channel: wire.Channel, message: wire.Message, payload: memoryview | None = None
    ) -> None:
        send(channel, message, payload)
        if isinstance(message, wire.Chunk) and message.index == 8:
            if together.wait() == 0:
                os.kill(os.getpid(), number)
            time.sleep(0.5)

    while (command := pipe.recv()) is not None:
        until = time.monotonic() + 10
        while [each for each in threading.enumerate() if each.name == "weights"][
            1:
        ] and time.monotonic() < until:
            time.sleep(0.05)  # until the connections are closed
        torch.npu.synchronize()  # A lost client must not block the NPU.
        if isinstance(command, float):
            served.tensors["head.weight"][0] = command
            torch.npu.synchronize()
        else:
            number = command
            wire.Channel.send = send_and_end  # type: ignore[method-assign]
        pipe.send(True)


def take(
    port: int, into: dict[str, torch.Tensor], *transport: str, timeout: float = 5.0
) -> dict[str, Any]:
    begin, report = time.monotonic(), Report()
    torch.npu.set_device(0)
    given = Options(transport=transport, timeout=timeout, deadline=30, connections=1)
    try:
        peer.Fetch(into, IDENTITY, given, SECRET, NPU, report).from_peer(("127.0.0.1", port))
        error = ""
    except wire.PeerError as found:
        error = str(found)
    return {
        "error": error,
        "seconds": time.monotonic() - begin,
        "phases": [phase.name for phase in report.phases],
    }


def compared(into: dict[str, torch.Tensor]) -> dict[str, Any]:
    got, sent = (np.frombuffer(b"".join(as_bytes(each)), np.uint8) for each in (into, weights()))
    return {
        "right": bool(((got == sent) | (got == 0)).all()),
        "arrived": float((got[sent != 0] != 0).mean()),
    }


def tell(pipe: Connection, what: float | int) -> None:
    pipe.send(what)
    assert pipe.poll(30), "the server does not answer: its NPU is blocked"
    pipe.recv()


def main() -> None:
    pipe, theirs = multiprocessing.Pipe()
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "1"
    process = multiprocessing.get_context("spawn").Process(target=serve, args=[theirs], daemon=True)
    process.start()
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "0"
    try:
        print("RESULT", json.dumps(play(process, pipe)), flush=True)
    finally:
        process.kill()  # SIGKILL, as it may be stopped


def play(process: Any, pipe: Connection) -> dict[str, dict[str, Any]]:
    torch.npu.set_device(0)
    by_tcp = Serving(weights("npu:0"), device="npu:0").server.port
    assert pipe.poll(200)
    port = pipe.recv()
    first = float(weights()["head.weight"][0])
    results: dict[str, dict[str, Any]] = {name: {} for name in TRANSPORTS}
    for name, mine in results.items():
        into = room("npu:0")
        mine["whole"] = take(port, into, name) | compared(into)
        with Cut(port, 1500) as cut:  # after some chunks
            mine["the control ends"] = take(cut.port, room("npu:0"), name)
        mine["and again"] = take(port, room("npu:0"), name)
        tell(pipe, 0.5 if first != 0.5 else 0.25)
        mine["changed since"] = take(port, room("npu:0"), name)
        tell(pipe, first)
    for case, number in (("stopped", signal.SIGSTOP), ("killed", signal.SIGKILL)):
        tell(pipe, int(number))
        with ThreadPoolExecutor() as pool:
            rooms = {name: room("npu:0") for name in TRANSPORTS}
            under_way = {
                name: pool.submit(take, port, rooms[name], name, timeout=3) for name in TRANSPORTS
            }
        torch.npu.synchronize()  # A receive that never completes must not block this NPU.
        for name, mine in results.items():
            mine[case] = under_way[name].result() | compared(rooms[name])
        if number == signal.SIGSTOP:
            os.kill(process.pid, signal.SIGCONT)
    for name, mine in results.items():
        into = room("npu:0")
        mine["the next transport"] = take(by_tcp, into, name, "tcp") | compared(into)
    return results


if __name__ == "__main__":
    main()
