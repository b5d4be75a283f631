"""Programs of several ranks for test_hccl.py. torch is imported once; each rank of each scenario is a fork.

Run as a script with the names of scenarios; prints a line of JSON for each: its name and what each rank returned, or its error.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ascend_emulator.activation import set_environment

TIMEOUT = 60
SCENARIOS: dict[str, tuple[Callable[[int, int], Any], int, str, dict[str, str]]] = {}


def data(rank: int, shape: Any, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What this rank puts in, on the CPU: small numbers, so that products stay in range."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 4, shape, generator=generator).to(dtype)


def scenario(name: str, ranks: int = 2, soc: str = "Ascend910B1", **environ: str) -> Callable[..., Any]:
    """Register a function of (rank, ranks) that runs within an initialised process group, or with no group if `plain_c` is given.

    torch_npu's watchdog ends the process when a collective failed, unless told not to: then the error is that of the call.
    """
    environ = {"TORCH_HCCL_ASYNC_ERROR_HANDLING": "0"} | environ

    def register(function: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        SCENARIOS[name] = (function, ranks, soc, environ)
        return function

    return register


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu().double().tolist() if value.is_floating_point() else value.cpu().tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def failure(function: Callable[[], Any]) -> str:
    """The error that it ends with, its first lines. A stream that failed stays so: the process ends after this."""
    try:
        function()
        torch.npu.synchronize()
    except Exception as error:
        os.environ["SCENARIO_FAILED"] = "1"
        return str(error)[:3000]
    return "no error"


REDUCED = [
    (dtype, op)
    for dtype in ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "bool", "uint8")
    for op in ("SUM", "PRODUCT", "MAX", "MIN", "AVG")
    if not (op == "PRODUCT" and dtype in ("int16", "bfloat16"))
    and not (op == "AVG" and dtype not in ("float16", "bfloat16", "float32"))
    and not (dtype == "bool" and op in ("PRODUCT", "MIN"))
]
MOVED = ("int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
SIZES = (7, 70001)


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


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
    """Every collective that moves data, and those that reduce into parts, with one dtype after the other."""
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
        # rank r sends r + p + 1 rows to rank p
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
    """Reductions to one rank and into parts; uneven ones use the calls with counts, which torch_npu asks of this chip."""
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
    """Repeated sums of 64 MiB; what must be the same everywhere is a digest of the bits."""
    import hashlib

    x = data(rank, (16 << 20,), torch.float32).npu()
    seen = set()
    for _ in range(3):
        y = x.clone()
        dist.all_reduce(y)
        seen.add(hashlib.sha256(y.cpu().numpy().tobytes()).hexdigest())
    return sorted(seen)


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
    """A ring by isend and irecv, a batch, blocking calls, and messages that come before they are asked for."""
    following, previous = (rank + 1) % ranks, (rank - 1) % ranks
    out = []
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
    """What is computed before a collective is in it, what comes after sees its result."""
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
    return failure(lambda: dist.all_to_all_single(y, x[:3], [1, 2], [1, 2]) if rank else dist.all_to_all_single(x.clone(), x, [1, 3], [1, 3]))


def timed(function: Callable[[], Any]) -> list[Any]:
    started = time.monotonic()
    return [failure(function), time.monotonic() - started]


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
    """Nobody asks for the result: it is torch_npu's watchdog that sees the failure."""
    x = torch.ones(4, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(x)
    time.sleep(20)
    return "it lives"


@scenario("late", HCCL_EXEC_TIMEOUT="1")
def late(rank: int, ranks: int) -> Any:
    x = torch.ones(4, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    if rank == 1:
        time.sleep(3)
    return timed(lambda: dist.all_reduce(x))


def fault(variable: str) -> Callable[[int, int], Any]:
    """The second call of rank 0 has the fault."""

    def function(rank: int, ranks: int) -> Any:
        if rank == 0:
            os.environ[variable] = "2"
        x = torch.ones(4, device="npu")
        dist.all_reduce(x)
        torch.npu.synchronize()
        return [plain(x), *timed(lambda: dist.all_reduce(x))]

    return function


scenario("hang", HCCL_EXEC_TIMEOUT="1")(fault("ASCEND_EMULATOR_HCCL_HANG"))
scenario("drop", HCCL_EXEC_TIMEOUT="20")(fault("ASCEND_EMULATOR_HCCL_DROP"))


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


def library() -> ctypes.CDLL:
    return ctypes.CDLL("libhccl.so")


def message() -> str:
    """What aclGetRecentErrMsg says of the last call."""
    ask = ctypes.CDLL("libascendcl.so").aclGetRecentErrMsg
    ask.restype = ctypes.c_char_p
    return (ask() or b"").decode()


def counts(*values: int) -> Any:
    return (ctypes.c_uint64 * len(values))(*values)


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


FLOAT, SUM = 4, 0


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
        comm, stream = ctypes.c_void_p(comms[device]), ctypes.c_void_p(torch.npu.current_stream().npu_stream)
        x = torch.arange(4.0, device="npu") + device
        y, z = torch.empty(4, device="npu"), torch.empty(2, device="npu")
        gathered, exchanged = torch.empty(3, device="npu"), torch.empty(3, device="npu")
        torch.npu.synchronize()
        mine = [(1, 0), (2, 1)][device]  # of three, rank 0 has one and rank 1 two
        calls = [
            hccl.HcclAllReduce(address(x), address(y), counts_of(4), FLOAT, SUM, comm, stream),
            hccl.HcclReduceScatter(address(x), address(z), counts_of(2), FLOAT, SUM, comm, stream),
            hccl.HcclBarrier(comm, stream),
            hccl.HcclAllGatherV(address(x), counts_of(mine[0]), address(gathered), counts(1, 2), counts(0, 1), FLOAT, comm, stream),
            # Rank i sends [[1, 2], [2, 1]][i][j] elements to rank j.
            hccl.HcclAlltoAllVC(address(x), counts(1, 2, 2, 1), FLOAT, address(exchanged), FLOAT, comm, stream),
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
        out["results"][device] = [calls, plain([y, gathered, exchanged, z]), size.value, rank_id.value, name.value.decode()]

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
    for wrong in (
        lambda: hccl.HcclAllReduce(address(x), address(x), counts_of(4), 99, SUM, comm, stream),
        lambda: hccl.HcclAllReduce(address(x), address(x), counts_of(4), FLOAT, 7, comm, stream),
        lambda: hccl.HcclAllReduce(address(x), address(x), counts_of(2), 10, SUM, comm, stream),
        lambda: hccl.HcclAllReduce(address(host), address(x), counts_of(4), FLOAT, SUM, comm, stream),
        lambda: hccl.HcclAllReduce(None, address(x), counts_of(4), FLOAT, SUM, comm, stream),
        lambda: hccl.HcclBroadcast(address(x), counts_of(1 << 40), FLOAT, 0, comm, stream),
        lambda: hccl.HcclBroadcast(address(x), counts_of(4), FLOAT, 2, comm, stream),
        lambda: hccl.HcclSend(address(x), counts_of(1), 15, 1, comm, stream),
        lambda: hccl.HcclAlltoAll(address(x), counts_of(1), FLOAT, address(x), counts_of(1), FLOAT, comm, stream),
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


@scenario("rank table", ranks=2, plain_c="1")
def rank_table(rank: int, ranks: int) -> Any:
    """Communicators from a file that describes the cluster, and one of a communicator's ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] if rank == 0 else 0
    directory = Path(os.environ["SCENARIO_DIRECTORY"])
    if rank == 0:
        devices = [{"device_id": str(i), "device_ip": f"192.0.2.{i}", "rank_id": str(i)} for i in range(ranks)]
        table = {"status": "completed", "version": "1.0", "server_count": "1", "server_list": [{"server_id": "node", "device": devices}]}
        (directory / "table").write_text(json.dumps(table))
        (directory / "port").write_text(str(port))
        os.rename(directory / "port", directory / "ready")
    while not (directory / "ready").exists():
        time.sleep(0.01)
    os.environ["HCCL_IF_BASE_PORT"] = (directory / "ready").read_text()
    hccl, comm, sub = library(), ctypes.c_void_p(), ctypes.c_void_p()
    x = torch.full((4,), float(rank + 1), device="npu")
    torch.npu.synchronize()
    status = [hccl.HcclCommInitClusterInfo(str(directory / "table").encode(), rank, ctypes.byref(comm)), message()]
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    status.append(hccl.HcclAllReduce(address(x), address(x), ctypes.c_uint64(4), FLOAT, SUM, comm, stream))
    config = ctypes.create_string_buffer(4096)  # as HcclCommConfigInit leaves it: the size first, the name after two numbers
    ctypes.memmove(config, ctypes.byref(ctypes.c_uint64(160)), 8)
    ctypes.memmove(ctypes.byref(config, 32), b"part", 4)
    members, name = (ctypes.c_uint32 * 1)(1), ctypes.create_string_buffer(128)
    one, none = ctypes.c_uint64(1), ctypes.c_uint64(0xFFFFFFFF)
    if rank == 1:
        status.append(hccl.HcclCreateSubCommConfig(ctypes.byref(comm), 1, members, one, 0, config, ctypes.byref(sub)))
        hccl.HcclGetCommName(sub, name)
    else:
        status.append(hccl.HcclCreateSubCommConfig(ctypes.byref(comm), 0, None, none, 0, config, ctypes.byref(sub)))
    torch.npu.synchronize()
    (directory / "wrong").write_text('{"status": "completed", "server_list": [')
    wrong = hccl.HcclCommInitClusterInfo(str(directory / "wrong").encode(), rank, ctypes.byref(comm))
    return [status, plain(x), sub.value is None, name.value.decode(), wrong, message()]


@scenario("unsupported", ranks=1)
def unsupported(rank: int, ranks: int) -> Any:
    """What HCCL does not document, torch_npu or the emulator refuses by name."""
    return {
        "float64 sum": failure(lambda: dist.all_reduce(torch.ones(3, dtype=torch.float64, device="npu"))),
        "bfloat16 product": failure(lambda: dist.all_reduce(torch.ones(3, dtype=torch.bfloat16, device="npu"), op=dist.ReduceOp.PRODUCT)),
    }


def run_rank(function: Callable[[int, int], Any], rank: int, ranks: int, directory: str) -> Any:
    torch.npu.set_device(rank % torch.npu.device_count())
    if "plain_c" in os.environ:
        os.environ["SCENARIO_DIRECTORY"] = directory
        return function(rank, ranks)
    store = dist.FileStore(f"{directory}/store", ranks)
    dist.init_process_group("hccl", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT))
    result = function(rank, ranks)
    if "SCENARIO_FAILED" in os.environ:
        return result
    torch.npu.synchronize()
    dist.destroy_process_group()
    return result


def fork(function: Callable[[int, int], Any], rank: int, ranks: int, soc: str, environ: dict[str, str], directory: str) -> tuple[int, int]:
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    try:
        set_environment(os.environ, ranks, soc, 1 << 29)
        os.environ.update(environ)
        answer = run_rank(function, rank, ranks, directory)
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"[:3000]
    with os.fdopen(writer, "w") as pipe:
        pipe.write(json.dumps(answer))
    os._exit(0)


def play(name: str) -> list[Any]:
    """What each rank returned; a rank that does not answer in time is ended and is None."""
    function, ranks, soc, environ = SCENARIOS[name]
    with tempfile.TemporaryDirectory() as directory:
        children = [fork(function, rank, ranks, soc, environ, directory) for rank in range(ranks)]
        answers: list[Any] = []
        deadline = time.monotonic() + TIMEOUT
        for child, reader in children:
            text = b""
            while True:
                ready, _, _ = select.select([reader], [], [], max(deadline - time.monotonic(), 0))
                piece = os.read(reader, 1 << 16) if ready else b""
                if not piece:
                    break
                text += piece
            if not ready:
                os.kill(child, signal.SIGKILL)
            os.close(reader)
            os.waitpid(child, 0)
            answers.append(json.loads(text) if text else None)
        return answers


if __name__ == "__main__":
    for each in sys.argv[1:] or SCENARIOS:
        started = time.monotonic()
        print(json.dumps([each, play(each)]), flush=True)
        print(f"{each}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
