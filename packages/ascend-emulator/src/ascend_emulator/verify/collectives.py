"""Collectives between two NPUs of this machine, in two processes: results, latency and bandwidth."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import partial
from typing import Any

Facts = dict[str, Any]
NAMES = ("two-npus",)
SECONDS = 180
SIZES = (1 << 12, 1 << 20, 1 << 24, 1 << 27)


def run(name: str, options: Facts) -> Facts:
    """Start both ranks and return what rank 0 found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "ascend_emulator.verify.collectives"],
            env={**environ, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        return {"outcome": "failed", "error": {"type": "timeout", "codes": [], "message": f"no result in {SECONDS} s"}}
    finally:
        for rank in ranks:
            rank.kill()
    lines = [line for line in outputs[0].splitlines() if line.startswith('{"facts"')]
    if not lines:
        codes = [rank.returncode for rank in ranks]
        return {"outcome": "failed", "error": {"type": "exit", "codes": [], "message": f"the ranks ended with {codes}"}}
    return {"outcome": "observed", **json.loads(lines[0])}


def _results(rank: int) -> Facts:
    """Hash of each collective's result for seeded inputs, and whether it is right."""
    import torch
    import torch.distributed as dist

    from ascend_emulator.verify import inputs

    facts: Facts = {}
    for kind in ("float32", "float16", "bfloat16", "int32"):
        whole = [inputs.make(f"{kind} 1000 -9..9", seed) for seed in range(2)]
        total, own = whole[0] + whole[1], whole[rank].npu()
        summed = own.clone()
        dist.all_reduce(summed)
        most = own.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        gathered = torch.empty(2000, dtype=own.dtype, device="npu")
        dist.all_gather_into_tensor(gathered, own)
        part = torch.empty(500, dtype=own.dtype, device="npu")
        dist.reduce_scatter_tensor(part, own)
        exchanged = torch.empty_like(own)
        dist.all_to_all_single(exchanged, own)
        sent = own.clone()
        dist.broadcast(sent, 1)
        torch.npu.synchronize()
        half = slice(rank * 500, rank * 500 + 500)
        for name, actual, wanted in (
            ("all_reduce", summed, total),
            ("all_reduce_max", most, torch.maximum(*whole)),
            ("all_gather", gathered, torch.cat(whole)),
            ("reduce_scatter", part, total[half]),
            ("all_to_all", exchanged, torch.cat([each[half] for each in whole])),
            ("broadcast", sent, whole[1]),
        ):
            facts[f"{name}-{kind}"] = {"hash": inputs.digest(actual), "right": torch.equal(actual.cpu(), wanted)}
    return facts


def _times() -> Facts:
    """Microseconds and bandwidth of all_reduce by bytes; of two ranks, each sends and receives its data once."""
    import torch
    import torch.distributed as dist

    from ascend_emulator.verify.timings import ENOUGH, _rounded, _seconds

    facts: Facts = {}
    for size in SIZES:
        x = torch.ones(size // 2, device="npu").half()
        seconds = torch.tensor([_seconds(partial(dist.all_reduce, x))]).npu()
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # both ranks end the loop at the same size
        slowest = seconds.item()
        facts[str(size)] = {"microseconds": _rounded(slowest * 1e6), "gb_per_second": _rounded(size / slowest / 1e9)}
        if slowest > ENOUGH:
            break
    return facts


def main() -> int:
    """One rank; rank 0 prints the facts as a line of JSON."""
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", rank=rank, world_size=2)
    facts: Facts = {"results": _results(rank), "all_reduce": _times()}
    dist.barrier()
    dist.destroy_process_group()
    if not rank:
        print(json.dumps({"facts": facts}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
