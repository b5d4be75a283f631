# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Times of the launches of a decoder's step, for ``vllm-ascend plan --report``: by law the bytes,
operations and rows of each. A time is the median of several runs by the device's events; a run is
the replay of a graph where the device has graphs, so that the host's time is not in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from ascend_emulator.verify import collectives
from ascend_emulator.verify.lazy import torch, torch_npu
from ascend_emulator.verify.operators import rounded
from ascend_emulator.verify.timings import ENOUGH, RUNS, median_seconds

Facts = dict[str, Any]
PROGRAMS: dict[str, Callable[[Facts], Facts]] = {}
UNIT = "law, bytes, operations, rows, microseconds (median)"
COLD = 512 << 20
"""Bytes that a run reads, more than the second-level cache keeps from the run before."""
LAYERS = 40


@dataclass(frozen=True)
class Launch:
    """A launch to time.

    Attributes:
        law: name of its law in ``ascend_cli/plan/laws.toml``.
        moved: bytes by that law.
        work: operations by that law.
        rows: rows by that law.
        inputs: inputs of one launch; a run has several of them.
        run: the launch.
    """

    law: str
    moved: float
    work: float
    rows: float
    inputs: Callable[[], Any]
    run: Callable[..., Any]


def _program(function: Callable[[bool], Iterator[Launch]]) -> Callable[[bool], Iterator[Launch]]:
    def program(options: Facts) -> Facts:
        return {"outcome": "observed", "facts": _timed(function(options.get("short", False)))}

    PROGRAMS[function.__name__.replace("_", "-")] = program
    return function


def captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """Replays a graph of the work, after a run without it; the work itself without graphs."""
    work()
    torch.npu.synchronize()
    if not hasattr(torch.npu, "NPUGraph"):
        return work
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        work()
    return graph.replay


def _each(run: Callable[..., Any], inputs: list[Any]) -> None:
    for one in inputs:
        run(*one)


def _timed(launches: Iterator[Launch]) -> Facts:
    """Times of launches that become larger, until one takes long."""
    rows = []
    for launch in launches:
        first, taken = launch.inputs(), []
        for _ in range(2):  # The first may load a kernel.
            started = time.perf_counter()
            launch.run(*first)
            torch.npu.synchronize()
            taken.append(time.perf_counter() - started)
        slow = min(taken) > 10 * ENOUGH
        count = 1 if slow else int(min(max(COLD // max(launch.moved, 1), 1), 16))
        inputs = [first, *(launch.inputs() for _ in range(count - 1))]
        run = captured(partial(_each, launch.run, inputs))
        each = rounded(median_seconds(run) / count * 1e6)
        rows.append([launch.law, launch.moved, launch.work, launch.rows, each])
        if slow and len(rows) > 1:
            break
    return {"unit": UNIT, "launches": rows}


def _dtype() -> Any:
    """16 bits that the chip has."""
    return torch.bfloat16 if torch.npu.is_bf16_supported() else torch.float16


def _random(*shape: int) -> Any:
    return torch.randn(shape, dtype=_dtype(), device="npu")


def _bytes(*shape: int) -> Any:
    return torch.randint(-9, 9, shape, dtype=torch.int8).npu()


ROWS = (1, 8, 16, 64, 256, 1024, 4096, 16384)
WEIGHTS = ((4096, 4096), (4096, 12288), (12288, 4096))
"""Depth and width."""


def _matrices(short: bool) -> Iterator[tuple[int, int, int]]:
    """Rows, depth and width of matmuls."""
    for rows in ROWS[:2] if short else ROWS:
        for depth, width in ((256, 256),) if short else WEIGHTS:
            yield rows, depth, width


@_program
def matmul_by_rows(short: bool) -> Iterator[Launch]:
    """In 16 bits."""
    for rows, depth, width in _matrices(short):
        moved = 2 * (rows * depth + depth * width + rows * width)
        inputs = partial(lambda *n: (_random(*n[:2]), _random(*n[1:])), rows, depth, width)
        yield Launch("matmul", moved, 2 * rows * depth * width, rows, inputs, torch.matmul)


@_program
def int8_matmul_by_rows(short: bool) -> Iterator[Launch]:
    """With a scale for each row and each column."""

    def inputs(rows: int, depth: int, width: int) -> Any:
        scales = torch.ones(width).npu(), torch.ones(rows).npu()
        return _bytes(rows, depth), _bytes(depth, width), *scales

    def run(x: Any, weight: Any, scale: Any, row_scale: Any) -> Any:
        options = {"pertoken_scale": row_scale, "output_dtype": _dtype()}
        return torch_npu.npu_quant_matmul(x, weight, scale, **options)

    for sizes in _matrices(short):
        rows, depth, width = sizes
        moved = rows * depth + depth * width + 2 * rows * width
        work = 2 * rows * depth * width
        yield Launch("matmul int8", moved, work, rows, partial(inputs, *sizes), run)


HEADS: dict[str, Any] = {
    "num_heads": 32,
    "num_key_value_heads": 8,
    "input_layout": "TND",
    "scale": 128**-0.5,
}
BATCHES, CONTEXTS, BLOCK = (1, 8, 32, 128), (1024, 4096, 16384), 128


def _requests(short: bool) -> Iterator[tuple[int, int]]:
    """Batch and context of decode steps, by the tokens that they read."""
    grid = [(batch, context) for batch in BATCHES for context in CONTEXTS]
    yield from [(1, 128), (2, 256)] if short else sorted(grid, key=lambda one: one[0] * one[1])


def _paged(batch: int, context: int) -> dict[str, Any]:
    """Options of attention over a paged cache, one query token a request."""
    blocks = torch.arange(batch * context // BLOCK, dtype=torch.int32).view(batch, -1)
    return {"block_table": blocks.npu(), "block_size": BLOCK}


def _attend(query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
    return torch_npu.npu_fused_infer_attention_score(query, key, value, **options)


@_program
def attention_decode(short: bool) -> Iterator[Launch]:
    """32 heads and 8 KV heads of 128, by batch and context."""
    for batch, context in _requests(short):
        options = HEADS | {
            "actual_seq_lengths": list(range(1, batch + 1)),
            "actual_seq_lengths_kv": [context] * batch,
            **_paged(batch, context),
        }
        cache = batch * context // BLOCK, BLOCK, 8 * 128

        def inputs(batch: int = batch, cache: Any = cache, options: Any = options) -> Any:
            return _random(batch, 32, 128), _random(*cache), _random(*cache), options

        moved = 2 * 2 * batch * context * 8 * 128
        yield Launch("attention", moved, 0, batch, inputs, _attend)


@_program
def latent_attention_decode(short: bool) -> Iterator[Launch]:
    """16 heads over latents of 512 and rotated keys of 64, by batch and context."""

    def run(query: Any, latents: Any, options: dict[str, Any]) -> Any:
        attend = torch_npu.npu_fused_infer_attention_score_v2
        return attend(query, latents, latents, **options)

    for batch, context in _requests(short):
        blocks = batch * context // BLOCK, BLOCK

        def inputs(batch: int = batch, context: int = context, blocks: Any = blocks) -> Any:
            options = {
                "query_rope": _random(batch, 16, 64),
                "key_rope": _random(*blocks, 64),
                "input_layout": "TND_NTD",
                "num_query_heads": 16,
                "num_key_value_heads": 1,
                "softmax_scale": 192**-0.5,
                "actual_seq_qlen": list(range(1, batch + 1)),
                "actual_seq_kvlen": [context] * batch,
                **_paged(batch, context),
            }
            return _random(batch, 16, 512), _random(*blocks, 512), options

        yield Launch("latent attention", 2 * batch * context * 576, 0, batch, inputs, run)


@_program
def attention_prefill(short: bool) -> Iterator[Launch]:
    """One prompt, causal, with 32 heads and 8 KV heads of 128, by its tokens."""
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1).npu()
    for tokens in (128, 256) if short else (512, 1024, 2048, 4096, 8192, 16384):
        options = HEADS | {
            "atten_mask": mask,
            "sparse_mode": 3,
            "actual_seq_lengths": [tokens],
            "actual_seq_lengths_kv": [tokens],
        }

        def inputs(tokens: int = tokens, options: Any = options) -> Any:
            key, value = (_random(tokens, 8, 128) for _ in range(2))
            return _random(tokens, 32, 128), key, value, options

        work = 2 * (tokens**2 / 2) * 256 * 32
        yield Launch("prefill attention", 0, work, tokens, inputs, _attend)


@_program
def vector_operators(short: bool) -> Iterator[Launch]:
    """Norms, activations and quantization, by rows."""
    width = 256 if short else 4096
    weight = torch.ones(width, dtype=_dtype(), device="npu")
    for rows in ROWS[:2] if short else ROWS:
        size = 2 * rows * width
        pair = partial(lambda *shape: (_random(*shape), _random(*shape), weight), rows, width)
        yield Launch("norm", 4 * size, 0, rows, pair, torch_npu.npu_add_rms_norm)
        one = partial(lambda *shape: (_random(*shape),), rows, width)
        yield Launch("activation", 1.5 * size, 0, rows, one, torch_npu.npu_swiglu)
        yield Launch("quantize", 1.5 * size, 0, rows, one, torch_npu.npu_dynamic_quant)


@_program
def sampling(short: bool) -> Iterator[Launch]:
    """Sorting the logits, top-k and top-p, and the choice of a token, by batch."""

    def run(logits: Any, noise: Any) -> Any:
        ordered, index = logits.sort(-1)
        chances = ordered.softmax(-1)
        return index.gather(-1, (chances / noise).argmax(-1, keepdim=True))

    vocabulary = 512 if short else 151936
    for batch in (1, 2) if short else (1, 8, 32, 128):

        def inputs(batch: int = batch) -> Any:
            return tuple(torch.rand(batch, vocabulary, device="npu") + 0.1 for _ in range(2))

        yield Launch("sampling", 4 * vocabulary * batch, 0, batch, inputs, run)


def _layers(options: Facts) -> Facts:
    """Host and device time of 40 layers of small launches, without a graph and in one."""
    size = 128 if options.get("short") else 1024
    x, weight = _random(16, size), _random(size, size)
    scale = torch.ones(size, dtype=_dtype(), device="npu")

    def layers() -> Any:
        hidden = residual = x
        for _ in range(LAYERS):
            for _ in range(2):
                hidden, _, residual = torch_npu.npu_add_rms_norm(hidden, residual, scale)
                hidden = torch.matmul(torch.matmul(hidden, weight), weight)
        return hidden

    facts: Facts = {"unit": "microseconds (median)", "layers": LAYERS, "calls": 6 * LAYERS}
    ways = {"eager": layers}
    if hasattr(torch.npu, "NPUGraph"):
        ways["graph"] = captured(layers)
    for name, work in ways.items():
        facts[f"{name}_device"] = rounded(median_seconds(work) * 1e6)
        taken = []
        for _ in range(RUNS):
            torch.npu.synchronize()
            started = time.perf_counter()
            work()
            taken.append(time.perf_counter() - started)
        facts[f"{name}_host"] = rounded(median(taken) * 1e6)
    return {"outcome": "observed", "facts": facts}


PROGRAMS |= {"forty-layers": _layers, collectives.BY_SIZE: collectives.by_size}
