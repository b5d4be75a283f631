# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Prompts that a synthetic instance prefills while another one receives them, layer by layer."""

from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from ascend_kv_connector.p2p.producer.leases import PrefillProgress
from ascend_kv_connector.p2p.protocol import PrefillStarted

LAYERS = ["layers.0", "layers.1"]


class Prompt:
    """Prompt that an instance prefills for the reader ``name``; the test controls when each layer's
    tokens are computed."""

    def __init__(self, producer: Any, name: str, tokens: int) -> None:
        self.producer, self.name, self.tokens, self.progress = (
            producer,
            name,
            tokens,
            PrefillProgress(),
        )
        self.blocks = producer.take(tokens)
        for rank in producer.producers:
            rank.leases.track(f"{name}-far", self.blocks, tokens, self.progress)

    def announcement(self) -> PrefillStarted:
        return PrefillStarted(
            self.name, self.producer.name, f"{self.name}-far", list(self.producer.source("").ranks)
        )

    def announce(self, consumer: Any) -> None:
        for rank in consumer.consumers:
            rank.answer(self.announcement())

    def compute(self, tokens: int, *layers: str) -> None:
        regions = [region for cache in self.producer.caches for region in cache.regions]
        places = self.producer.places(self.name, self.blocks, 0, tokens)
        for region, (values, rows, expected) in zip(regions, places, strict=True):
            if region.layer in (layers or LAYERS):
                values[rows] = expected
        for layer in layers or LAYERS:
            self.progress.record(layer, tokens, lambda: True)

    def finish(self, seconds: float = 5.0) -> None:
        for rank in self.producer.producers:
            rank.leases.grant(f"{self.name}-far", self.blocks, self.tokens, seconds)


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    until = monotonic() + seconds
    while not condition() and monotonic() < until:
        sleep(0.002)
    return condition()
