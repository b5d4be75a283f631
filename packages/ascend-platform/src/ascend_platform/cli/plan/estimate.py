"""Layouts of a model over NPUs, and a roofline estimate of memory, communication and time of each.

All figures are computed from published data, none is measured. docs/layout-planner.md compares the estimates with
results published for real NPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ascend_platform.chips import ChipFigures
from ascend_platform.cli.plan.model import BITS, Model

GIB = 1 << 30
STREAMED = 0.8
"""Part of the memory's bandwidth that a decode step attains; taken from the first figure of docs/layout-planner.md."""
MULTIPLIED = 0.25
"""Part of the cube cores' rate that the products of a prefill attain; chosen with the fourth figure there in view."""
HOST_MS = 4.0
"""Time of the host in each step that nothing on the NPU hides; an assumption."""
SPARE_GIB = 3.0
"""Memory of a worker for activations, graphs and HCCL's buffers; an assumption."""


@dataclass(frozen=True)
class Load:
    """What is to be served: requests at a time, and tokens of each. ``utilization`` is vLLM's gpu_memory_utilization."""

    requests: int = 64
    input: int = 1024
    output: int = 256
    quantization: str = "none"
    kv_bytes: int = 2
    utilization: float = 0.92


@dataclass(frozen=True)
class Layout:
    """Sizes of vLLM's parallel groups. ``expert`` is --enable-expert-parallel."""

    tensor: int
    pipeline: int
    data: int
    expert: bool = False

    @property
    def npus(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def options(self) -> str:
        """As ``vllm serve`` takes it."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "data": self.data}
        given = [f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1]
        return " ".join(given + (["--enable-expert-parallel"] if self.expert else []))


@dataclass(frozen=True)
class Estimate:
    """Of one layout. Bytes are per NPU; ``obstacle`` says why the layout cannot serve, or is ""."""

    layout: Layout
    weights: float
    cache: float
    kv_tokens: int  # that all replicas hold together
    requests: int = 0  # at a time, of those asked for
    step_ms: float = 0.0  # a decode step
    first_ms: float = 0.0  # prefill of one prompt on an idle engine
    tokens_per_second: float = 0.0  # generated, over the whole of a wave of requests
    sent: float = 0.0  # bytes that an NPU sends for each token generated
    bound: str = ""
    obstacle: str = ""


def layouts(model: Model, npus: int) -> Iterator[Layout]:
    """All layouts of exactly ``npus`` NPUs that vLLM accepts for the model (``vllm/config``: heads must divide evenly)."""
    for tensor in range(1, npus + 1):
        for pipeline in range(1, npus // tensor + 1):
            data, rest = divmod(npus, tensor * pipeline)
            even = model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0 or model.latent
            if rest or model.heads % tensor or not even or model.mlp_width % tensor or pipeline > model.layers:
                continue
            yield Layout(tensor, pipeline, data)
            if model.experts and tensor * data > 1:
                yield Layout(tensor, pipeline, data, True)


def estimate(model: Model, chip: ChipFigures, layout: Layout, load: Load) -> Estimate:
    """What a layout needs and does."""
    return _Reckoning(model, chip, layout, load).estimate()


class _Reckoning:
    """One layout's figures. Times are in seconds, sizes in bytes."""

    def __init__(self, model: Model, chip: ChipFigures, layout: Layout, load: Load) -> None:
        self.model, self.chip, self.layout, self.load = model, chip, layout, load
        self.element = BITS[load.quantization] / 8
        fast = 2 if load.quantization.endswith("a8") else 1
        self.bandwidth = chip.bandwidth_gbs * 1e9 * STREAMED
        self.flops = chip.tflops * 1e12 * MULTIPLIED * fast
        # Experts are spread over all NPUs of a stage, whole or in slices; the rest over a tensor-parallel group.
        self.spread = layout.tensor * layout.data if model.experts else layout.tensor

    def weights(self) -> float:
        """Of an NPU; that of the stage which has the most."""
        model, layout = self.model, self.layout
        layers = model.dense * self.element / layout.tensor
        layers += model.mixed * model.experts * model.expert * self.element / self.spread
        ends = model.head * 2 / layout.tensor * (1 if layout.pipeline > 1 or model.tied else 2)
        return layers / layout.pipeline + ends

    def kv(self, tokens: float) -> float:
        """Of an NPU for one request of so many tokens, in all its layers."""
        model, layout = self.model, self.layout
        share = 1 if model.latent else min(layout.tensor, model.kv_heads)
        rows = (model.layers - model.sliding) * tokens + model.sliding * min(tokens, model.window or tokens)
        return rows * model.kv * self.load.kv_bytes / share / layout.pipeline

    def exchange(self, sent: float, ranks: int) -> float:
        """Time of a collective in which each of the ranks sends so many bytes."""
        return self.chip.collective_us / 1e6 + sent / (self.chip.send_gbs(ranks) * 1e9) if ranks > 1 else 0.0

    def sent(self, tokens: float) -> tuple[float, float]:
        """Bytes that an NPU sends, and time for it, for a stage's layers and so many tokens of its replica."""
        model, layout = self.model, self.layout
        row = tokens * model.hidden * 2
        tensor, ranks = layout.tensor, self.spread
        reduce = 2 * row * (tensor - 1) / tensor  # an all-reduce: reduce-scatter, then all-gather
        size, time = 0.0, 0.0
        dense_reductions = 2 * model.layers - (model.mixed if layout.data > 1 else 0)
        size += dense_reductions * reduce
        time += dense_reductions * 2 * self.exchange(reduce / 2, tensor)
        if model.mixed and layout.data > 1:
            # With EP each token goes to as many NPUs as it has chosen experts, at most; else to all, and their sum comes back.
            each = row / tensor * (min(model.chosen, ranks - 1) if layout.expert else ranks - 1)
            size += model.mixed * 2 * each
            time += model.mixed * 2 * self.exchange(each, ranks)
        size, time = size / layout.pipeline, time / layout.pipeline
        if layout.pipeline > 1:
            size += row
            time += self.exchange(row, 2)
        return size, time

    def touched(self, tokens: float) -> float:
        """Weights' bytes that a stage reads on an NPU for so many tokens of each replica."""
        model, layout = self.model, self.layout
        size = model.dense * self.element / layout.tensor + model.head * 2 / layout.tensor
        if model.experts:
            met = model.experts * (1 - (1 - model.chosen / model.experts) ** (tokens * layout.data))
            size += model.mixed * met * model.expert * self.element / self.spread
        return size / layout.pipeline

    def products(self, tokens: float) -> float:
        """Time for the linear layers' multiplications of a stage, for so many tokens of each replica."""
        model, layout = self.model, self.layout
        work = 2 * tokens * (model.dense + model.head) / layout.tensor
        work += 2 * tokens * layout.data * model.mixed * model.chosen * model.expert / self.spread if model.experts else 0
        return work / layout.pipeline / self.flops

    def step(self, requests: float, context: float) -> tuple[float, dict[str, float]]:
        """A decode round of the requests of one replica, and the parts of its time. Pipeline stages take turns."""
        pipeline = self.layout.pipeline
        each = max(requests / pipeline, 1.0)
        read = self.touched(each) / self.bandwidth
        parts = {
            "memory": read + each * self.kv(context) / self.bandwidth,
            "cube": max(0.0, self.products(each) - read),
            "links": self.sent(each)[1],
            "host": HOST_MS / 1e3,
        }
        return sum(parts.values()) * pipeline, {name: time * pipeline for name, time in parts.items()}

    def prefill(self, requests: float) -> float:
        """Time until the prompts of so many requests of one replica are computed, one after the other."""
        model, load, layout = self.model, self.load, self.layout
        pairs = load.input**2 / 2
        scores = 2 * pairs * model.score * model.heads * model.layers / layout.tensor / layout.pipeline
        fast = 2 if load.quantization.endswith("a8") else 1
        one = self.products(load.input) + scores / (self.flops / fast) + self.sent(load.input)[1]
        one = max(one, self.touched(load.input) / self.bandwidth)
        stages = layout.pipeline if requests <= 1 else 1  # of one prompt in turn, of many at the same time
        return requests * one * stages

    def estimate(self) -> Estimate:
        load, layout, chip = self.load, self.layout, self.chip
        weights = self.weights()
        room = chip.memory_gib * GIB * load.utilization - weights - SPARE_GIB * GIB
        length = load.input + load.output
        if room < self.kv(length):
            wanted = (weights + self.kv(length)) / GIB + SPARE_GIB
            lacks = f"needs {wanted:.1f} GiB of {chip.memory_gib * load.utilization:.1f} an NPU"
            return Estimate(layout, weights, max(room, 0.0), 0, obstacle=lacks)
        held = int(room // self.kv(length))
        requests = min(held, -(-load.requests // layout.data))
        step, parts = self.step(requests, load.input + load.output / 2)
        waves = -(-load.requests // layout.data) / requests
        seconds = (self.prefill(requests) + load.output * step) * waves
        replicas = min(layout.data, load.requests)
        return Estimate(
            layout,
            weights,
            room,
            int(room / (self.kv(length) / length)) * layout.data,
            requests * replicas,
            step * 1e3,
            self.prefill(1) * 1e3,
            min(load.requests, waves * requests * replicas) * load.output / seconds,
            self.sent(1)[0],
            max(parts, key=lambda name: parts[name]),
        )
