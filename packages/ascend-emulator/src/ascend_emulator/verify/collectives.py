# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Collectives between NPUs of this machine, a process each: results of two, and times by size and
ranks."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ascend_emulator.verify.lazy import dist, torch, torch_npu

Facts = dict[str, Any]
NAMES = ("two-npus",)
SECONDS = 180  # For both ranks, from their start; each imports torch_npu first.
SIZES = (1 << 12, 1 << 20, 1 << 24, 1 << 27)
BY_SIZE = "collectives-by-size"
"""A case of the section launches."""
RANK_SIZES = (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
CALLS = 8


def run(name: str, options: Facts) -> Facts:
    """Results and times of two ranks."""
    return _start(2, "two")


def by_size(options: Facts) -> Facts:
    """Times of two, four, … ranks, as many as there are NPUs."""
    rows: list[Any] = []
    most = 2 if options.get("short") else torch.npu.device_count()
    for count in (1 << power for power in range(1, most.bit_length())):
        record = _start(count, "short" if options.get("short") else "sizes")
        if "facts" not in record:
            return record
        rows += record["facts"]["collectives"]
    unit = "collective, ranks, bytes that a rank sends, microseconds (median)"
    return {"outcome": "observed", "facts": {"unit": unit, "collectives": rows}}


def _start(count: int, program: str) -> Facts:
    """Start the ranks and return what rank 0 found, or which rank failed and its last words."""
    from ascend_emulator.verify.errors import last_words

    with ExitStack() as stack:
        # A file of this user's: a TCPStore would listen at all addresses of the machine.
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()), "store")
        outputs, errors = (
            [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
            for _ in range(2)
        )
        ranks = []
        for rank in range(count):
            command = [sys.executable, "-m", "ascend_emulator.verify.collectives"]
            command += [str(rank), str(store), str(count), program]
            ranks.append(subprocess.Popen(command, stdout=outputs[rank], stderr=errors[rank]))
            stack.callback(ranks[rank].wait)
            stack.callback(ranks[rank].kill)
        codes = _exits(ranks)
        for stream in (*outputs, *errors):
            stream.seek(0)
        lines = [line for line in outputs[0] if line.startswith('{"facts"')]
        if lines and all(code == 0 for code in codes):
            return {"outcome": "observed", **json.loads(lines[0])}
        last = [last_words(stream.read()) for stream in errors]
    ends = [f"no result in {SECONDS} s" if code is None else f"exit {code}" for code in codes]
    message = "; ".join(
        f"rank {rank}: {end} {output}".strip()
        for rank, (end, output) in enumerate(zip(ends, last, strict=True))
    )
    kind = "timeout" if None in codes else "exit"
    return {
        "outcome": "failed",
        "error": {"type": kind, "codes": [], "message": message[:300]},
    }


def _exits(ranks: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """The ranks' exit statuses; None: none within the time."""
    deadline = time.monotonic() + SECONDS
    codes: list[int | None] = []
    for rank in ranks:
        try:
            codes.append(rank.wait(timeout=max(deadline - time.monotonic(), 0)))
        except subprocess.TimeoutExpired:
            codes.append(None)
    return codes


def _results(rank: int) -> Facts:
    """Results of each dtype, or the codes with which the NPU refuses it, as one without bfloat16
    does."""
    from ascend_emulator.verify.errors import described

    facts: Facts = {}
    for kind in ("float32", "float16", "bfloat16", "int32"):
        try:
            facts |= _results_of(kind, rank)
        except RuntimeError as error:
            if not (codes := described(error)["codes"]):
                raise
            facts[f"refused-{kind}"] = {"codes": codes}
    return facts


def _results_of(kind: str, rank: int) -> Facts:
    """Hash of each collective's result for seeded inputs, and whether it is right."""
    from ascend_emulator.verify import inputs

    facts: Facts = {}
    whole = [inputs.make(f"{kind} 1000 -9..9", seed) for seed in range(2)]
    total, local = whole[0] + whole[1], whole[rank].npu()
    summed = local.clone()
    dist.all_reduce(summed)
    most = local.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    gathered = torch.empty(2000, dtype=local.dtype, device="npu")
    dist.all_gather_into_tensor(gathered, local)
    part = torch.empty(500, dtype=local.dtype, device="npu")
    dist.reduce_scatter_tensor(part, local)
    exchanged = torch.empty_like(local)
    dist.all_to_all_single(exchanged, local)
    sent = local.clone()
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
        facts[f"{name}-{kind}"] = {
            "hash": inputs.digest(actual),
            "right": torch.equal(actual.cpu(), wanted),
        }
    return facts


def _times() -> Facts:
    """Microseconds and bandwidth of all_reduce by bytes; of two ranks, each sends and receives its
    data once."""
    from ascend_emulator.verify.operators import rounded
    from ascend_emulator.verify.timings import ENOUGH, _seconds

    facts: Facts = {}
    for size in SIZES:
        x = torch.ones(size // 2, device="npu").half()
        seconds = torch.tensor([_seconds(partial(dist.all_reduce, x), always=True)]).npu()
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)  # Both ranks end the loop at the same size.
        slowest = seconds.item()
        facts[str(size)] = {
            "microseconds": rounded(slowest * 1e6),
            "gb_per_second": rounded(size / slowest / 1e9),
        }
        if slowest > ENOUGH:
            break
    return facts


def _repeat(work: Callable[[], Any]) -> None:
    for _ in range(CALLS):
        work()


def _by_size(sizes: tuple[int, ...]) -> Facts:
    """Times of collectives by the bytes of a rank's tensor; each of the slowest rank."""
    from ascend_emulator.verify.operators import rounded
    from ascend_emulator.verify.timings import ENOUGH, median_seconds

    rows: list[Any] = []
    ranks = dist.get_world_size()
    for size in sizes:
        x = torch.ones(size // 2, device="npu").half()
        whole = torch.empty(ranks * size // 2, device="npu").half()
        slow = False
        for name, sent, work in (
            ("all_reduce", 2 * (ranks - 1) / ranks, partial(dist.all_reduce, x)),
            ("all_gather", ranks - 1, partial(dist.all_gather_into_tensor, whole, x)),
            ("reduce_scatter", ranks - 1, partial(dist.reduce_scatter_tensor, x, whole)),
            (
                "all_to_all",
                (ranks - 1) / ranks,
                partial(dist.all_to_all_single, whole[: size // 2], x),
            ),
        ):
            mean = median_seconds(partial(_repeat, work)) / CALLS
            taken = torch.tensor([mean]).npu()
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            rows.append([name, ranks, sent * size, rounded(taken.item() * 1e6)])
            slow |= taken.item() > ENOUGH
        if slow:  # For all ranks alike.
            break
    return {"collectives": rows}


def main() -> int:
    """One rank; rank 0 prints the facts as a line of JSON."""
    torch_npu.npu.set_compile_mode(jit_compile=False)
    rank, store, count, program = int(sys.argv[1]), *sys.argv[2:]
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{store}", rank=rank, world_size=int(count))
    if program == "two":
        facts: Facts = {"results": _results(rank), "all_reduce": _times()}
    else:
        facts = _by_size(RANK_SIZES[:2] if program == "short" else RANK_SIZES)
    dist.barrier()
    dist.destroy_process_group()
    if not rank:
        print(json.dumps({"facts": facts}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
