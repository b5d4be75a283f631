# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Programs of torch.distributed for test_hccl.py.

Run as a script with the names of scenarios; prints a line of JSON for each: its name and what each
rank returned, or its error.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hccl_c_scenarios  # noqa: F401
import hccl_strangers  # noqa: F401
import hccl_table_scenarios  # noqa: F401
import torch
import torch.distributed as dist
import torch_npu
from ascend_emulator import faults
from hccl_ranks import SCENARIOS, data, failure, plain, play, scenario, timed, torch_dtype

REDUCED = [
    (dtype, op)
    for dtype in (
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "bool",
        "uint8",
    )
    for op in ("SUM", "PRODUCT", "MAX", "MIN", "AVG")
    if not (op == "PRODUCT" and dtype in ("int16", "bfloat16"))
    and not (op == "AVG" and dtype not in ("float16", "bfloat16", "float32", "int32"))
    and not (dtype == "bool" and op in ("PRODUCT", "MIN"))
]
MOVED = (
    "int8",
    "uint8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "bool",
)
SIZES = (7, 70001)


def all_reduce(rank: int, ranks: int) -> Any:
    out = {}
    for dtype, op in REDUCED:
        for size in SIZES if dtype in ("float32", "bfloat16", "int32") else SIZES[:1]:
            x = data(rank, (size,), torch_dtype(dtype)).npu()
            dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
            out[f"{dtype} {op} {size}"] = plain(x[:50]) + plain(x[-50:])
    return out


for _ranks in (2, 3):
    scenario(f"all_reduce {_ranks}", ranks=_ranks)(all_reduce)
scenario("all_reduce tcp", ASCEND_EMULATOR_HCCL_TRANSPORT="tcp", HCCL_IF_IP="127.0.0.1")(all_reduce)


def moves(rank: int, ranks: int) -> Any:
    """Every collective that moves data, and those that reduce into parts, with one dtype after the
    other."""
    out: dict[str, Any] = {}
    for name in MOVED:
        dtype = torch_dtype(name)
        x = data(rank, (4, 3), dtype).npu()
        many = data(rank, (2 * ranks, 3), dtype, salt=1).npu()
        gathered = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(gathered, x)
        flat = torch.empty(4 * ranks, 3, dtype=dtype, device="npu")
        dist.all_gather_into_tensor(flat, x)
        sent = x.clone()
        dist.broadcast(sent, src=ranks - 1)
        part = torch.empty(2, 3, dtype=dtype, device="npu")
        dist.scatter(part, list(many.chunk(ranks)) if rank == 1 else None, src=1)
        root = [torch.empty_like(x) for _ in range(ranks)] if rank == 0 else None
        dist.gather(x, root, dst=0)
        exchanged = torch.empty_like(many)
        dist.all_to_all_single(exchanged, many)
        # Rank r sends r + p + 1 rows to rank p.
        rows = [rank + p + 1 for p in range(ranks)]
        uneven = torch.empty(sum(rows), 3, dtype=dtype, device="npu")
        dist.all_to_all_single(uneven, data(rank, (sum(rows), 3), dtype, salt=2).npu(), rows, rows)
        listed = [torch.empty(rank + p + 1, 3, dtype=dtype, device="npu") for p in range(ranks)]
        dist.all_to_all(listed, list(data(rank, (sum(rows), 3), dtype, salt=2).npu().split(rows)))
        out[name] = plain([gathered, flat, sent, part, root, exchanged, uneven, listed])
    return out


scenario("moves 2", ranks=2)(moves)
scenario("moves 3", ranks=3)(moves)


def reductions(rank: int, ranks: int) -> Any:
    """Reductions to one rank and into parts; uneven ones use the calls with counts, which torch_npu
    asks of this chip."""
    out: dict[str, Any] = {}
    for name in ("float32", "bfloat16", "int32"):
        dtype = torch_dtype(name)
        x = data(rank, (6,), dtype).npu()
        dist.reduce(x, dst=1, op=dist.ReduceOp.SUM)
        many = data(rank, (3 * ranks,), dtype, salt=1).npu()
        part = torch.empty(3, dtype=dtype, device="npu")
        dist.reduce_scatter_tensor(part, many, op=dist.ReduceOp.MAX)
        listed = torch.empty(3, dtype=dtype, device="npu")
        dist.reduce_scatter(listed, list(many.chunk(ranks)))
        rows = [2 * p + 1 for p in range(ranks)]
        uneven = torch.empty(rows[rank], dtype=dtype, device="npu")
        dist.reduce_scatter(uneven, list(data(rank, (sum(rows),), dtype, salt=2).npu().split(rows)))
        gathered = [torch.empty(n, dtype=dtype, device="npu") for n in rows]
        dist.all_gather(gathered, data(rank, (rows[rank],), dtype, salt=3).npu())
        out[name] = plain([x if rank == 1 else None, part, listed, uneven, gathered])
    return out


scenario("reductions 2", ranks=2, soc="Ascend910_93")(reductions)
scenario("reductions 3", ranks=3)(reductions)


@scenario("bits", ranks=2)
def bits(rank: int, ranks: int) -> Any:
    """A sum of 64 MiB, fifty times: how often its bits were those of the first, and a digest of
    them."""
    import hashlib

    x = data(rank, (16 << 20,), torch.float32).npu()
    y, first, same = torch.empty_like(x), None, 0
    for _ in range(50):
        y.copy_(x)
        dist.all_reduce(y)
        first = y.clone() if first is None else first
        same += torch.equal(y.view(torch.int32), first.view(torch.int32))
    expected = data(0, (16 << 20,), torch.float32) + data(1, (16 << 20,), torch.float32)
    return [
        same,
        torch.equal(first.cpu(), expected),
        hashlib.sha256(first.cpu().numpy().tobytes()).hexdigest(),
    ]


@scenario("bits 3", ranks=3)
def bits_of_three(rank: int, ranks: int) -> Any:
    """The same sum as parts of a large one and whole: float32 sums depend on the order."""
    x = data(rank, (40000,), torch.float32).npu()
    large = x.clone()
    dist.all_reduce(large)
    small = torch.cat([each.clone() for each in x.split(8000)])
    for part in small.split(8000):
        dist.all_reduce(part)
    return [torch.equal(large, small), plain(large[:20])]


@scenario("point to point", ranks=3)
def point_to_point(rank: int, ranks: int) -> Any:
    """A ring by isend and irecv, a batch, blocking calls, and messages that come before they are
    asked for."""
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    out: list[Any] = []
    batch_in = torch.empty(5, device="npu")
    batch_out = data(rank, (5,), torch.float32).npu()
    ops = [dist.P2POp(dist.isend, batch_out, following), dist.P2POp(dist.irecv, batch_in, previous)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    out.append(batch_in)
    large = torch.empty(300000, dtype=torch.int32, device="npu")
    ops = [
        dist.P2POp(dist.irecv, large, previous),
        dist.P2POp(dist.isend, data(rank, (300000,), torch.int32).npu(), following),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    out.append(large.sum())
    y = torch.empty(3, dtype=torch.bfloat16, device="npu")
    if rank == 0:
        dist.send(data(0, (3,), torch.bfloat16).npu(), dst=1)
        dist.recv(y, src=1)
    elif rank == 1:
        dist.recv(y, src=0)
        dist.send(y * 2, dst=0)
    out.append(y if rank < 2 else None)
    return plain(out)


@scenario("groups", ranks=4)
def groups(rank: int, ranks: int) -> Any:
    """Sub-groups, asynchronous work, coalesced calls, objects, barrier."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    out: list[Any] = []
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = torch.full((3,), float(rank + 1), device="npu")
    dist.all_reduce(x, group=halves[rank % 2])
    out.append(x)
    works = []
    tensors = [torch.full((1000,), float(rank + k), device="npu") for k in range(5)]
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.wait()
    out.append([t[0] for t in tensors])
    many = [torch.full((4,), float(rank * k), device="npu") for k in range(3)]
    with _coalescing_manager():
        for tensor in many:
            dist.all_reduce(tensor)
    out.append([t[0] for t in many])
    objects: list[Any] = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    out.append(objects)
    some: list[Any] = [["a", 1], {"b": 2}] if rank == 2 else [None, None]
    dist.broadcast_object_list(some, src=2)
    out.append(some)
    dist.barrier()
    return plain(out)


@scenario("order of streams")
def order_of_streams(rank: int, ranks: int) -> Any:
    """A collective includes earlier operators' results, and later ones see its result."""
    x = torch.zeros(1000, device="npu")
    for step in range(20):
        x += rank + step
        dist.all_reduce(x)
        x /= 2
    return plain(x[:2])


def disagree(theirs: Callable[[torch.Tensor], Any]) -> Callable[[int, int], Any]:
    """Rank 0 sums four numbers, rank 1 does something else."""

    def function(rank: int, ranks: int) -> Any:
        x = torch.ones(4, device="npu")
        dist.all_reduce(x)
        return failure(lambda: theirs(x) if rank else dist.all_reduce(x))

    return function


for _label, _theirs in {
    "call": lambda x: dist.broadcast(x, src=0),
    "count": lambda x: dist.all_reduce(x[:3]),
    "dtype": lambda x: dist.all_reduce(x.int()),
    "reduction": lambda x: dist.all_reduce(x, op=dist.ReduceOp.MAX),
    "kind": lambda x: dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 0)]),
}.items():
    scenario(f"other {_label}", HCCL_EXEC_TIMEOUT="20")(disagree(_theirs))


@scenario("other sizes", HCCL_EXEC_TIMEOUT="20")
def other_sizes(rank: int, ranks: int) -> Any:
    """Rank 1 expects fewer rows than rank 0 sends."""
    x, y = torch.ones(4, device="npu"), torch.empty(3, device="npu")
    return failure(
        lambda: (
            dist.all_to_all_single(y, x[:3], [1, 2], [1, 2])
            if rank
            else dist.all_to_all_single(x.clone(), x, [1, 3], [1, 3])
        )
    )


def dead(rank: int, ranks: int) -> Any:
    """Rank 1 is killed while the others wait for it."""
    x = torch.ones(1 << 20, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return timed(lambda: dist.all_reduce(x))


scenario("dead", ranks=3, HCCL_EXEC_TIMEOUT="50")(dead)


@scenario("dead watched", TORCH_HCCL_ASYNC_ERROR_HANDLING="1")
def dead_watched(rank: int, ranks: int) -> Any:
    """No code reads the result: torch_npu's watchdog detects the failure."""
    x = torch.ones(4, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    time.sleep(20)
    return "it lives"


@scenario("late", HCCL_EXEC_TIMEOUT="3")
def late(rank: int, ranks: int) -> Any:
    x = torch.ones(4, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    if rank == 1:
        time.sleep(8)
    return timed(lambda: dist.all_reduce(x))


def fault(kind: str) -> Callable[[int, int], Any]:
    """The second call of rank 0 has the fault."""

    def function(rank: int, ranks: int) -> Any:
        if rank == 0:
            faults.inject("HcclAllReduce", 2, kind)
        x = torch.ones(4, device="npu")
        dist.all_reduce(x)
        torch.npu.synchronize()
        return [plain(x), *timed(lambda: dist.all_reduce(x))]

    return function


scenario("timeout", HCCL_EXEC_TIMEOUT="3")(fault("timeout"))
scenario("drop", HCCL_EXEC_TIMEOUT="20")(fault("drop"))


@scenario("delay", ASCEND_EMULATOR_HCCL_DELAY="300")
def delay(rank: int, ranks: int) -> Any:
    x = torch.ones(4, device="npu")
    return timed(lambda: dist.all_reduce(x))


@scenario("absent", HCCL_CONNECT_TIMEOUT="1")
def absent(rank: int, ranks: int) -> Any:
    x = torch.ones(4, device="npu")
    if rank == 1:
        time.sleep(3)
        os._exit(0)
    return timed(lambda: dist.all_reduce(x))


@scenario("listens", ranks=2)
def listens(rank: int, ranks: int) -> Any:
    """TCP sockets that rank 0 listens on while it waits for rank 1, of ranks on one machine."""
    x = torch.ones(4, device="npu")
    if rank == 1:
        time.sleep(1.5)
    seen: list[int] = []

    def look() -> None:
        for _ in range(10):
            time.sleep(0.1)
            seen.append(listening())

    watch = threading.Thread(target=look)
    watch.start()
    dist.all_reduce(x)
    watch.join()
    return [max(seen), plain(x)]


def listening() -> int:
    """How many TCP sockets of this process listen."""
    sockets = {
        os.readlink(path)
        for path in Path("/proc/self/fd").iterdir()
        if path.exists() or path.is_symlink()
    }
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(line[3] == "0A" and f"socket:[{line[9]}]" in sockets for line in lines)


@scenario("buffers", HCCL_BUFFSIZE="100")
def buffers(rank: int, ranks: int) -> Any:
    """Memory of an NPU, in MiB, that communicators with two buffers of 100 MiB take; there is none
    for a third."""
    x, free = torch.ones(4, device="npu"), []
    groups = [dist.new_group() for _ in range(3)]
    for group in groups[:2]:
        free.append(torch.npu.mem_get_info()[0])
        dist.all_reduce(x, group=group)
        torch.npu.synchronize()
    free.append(torch.npu.mem_get_info()[0])
    mebibytes = [(before - after) >> 20 for before, after in itertools.pairwise(free)]
    return [mebibytes, failure(lambda: dist.all_reduce(x, group=groups[2]))]


@scenario("shared buffers", HCCL_BUFFSIZE="100")
def shared_buffers(rank: int, ranks: int) -> Any:
    """Memory of an NPU, in MiB, that two communicators with the same named buffer take, and what
    the first one's end returns."""
    x = torch.ones(4, device="npu")
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {"hccl_buffer_name": "one"}
    groups = [dist.new_group(pg_options=options) for _ in range(2)]
    free = [torch.npu.mem_get_info()[0]]
    for group in groups:
        dist.all_reduce(x, group=group)
        torch.npu.synchronize()
        free.append(torch.npu.mem_get_info()[0])
    for group in groups:
        dist.destroy_process_group(group)
        free.append(torch.npu.mem_get_info()[0])
    return [(before - after) >> 20 for before, after in itertools.pairwise(free)]


@scenario("host memory", HCCL_EXEC_TIMEOUT="30")
def host_memory(rank: int, ranks: int) -> Any:
    """Rank 0's process gets no more memory: the other rank is told."""
    x = torch.ones(64 << 20, device="npu")
    dist.all_reduce(x[:4])
    torch.npu.synchronize()
    if rank == 0:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), resource.RLIM_INFINITY))
    text = timed(lambda: dist.all_reduce(x))
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return text


@scenario("unsupported", ranks=1, TASK_QUEUE_ENABLE="0")
def unsupported(rank: int, ranks: int) -> Any:
    """torch_npu or the emulator refuses by name whatever HCCL does not document."""
    return {
        "float64 sum": failure(
            lambda: dist.all_reduce(torch.ones(3, dtype=torch.float64, device="npu"))
        ),
        "bfloat16 prod": failure(
            lambda: (
                dist.all_reduce(
                    torch.ones(3, dtype=torch.bfloat16, device="npu"), op=dist.ReduceOp.PRODUCT
                ),
                torch.npu.synchronize(),
            )
        ),
    }


if __name__ == "__main__":
    for each in sys.argv[1:] or SCENARIOS:
        started = time.monotonic()
        print(json.dumps([each, play(each)]), flush=True)
        print(f"{each}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
