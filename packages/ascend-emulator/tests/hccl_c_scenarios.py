# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""HCCL's C interface, as programs other than torch_npu use it: for test_hccl.py."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from hccl_ranks import failure, plain, scenario, timed
from memory_calls import DEVICE, MIB, Physical, acl


def library() -> ctypes.CDLL:
    return ctypes.CDLL("libhccl.so")


def message() -> str:
    """aclGetRecentErrMsg's message for the last call."""
    ask = ctypes.CDLL("libascendcl.so").aclGetRecentErrMsg
    ask.restype = ctypes.c_char_p
    return (ask() or b"").decode()


def counts(*values: int) -> Any:
    return (ctypes.c_uint64 * len(values))(*values)


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


FLOAT, SUM = 4, 0


def mapped(size: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """The start of 16 MiB of addresses that have this much memory of NPU 0, and the memory's
    handle."""
    start, chunk = ctypes.c_void_p(), ctypes.c_void_p()
    bytes_ = ctypes.c_size_t(size)
    assert (
        acl.aclrtReserveMemAddress(ctypes.byref(start), ctypes.c_size_t(16 * MIB), 0, None, 1) == 0
    )
    assert (
        acl.aclrtMallocPhysical(
            ctypes.byref(chunk), bytes_, ctypes.byref(Physical(location=(0, DEVICE))), 0
        )
        == 0
    ), message()
    assert acl.aclrtMapMem(start, bytes_, 0, chunk, 0) == 0
    return start, chunk


@scenario("one process", ranks=2, plain_c="1")
def one_process(rank: int, ranks: int) -> Any:
    """HCCL's C interface: both ranks in this process, a thread and an NPU each."""
    if rank:
        return None
    hccl = library()
    for device in range(2):
        torch.ones(1, device=f"npu:{device}")
    comms = (ctypes.c_void_p * 2)()
    assert hccl.HcclCommInitAll(2, (ctypes.c_int32 * 2)(0, 1), comms) == 0, message()
    out: dict[str, Any] = {"results": [None, None], "errors": []}

    def work(device: int) -> None:
        torch.npu.set_device(device)
        comm, stream = (
            ctypes.c_void_p(comms[device]),
            ctypes.c_void_p(torch.npu.current_stream().npu_stream),
        )
        x = torch.arange(4.0, device="npu") + device
        y, z = torch.empty(4, device="npu"), torch.empty(2, device="npu")
        gathered, exchanged = torch.empty(3, device="npu"), torch.empty(3, device="npu")
        torch.npu.synchronize()
        mine = [(1, 0), (2, 1)][device]  # Of three, rank 0 has one and rank 1 two.
        calls = [
            hccl.HcclAllReduce(address(x), address(y), counts_of(4), FLOAT, SUM, comm, stream),
            hccl.HcclReduceScatter(address(x), address(z), counts_of(2), FLOAT, SUM, comm, stream),
            hccl.HcclBarrier(comm, stream),
            hccl.HcclAllGatherV(
                address(x),
                counts_of(mine[0]),
                address(gathered),
                counts(1, 2),
                counts(0, 1),
                FLOAT,
                comm,
                stream,
            ),
            # Rank i sends [[1, 2], [2, 1]][i][j] elements to rank j.
            hccl.HcclAlltoAllVC(
                address(x), counts(1, 2, 2, 1), FLOAT, address(exchanged), FLOAT, comm, stream
            ),
            hccl.HcclGroupStart(),
            hccl.HcclSend(address(x), counts_of(2), FLOAT, device, comm, stream),
            hccl.HcclRecv(ctypes.c_void_p(z.data_ptr()), counts_of(2), FLOAT, device, comm, stream),
            hccl.HcclGroupEnd(),
        ]
        torch.npu.synchronize()
        size, rank_id, name = ctypes.c_uint32(), ctypes.c_uint32(), ctypes.create_string_buffer(128)
        hccl.HcclGetRankSize(comm, ctypes.byref(size))
        hccl.HcclGetRankId(comm, ctypes.byref(rank_id))
        hccl.HcclGetCommName(comm, name)
        out["results"][device] = [
            calls,
            plain([y, gathered, exchanged, z]),
            size.value,
            rank_id.value,
            name.value.decode(),
        ]

    def counts_of(value: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(value)

    threads = [threading.Thread(target=work, args=(device,)) for device in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.npu.set_device(0)
    x, host = torch.ones(4, device="npu"), torch.ones(4)
    comm, stream = ctypes.c_void_p(comms[0]), ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    torch.npu.synchronize()
    window, missing = ctypes.c_void_p(), ctypes.c_void_p(77)
    size, range_size, (base, chunk) = ctypes.c_uint64(16), ctypes.c_size_t(4 * MIB), mapped(2 * MIB)
    inside, whole = ctypes.c_size_t(2 * MIB), ctypes.c_size_t(4 * MIB)
    zero, peers = ctypes.c_size_t(0), (ctypes.c_uint32 * 1)(1)
    out["windows"] = [
        hccl.HcclCommRegister(comm, address(x), ctypes.c_uint64(1 << 40), ctypes.byref(window), 0),
        hccl.HcclCommRegister(comm, address(x), size, ctypes.byref(window), 0),
        hccl.HcclCommExchangeMem(comm, window, peers, 1),
        hccl.HcclCommExchangeMem(comm, missing, peers, 1),
        hccl.HcclCommExchangeMem(comm, None, peers, 1),
        hccl.HcclCommExchangeMem(None, window, peers, 1),
        hccl.HcclCommDeregister(comm, window),
        hccl.HcclCommDeregister(comm, window),
        hccl.HcclCommSetMemoryRange(comm, base, range_size, zero, ctypes.c_uint64(1)),
        hccl.HcclCommActivateCommMemory(
            comm, address(x), range_size, zero, missing, ctypes.c_uint64(0)
        ),
        hccl.HcclCommActivateCommMemory(comm, base, whole, zero, chunk, ctypes.c_uint64(0)),
        hccl.HcclCommActivateCommMemory(comm, base, inside, zero, chunk, ctypes.c_uint64(0)),
        hccl.HcclCommActivateCommMemory(comm, base, inside, zero, chunk, ctypes.c_uint64(0)),
        hccl.HcclCommUnsetMemoryRange(comm, base),
        hccl.HcclCommDeactivateCommMemory(comm, base),
        hccl.HcclCommUnsetMemoryRange(comm, base),
    ]
    message()
    for wrong in (
        lambda: hccl.HcclAllReduce(address(x), address(x), counts_of(4), 99, SUM, comm, stream),
        lambda: hccl.HcclAllReduce(address(x), address(x), counts_of(4), FLOAT, 7, comm, stream),
        lambda: hccl.HcclAllReduce(address(x), address(x), counts_of(2), 10, SUM, comm, stream),
        lambda: hccl.HcclAllReduce(
            address(host), address(x), counts_of(4), FLOAT, SUM, comm, stream
        ),
        lambda: hccl.HcclAllReduce(None, address(x), counts_of(4), FLOAT, SUM, comm, stream),
        lambda: hccl.HcclBroadcast(address(x), counts_of(1 << 40), FLOAT, 0, comm, stream),
        lambda: hccl.HcclBroadcast(address(x), counts_of(4), FLOAT, 2, comm, stream),
        lambda: hccl.HcclSend(address(x), counts_of(1), 15, 1, comm, stream),
        lambda: hccl.HcclAlltoAll(
            address(x), counts_of(1), FLOAT, address(x), counts_of(1), FLOAT, comm, stream
        ),
        lambda: hccl.HcclGroupEnd(),
        lambda: hccl.HcclCommDestroy(comm),
        lambda: hccl.HcclCommDestroy(comm),
    ):
        out["errors"].append([wrong(), message()])
    # A communicator that is destroyed while an operation waits for a rank that never comes.
    assert hccl.HcclCommInitAll(2, (ctypes.c_int32 * 2)(0, 1), comms) == 0, message()
    comm = ctypes.c_void_p(comms[0])
    assert hccl.HcclAllReduce(address(x), address(x), counts_of(4), FLOAT, SUM, comm, stream) == 0
    out["destroyed"] = timed(lambda: hccl.HcclCommDestroy(comm))
    hccl.HcclGetErrorString.restype = ctypes.c_char_p
    out["texts"] = [hccl.HcclGetErrorString(code).decode() for code in (0, 9)]
    return out


class Item(ctypes.Structure):
    """HcclSendRecvItem."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("dtype", ctypes.c_int32),
        ("peer", ctypes.c_uint32),
    )


@scenario("by root", ranks=2, plain_c="1")
def by_root(rank: int, ranks: int) -> Any:
    """Communicators by a root's information, in one process; a batch; suspended and resumed."""
    if rank:
        return None
    hccl, root, out = library(), ctypes.create_string_buffer(4108), [None, None]
    torch.npu.set_device(0)
    torch.ones(1, device="npu")
    assert hccl.HcclGetRootInfo(root) == 0, message()
    resumed = threading.Barrier(2)

    def work(device: int) -> None:
        torch.npu.set_device(device)
        x, y = torch.full((3,), device + 1.0, device="npu"), torch.zeros(3, device="npu")
        torch.npu.synchronize()
        comm, stream = ctypes.c_void_p(), ctypes.c_void_p(torch.npu.current_stream().npu_stream)
        calls = [hccl.HcclCommInitRootInfo(2, root, device, ctypes.byref(comm))]
        batch = (Item * 2)(
            Item(0, x.data_ptr(), 3, FLOAT, 1 - device), Item(1, y.data_ptr(), 3, FLOAT, 1 - device)
        )
        calls.append(hccl.HcclBatchSendRecv(batch, 2, comm, stream))
        torch.npu.synchronize()
        calls.append(hccl.HcclCommWorkingDevNicSet(comm, None, None, 0))
        resumed.wait()
        calls.append(hccl.HcclCommSuspend(comm))
        resumed.wait()
        calls.append(hccl.HcclCommResume(comm))
        calls.append(
            hccl.HcclAllReduce(address(x), address(x), ctypes.c_uint64(3), FLOAT, SUM, comm, stream)
        )
        torch.npu.synchronize()
        out[device] = [calls, plain(y), plain(x)]

    threads = [threading.Thread(target=work, args=(device,)) for device in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def all_reduce(x: torch.Tensor, comm: ctypes.c_void_p, stream: Any) -> int:
    count, handle = ctypes.c_uint64(x.numel()), ctypes.c_void_p(stream.npu_stream)
    return int(library().HcclAllReduce(address(x), address(x), count, FLOAT, SUM, comm, handle))


def on_threads(number: int, work: Callable[[int, ctypes.c_void_p], Any]) -> list[Any]:
    """Run work(rank, communicator) in a thread for each NPU, with a communicator of all of them."""
    for device in range(number):
        torch.ones(1, device=f"npu:{device}")
    comms, out = (ctypes.c_void_p * number)(), [None] * number
    assert (
        library().HcclCommInitAll(number, (ctypes.c_int32 * number)(*range(number)), comms) == 0
    ), message()

    def run(rank: int) -> None:
        torch.npu.set_device(rank)
        out[rank] = work(rank, ctypes.c_void_p(comms[rank]))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def late(stream: Any) -> None:
    """Give the stream work that takes some seconds."""
    x = torch.ones(1000, 1000, device="npu")
    with torch.npu.stream(stream):
        for _ in range(100):
            x = x @ x / 1000
    torch.npu.current_stream().synchronize()


@scenario("order by events", ranks=2, plain_c="1")
def order_by_events(rank: int, ranks: int) -> Any:
    """Two streams whose calls are ordered by an event, though another of them is late on
    each rank."""
    if rank:
        return None

    def work(rank: int, comm: ctypes.c_void_p) -> Any:
        first, second, event = torch.npu.Stream(), torch.npu.Stream(), torch.npu.Event()
        sums = [torch.full((4,), 10.0 * k + rank, device="npu") for k in range(3)]
        torch.npu.synchronize()
        late(second if rank else first)
        calls = [all_reduce(sums[1], comm, second)]
        event.record(second)
        first.wait_event(event)
        calls += [all_reduce(sums[0], comm, first), all_reduce(sums[2], comm, first)]
        torch.npu.synchronize()
        return [calls, [each[0].item() for each in sums]]

    return on_threads(2, work)


@scenario("crossed sends", ranks=2, plain_c="1")
def crossed_sends(rank: int, ranks: int) -> Any:
    """Rank 0 sends twice on two streams, of which the first is late; rank 1 receives in turn,
    because its second is late."""
    if rank:
        return None

    def work(rank: int, comm: ctypes.c_void_p) -> Any:
        streams = torch.npu.Stream(), torch.npu.Stream()
        values = [torch.full((4,), k + 1.0 - 2 * rank, device="npu") for k in range(2)]
        torch.npu.synchronize()
        late(streams[rank])
        call = library().HcclRecv if rank else library().HcclSend
        for each, stream in zip(values, streams, strict=True):
            count, peer, handle = (
                ctypes.c_uint64(4),
                ctypes.c_uint32(1 - rank),
                ctypes.c_void_p(stream.npu_stream),
            )
            assert call(address(each), count, FLOAT, peer, comm, handle) == 0
        return failure(torch.npu.synchronize)

    return on_threads(2, work)


@scenario("past a mapping", ranks=1, plain_c="1", PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")
def past_a_mapping(rank: int, ranks: int) -> Any:
    def work(rank: int, comm: ctypes.c_void_p) -> Any:
        x = torch.ones(4, device="npu")
        stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
        return [
            library().HcclBroadcast(address(x), ctypes.c_uint64(1 << 26), FLOAT, 0, comm, stream),
            message(),
        ]

    return on_threads(1, work)


@scenario("one NPU twice", ranks=2, plain_c="1")
def one_npu_twice(rank: int, ranks: int) -> Any:
    if rank:
        return None
    comms = (ctypes.c_void_p * 2)()
    return [library().HcclCommInitAll(2, (ctypes.c_int32 * 2)(1, 1), comms), message()]


@scenario("parents", ranks=2, plain_c="1", HCCL_CONNECT_TIMEOUT="5")
def parents(rank: int, ranks: int) -> Any:
    """A communicator may have the address that a destroyed one had, on one rank and not on the
    other."""
    if rank:
        return None
    hccl, roots = library(), [ctypes.create_string_buffer(4108) for _ in range(2)]
    torch.ones(1, device="npu")
    for root in roots:
        assert hccl.HcclGetRootInfo(root) == 0, message()
    config = ctypes.create_string_buffer(4096)
    ctypes.memmove(config, ctypes.byref(ctypes.c_uint64(160)), 8)
    ctypes.memmove(ctypes.byref(config, 24), ctypes.byref(ctypes.c_uint32(0xFFFFFFFF)), 4)
    ctypes.memmove(ctypes.byref(config, 32), b"part", 4)
    out: list[Any] = [[], []]

    def work(device: int) -> None:
        torch.npu.set_device(device)
        kept = []
        for root in roots:
            comm, sub, members = ctypes.c_void_p(), ctypes.c_void_p(), (ctypes.c_uint32 * 2)(0, 1)
            out[device].append(hccl.HcclCommInitRootInfo(2, root, device, ctypes.byref(comm)))
            one = ctypes.c_uint64(1)
            out[device].append(
                hccl.HcclCreateSubCommConfig(
                    ctypes.byref(comm), 2, members, one, device, config, ctypes.byref(sub)
                )
            )
            hccl.HcclCommDestroy(sub)
            if device:
                kept.append(comm)
            else:
                hccl.HcclCommDestroy(comm)

    threads = [threading.Thread(target=work, args=(device,)) for device in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [out, message()]
