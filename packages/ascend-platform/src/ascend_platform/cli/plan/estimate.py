# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Parallel layouts of a model, and a roofline estimate of memory, communication and time of each.

All figures are computed from published data, none is measured. docs/layout-planner.md compares the
estimates with results published for real NPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ascend_platform.chips import ChipFigures
from ascend_platform.cli.plan.model import BITS, STATE_BLOCK, Model

GIB = 1 << 30
STREAMED = 0.8
"""Fraction of the memory bandwidth that a decode step attains; from the first figure of
docs/layout-planner.md."""
MULTIPLIED = 0.25
"""Fraction of the cube cores' rate that matrix multiplications of a prefill attain; fitted to the
fourth figure there."""
OPERATOR_US = 3.0
"""Least time of an operator in a decode step, also in a graph, in microseconds; chosen with the
last figures there in view."""
HOST_MS = 4.0
"""Host time of a step that does not overlap with the NPU, in milliseconds; an assumption."""
SPARE_GIB = 3.0
"""Memory of a worker for activations, graphs and HCCL buffers, in GiB; an assumption."""


@dataclass(frozen=True)
class Load:
    """Workload: concurrent requests, and tokens of each. ``utilization`` is vLLM's
    gpu_memory_utilization."""

    requests: int = 64
    input: int = 1024
    output: int = 256
    quantization: str = "none"
    kv_bytes: int = 2
    utilization: float = 0.92


@dataclass(frozen=True)
class Layout:
    """Parallel sizes. ``expert`` is --enable-expert-parallel."""

    tensor: int
    pipeline: int
    data: int
    expert: bool = False

    @property
    def npus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def options(self) -> str:
        """The options of ``vllm serve``."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        given = [f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1]
        return " ".join(given + (["--enable-expert-parallel"] if self.expert else []))


@dataclass(frozen=True)
class Estimate:
    """Estimate of one layout. Bytes are per NPU; ``obstacle`` is why the layout does not fit, or
    ""."""

    layout: Layout
    weights: float
    cache: float
    kv_tokens: int  # capacity of all replicas together
    requests: int = 0  # concurrent, at most those asked for
    step_ms: float = 0.0  # of a decode step
    first_ms: float = 0.0  # Prefill of one prompt on an idle engine.
    tokens_per_second: float = 0.0  # generated, over whole waves of requests
    sent: float = 0.0  # Bytes that an NPU sends per generated token.
    bound: str = ""
    obstacle: str = ""


def layouts(model: Model, npus: int) -> Iterator[Layout]:
    """All layouts of exactly ``npus`` NPUs that vLLM accepts for the model (``vllm/config``: heads
    must divide evenly)."""
    for tensor in range(1, npus + 1):
        for pipeline in range(1, npus // tensor + 1):
            data, rest = divmod(npus, tensor * pipeline)
            even = model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0 or model.latent
            if (
                rest
                or model.heads % tensor
                or not even
                or model.mlp_width % tensor
                or pipeline > model.layers
            ):
                continue
            yield Layout(tensor, pipeline, data)
            if model.experts and tensor * data > 1:
                yield Layout(tensor, pipeline, data, True)


def estimate(model: Model, chip: ChipFigures, layout: Layout, load: Load) -> Estimate:
    """Memory and performance of a layout."""
    return _Calculation(model, chip, layout, load).estimate()


class _Calculation:
    """Figures of one layout. Times are in seconds, sizes in bytes."""

    def __init__(self, model: Model, chip: ChipFigures, layout: Layout, load: Load) -> None:
        self.model, self.chip, self.layout, self.load = model, chip, layout, load
        self.element = BITS[load.quantization] / 8
        fast = 2 if load.quantization.endswith("a8") else 1
        # Measured figures already include the efficiency.
        self.bandwidth = chip.bandwidth_gbs * 1e9 * (1 if chip.source else STREAMED)
        self.flops = chip.tflops * 1e12 * (1 if chip.source else MULTIPLIED) * fast
        # Experts are sharded over all NPUs of a stage, whole or in slices; other weights over a
        # tensor-parallel group.
        self.expert_ranks = layout.tensor * layout.data if model.experts else layout.tensor

    def weights(self) -> float:
        """Weight bytes per NPU, in the largest pipeline stage."""
        model, layout = self.model, self.layout
        layers = model.dense * self.element / layout.tensor
        layers += model.mixed * model.experts * model.expert * self.element / self.expert_ranks
        ends = model.head * 2 / layout.tensor * (1 if layout.pipeline > 1 or model.tied else 2)
        return layers / layout.pipeline + ends

    def kv(self, tokens: float) -> float:
        """Bytes of KV cache and states of an NPU for one request of this number of tokens, in all
        its layers."""
        model, layout = self.model, self.layout
        share = 1 if model.latent else min(layout.tensor, model.kv_heads)
        token = model.kv * self.load.kv_bytes / share
        sliding = model.sliding * min(tokens, model.window or tokens)
        if model.linear:  # A state has a block, and keys use half of it.
            block = STATE_BLOCK * math.ceil(model.state / layout.tensor / (token / 2) / STATE_BLOCK)
            tokens, sliding = math.ceil(tokens / block) * block, model.linear * block
        rows = (model.layers - model.sliding - model.linear) * tokens + sliding
        return rows * token / layout.pipeline

    def exchange(self, sent: float, ranks: int) -> float:
        """Time of a collective in which each rank sends this number of bytes."""
        return (
            self.chip.collective_us / 1e6 + sent / (self.chip.send_gbs(ranks) * 1e9)
            if ranks > 1
            else 0.0
        )

    def sent(self, tokens: float) -> tuple[float, float]:
        """Bytes that an NPU sends, and their time, for a stage's layers and this number of tokens
        of its replica."""
        model, layout = self.model, self.layout
        row = tokens * model.hidden * 2
        tensor, ranks = layout.tensor, self.expert_ranks
        reduce = 2 * row * (tensor - 1) / tensor  # an all-reduce: reduce-scatter, then all-gather
        size, time = 0.0, 0.0
        dense_reductions = 2 * model.layers - (model.mixed if layout.data > 1 else 0)
        size += dense_reductions * reduce
        time += dense_reductions * 2 * self.exchange(reduce / 2, tensor)
        if model.mixed and layout.data > 1:
            # With EP each token is sent to at most as many NPUs as it has experts; otherwise to
            # all, and their sum is sent back.
            each = row / tensor * (min(model.chosen, ranks - 1) if layout.expert else ranks - 1)
            size += model.mixed * 2 * each
            time += model.mixed * 2 * self.exchange(each, ranks)
        size, time = size / layout.pipeline, time / layout.pipeline
        if layout.pipeline > 1:
            size += row
            time += self.exchange(row, 2)
        return size, time

    def weights_read(self, tokens: float) -> float:
        """Weight bytes that an NPU of a stage reads for this number of tokens of each replica."""
        model, layout = self.model, self.layout
        size = model.dense * self.element / layout.tensor + model.head * 2 / layout.tensor
        if model.experts:
            active = model.experts * (
                1 - (1 - model.chosen / model.experts) ** (tokens * layout.data)
            )
            size += model.mixed * active * model.expert * self.element / self.expert_ranks
        return size / layout.pipeline

    def matmul_time(self, tokens: float) -> float:
        """Time of the linear layers of a stage for this number of tokens of each replica."""
        model, layout = self.model, self.layout
        work = 2 * tokens * (model.dense + model.head) / layout.tensor
        work += (
            2 * tokens * layout.data * model.mixed * model.chosen * model.expert / self.expert_ranks
            if model.experts
            else 0
        )
        return work / layout.pipeline / self.flops

    def step(self, requests: float, context: float) -> tuple[float, dict[str, float]]:
        """Time of a decode step of one replica's requests, and its parts. Pipeline stages run one
        after another."""
        pipeline = self.layout.pipeline
        each = max(requests / pipeline, 1.0)
        read = self.weights_read(each) / self.bandwidth
        parts = {
            "memory": read + each * self.kv(context) / self.bandwidth,
            "cube": max(0.0, self.matmul_time(each) - read),
            "links": self.sent(each)[1],
            "operators": self.model.operators * OPERATOR_US / 1e6 / pipeline,
            "host": HOST_MS / 1e3,
        }
        return sum(parts.values()) * pipeline, {
            name: time * pipeline for name, time in parts.items()
        }

    def prefill(self, requests: float) -> float:
        """Time to prefill this number of requests of one replica, one after another."""
        model, load, layout = self.model, self.load, self.layout
        pairs = load.input**2 / 2
        scores = (
            2
            * pairs
            * model.score
            * model.heads
            * (model.layers - model.linear)
            / layout.tensor
            / layout.pipeline
        )
        fast = 2 if load.quantization.endswith("a8") else 1
        one = self.matmul_time(load.input) + scores / (self.flops / fast) + self.sent(load.input)[1]
        one = max(one, self.weights_read(load.input) / self.bandwidth)
        # A single prompt passes the stages in turn, several overlap.
        stages = layout.pipeline if requests <= 1 else 1
        return requests * one * stages

    def estimate(self) -> Estimate:
        load, layout, chip = self.load, self.layout, self.chip
        weights = self.weights()
        cache = chip.memory_gib * GIB * load.utilization - weights - SPARE_GIB * GIB
        length = load.input + load.output
        if cache < self.kv(length):
            wanted = (weights + self.kv(length)) / GIB + SPARE_GIB
            obstacle = f"needs {wanted:.1f} GiB of {chip.memory_gib * load.utilization:.1f} per NPU"
            return Estimate(layout, weights, max(cache, 0.0), 0, obstacle=obstacle)
        capacity = int(cache // self.kv(length))
        requests = min(capacity, -(-load.requests // layout.data))
        step, parts = self.step(requests, load.input + load.output / 2)
        waves = -(-load.requests // layout.data) / requests
        seconds = (self.prefill(requests) + load.output * step) * waves
        replicas = min(layout.data, load.requests)
        return Estimate(
            layout,
            weights,
            cache,
            int(cache / (self.kv(length) / length)) * layout.data,
            requests * replicas,
            step * 1e3,
            self.prefill(1) * 1e3,
            min(load.requests, waves * requests * replicas) * load.output / seconds,
            self.sent(1)[0],
            max(parts, key=lambda name: parts[name]),
        )
