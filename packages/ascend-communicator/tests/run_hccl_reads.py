# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Program of test_hccl_engine.py on two emulated NPUs, one per process: reads of a peer's registered
memory over HCCL.

Prints lines `RESULT {json}`.
"""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SIZE = 4 << 20


def peer(pipe: Connection) -> None:
    """Register a buffer of each of two engines, and fill them with the values received over the
    pipe. "idle": links are idle at once; "links": how many there are."""
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "1"
    transport, buffer = end()
    other, more = end()
    pipe.send((transport.session, buffer.data_ptr(), other.session, more.data_ptr()))
    while True:
        if (value := pipe.recv()) == "idle":
            from ascend_communicator import hccl_sender

            hccl_sender.IDLE_SECONDS = 0.0
            continue
        if value == "links":
            pipe.send(links(1))
            continue
        for each in (buffer, more):
            each.fill_(value)
            each[:1000] = 7
        import torch

        torch.npu.current_stream().synchronize()
        pipe.send("written")


def links(max_streams: int) -> int:
    """Number of links of this process's engines to readers, once it is ``most``, or after 10 s."""
    until = time.monotonic() + 10
    while True:
        count = sum(each.name == "transfer-hccl" for each in threading.enumerate())
        if count <= max_streams or time.monotonic() > until:
            return count
        time.sleep(0.05)


def run(remote: int, local: int, size: int) -> Any:
    from ascend_transfer.engine import Runs

    return Runs([remote], [local], [size])


def end(secret: bytes = b"") -> tuple[Any, Any]:
    import ascend_communicator
    import torch
    from ascend_communicator.hccl_engine import HcclEngine
    from ascend_transfer.auth import CurveKeys

    ascend_communicator.register()
    transport = HcclEngine("127.0.0.1", keys=CurveKeys(secret) if secret else None)
    buffer = torch.zeros(SIZE, dtype=torch.uint8, device="npu")
    torch.npu.synchronize()
    transport.register(buffer)
    return transport, buffer


class Deaf:
    """RPC client whose peer accepts a Send query, but whose NPU sends nothing."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def call(self, *arguments: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)


def fail() -> None:
    raise RuntimeError("the NPU has failed")


def failure(act: Callable[[], None]) -> dict[str, Any]:
    began = time.monotonic()
    try:
        act()
    except Exception as error:
        return {
            "kind": error.kind,
            "cause": str(error),
            "settled": error.settled(),
            "seconds": time.monotonic() - began,
        }
    return {"kind": "none", "seconds": time.monotonic() - began}


def main() -> None:
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "0"
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=peer, args=(theirs,), daemon=True)
    process.start()
    import torch
    from ascend_communicator import hccl_engine as hccl

    transport, buffer = end()
    stranger, _ = end(b"another secret of instances")
    assert pipe.poll(100)
    session, address, session_of_other, address_of_other = pipe.recv()
    here = buffer.data_ptr()

    def read(value: int, at: int = 0, size: int = SIZE) -> bool:
        """Read a range from the peer; whether its bytes arrived and those around it are
        unchanged."""
        pipe.send(value)
        pipe.recv()
        buffer.zero_()
        torch.npu.synchronize()
        transport.read(session, run(address + at, here + at, size), 20)
        expected = torch.full((SIZE,), value, dtype=torch.uint8)
        expected[:1000] = 7
        expected[:at] = expected[at + size :] = 0
        return torch.equal(buffer.cpu(), expected)

    def read_other(engine: Any, target: Any, session: str, address: int, value: int) -> bool:
        """Read the whole range by another link."""
        pipe.send(value)
        pipe.recv()
        engine.read(session, run(address, target.data_ptr(), SIZE), 20)
        return bool((target[1000:] == value).all()) and bool((target[:1000] == 7).all())

    def deafen() -> None:
        reader = transport._readers[session]
        reader.client = Deaf(reader.client)

    right = {"some": [read(1), read(2, 12345, 100_000), read(3, SIZE - 1, 1), read(4)]}
    hccl.IDLE_SECONDS = 0.0
    right["from another engine"] = [
        read_other(transport, buffer, session_of_other, address_of_other, 9)
    ]
    right["idle here"] = [list(transport._readers) == [session_of_other]]
    pipe.send("links")
    right["idle here"] += [pipe.recv() == 1, read(10)]
    hccl.IDLE_SECONDS = 300.0
    reader = transport._readers[session]
    pipe.send("idle")
    right["idle there"] = [read_other(*end(), session, address, 11)]
    pipe.send("links")
    right["idle there"] += [pipe.recv() == 1, read(12), transport._readers[session] is reader]
    results = {
        "not registered here": failure(
            lambda: transport.read(session, run(address, here + 1, SIZE), 5)
        )
    }
    results["not registered there"] = failure(
        lambda: transport.read(session, run(address + 1, here, SIZE), 5)
    )
    results["another secret"] = failure(
        lambda: transport.read(stranger.session, run(address, here, SIZE), 5)
    )
    right["after a refusal"] = [read(5)]
    deafen()
    results["nothing is sent"] = failure(
        lambda: transport.read(session, run(address, here, SIZE), 0.5)
    )
    torch.npu.synchronize()  # This must not block on the missing send.
    right["after nothing was sent"] = [read(6)]
    deafen()
    link = transport._readers[session].link
    destroy, link.destroy = link.destroy, fail
    results["link is not destroyed"] = failure(
        lambda: transport.read(session, run(address, here, SIZE), 0.5)
    )
    destroy()
    right["after a link was not destroyed"] = [read(8)]
    os.kill(process.pid, signal.SIGSTOP)
    # Until all of its threads have stopped, one of them can accept the Send query.
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    results["stopped"] = failure(lambda: transport.read(session, run(address, here, SIZE), 0.5))
    os.kill(process.pid, signal.SIGCONT)
    right["after it was stopped"] = [read(7)]
    print("RESULT", json.dumps({"name": "read", "right": right}))
    deafen()
    threading.Timer(0.3, process.kill).start()
    results["killed"] = failure(lambda: transport.read(session, run(address, here, SIZE), 10))
    process.join()
    results["gone"] = failure(lambda: transport.read(session, run(address, here, SIZE), 10))
    began = time.monotonic()
    torch.npu.synchronize()
    results["killed"]["sum"] = int(torch.arange(100, device="npu").sum())
    transport.close()
    results["killed"]["closed"] = time.monotonic() - began
    for name, result in results.items():
        print("RESULT", json.dumps({"name": name} | result))


if __name__ == "__main__":
    main()
