# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Times of copies, launches and matrix products, by the device's events. Each is the best of
several repetitions."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from ascend_emulator.verify.lazy import torch, torch_npu
from ascend_emulator.verify.operators import rounded

Facts = dict[str, Any]
PROGRAMS: dict[str, Callable[[Facts], Facts]] = {}
# Seconds of one measurement; sizes grow until then, so that a slow device finishes soon.
ENOUGH = 0.02
REPEAT = 5
RUNS = 7
"""Of a median."""


def _add(name: str, function: Callable[[], Facts]) -> None:
    PROGRAMS[name] = lambda options: {"outcome": "observed", "facts": function()}


def _program(function: Callable[[], Facts]) -> Callable[[], Facts]:
    _add(function.__name__.replace("_", "-"), function)
    return function


def _elapsed(work: Callable[[], Any]) -> float:
    """Device time of one run in seconds."""
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _seconds(function: Callable[[], Any], repeat: int = REPEAT, always: bool = False) -> float:
    """Best device time of the function, after one run that is not counted. ``always``: repeat it
    however long it takes, because another rank repeats it too."""
    function()
    torch.npu.synchronize()
    best = float("inf")
    for _ in range(repeat):
        best = min(best, _elapsed(function))
        if best > 10 * ENOUGH and not always:
            break
    return max(best, 1e-9)


def median_seconds(work: Callable[[], Any]) -> float:
    """Median device time of several runs, after one that is not counted."""
    taken = [_elapsed(work) for _ in range(RUNS + 1)]
    return max(median(taken[1:]), 1e-9)


def _growing(sizes: list[int], measure: Callable[[int], tuple[float, float]], unit: str) -> Facts:
    """Rate of each size until a measurement takes long; ``best`` is the largest."""
    facts: Facts = {}
    for size in sizes:
        seconds, amount = measure(size)
        facts[str(size)] = rounded(amount / seconds)
        if seconds > ENOUGH:
            break
    return {"unit": unit, "by_size": facts, "best": max(facts.values())}


SIZES = [1 << 20, 1 << 24, 1 << 26, 1 << 28]


@_program
def copy_on_the_device() -> Facts:
    """Bytes read and written each second by a copy."""

    def measure(size: int) -> tuple[float, float]:
        x = torch.empty(size, dtype=torch.int8, device="npu")
        y = torch.empty_like(x)
        return _seconds(lambda: [y.copy_(x) for _ in range(8)]), 16.0 * size / 1e9

    return _growing(SIZES, measure, "GB per second, read and written")


def _host(to_device: bool) -> Facts:
    """Bandwidth of copies from or to pinned memory."""

    def measure(size: int) -> tuple[float, float]:
        host = torch.empty(size, dtype=torch.int8).pin_memory()
        device = torch.empty(size, dtype=torch.int8, device="npu")
        target, source = (device, host) if to_device else (host, device)
        return _seconds(lambda: target.copy_(source, non_blocking=True)), size / 1e9

    return _growing(SIZES, measure, "GB per second")


_add("copy-to-the-device", partial(_host, True))
_add("copy-to-the-host", partial(_host, False))


@_program
def launch() -> Facts:
    """Microseconds between small operators: on the device, on the host, and in a graph."""
    x, count = torch.ones(256).npu(), 500

    def work() -> None:
        for _ in range(count):
            x.add_(0.5)

    eager = _seconds(work)
    torch.npu.synchronize()
    started = time.perf_counter()
    work()
    host = time.perf_counter() - started
    torch.npu.synchronize()
    started = time.perf_counter()
    for _ in range(50):
        x.add_(0.5)
        torch.npu.synchronize()
    wait = (time.perf_counter() - started) / 50
    facts: Facts = {
        "unit": "microseconds",
        "eager": eager / count * 1e6,
        "host": host / count * 1e6,
        "with_synchronize": wait * 1e6,
    }
    if hasattr(torch.npu, "NPUGraph"):
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph):
            work()
        facts["graph"] = _seconds(graph.replay) / count * 1e6
    return {
        name: value if isinstance(value, str) else rounded(value) for name, value in facts.items()
    }


def _matmul(dtype_name: str) -> Facts:
    """Throughput of square matmuls; of float32 as torch_npu is configured by default."""
    dtype = getattr(torch, dtype_name)

    def measure(size: int) -> tuple[float, float]:
        x = torch.ones(size, size, device="npu").to(dtype)
        times = max(1, 4096 // size)
        return _seconds(lambda: [x @ x for _ in range(times)]), times * 2 * size**3 / 1e12

    return _growing([512, 1024, 2048, 4096, 8192], measure, "TFLOP per second")


for _name in ("float16", "bfloat16", "float32"):
    _add(f"matmul-{_name}", partial(_matmul, _name))


@_program
def matmul_int8() -> Facts:
    """Throughput of square matmuls of int8 with one scale per column."""

    def measure(size: int) -> tuple[float, float]:
        x = torch.ones(size, size, dtype=torch.int8).npu()
        scale = torch.ones(size).npu()
        times = max(1, 4096 // size)

        def work() -> Any:
            return [
                torch_npu.npu_quant_matmul(x, x, scale, output_dtype=torch.bfloat16)
                for _ in range(times)
            ]

        return _seconds(work), times * 2 * size**3 / 1e12

    return _growing([512, 1024, 2048, 4096, 8192], measure, "TOP per second")


@_program
def vector() -> Facts:
    """Throughput of a long chain of operations on data that fits the second-level cache."""

    def measure(size: int) -> tuple[float, float]:
        x = torch.ones(size, device="npu")
        return _seconds(lambda: [torch.erf(x) for _ in range(8)]), 8.0 * size / 1e9

    return _growing([1 << 18, 1 << 20, 1 << 22], measure, "billion erf in float32 per second")


@_program
def one_token_by_a_matrix() -> Facts:
    """A row times a matrix of 4096 x 4096 in float16, as in decoding: bound by memory."""
    x = torch.ones(1, 4096, device="npu").half()
    weights = [torch.ones(4096, 4096, device="npu").half() for _ in range(8)]
    seconds = _seconds(lambda: [x @ weight for weight in weights]) / 8
    return {
        "unit": "microseconds",
        "each": rounded(seconds * 1e6),
        "gb_per_second": rounded(4096 * 4096 * 2 / seconds / 1e9),
    }
