# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fault injection for KV transfers: hundreds of requests, the outcome of each, and what must not
have happened."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

from ascend_kv_connector.p2p.producer.leases import PrefillProgress
from ascend_kv_connector.p2p.protocol import PrefillStarted
from ascend_kv_connector.p2p.transfers import Done, Failed
from ascend_transfer.errors import TransferError
from harness.kv.memory_transport import Faults, InMemoryNetwork, LinkCuts

TIMEOUT = 1.0
LATE = 20.0
"""Seconds after its deadline by which a transfer must have been reported on this machine, however
busy."""

BLOCKS, BLOCK_SIZE = 400, 4
LENGTHS = (1, 3, 9, 17, 40)


@dataclass
class Result:
    """``ended``: outcomes, of requests. The others should be empty: requests with wrong tokens,
    those that ended late, and blocks or buffers that are neither used nor free."""

    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)


@dataclass
class Prompt:
    """A request on the producer: its blocks, the tokens computed, and whether the consumer frees
    it."""

    name: str
    tokens: int
    blocks: list[int]
    progress: PrefillProgress = field(default_factory=PrefillProgress)
    computed: int = 0
    finished: bool = False


@dataclass
class Load:
    """A request on the consumer."""

    blocks: list[int]
    start: int
    tokens: int
    began: float
    outcomes: list[Done | Failed] = field(default_factory=list)


class Endurance:
    """``count`` requests between a consumer and a producer, which is replaced each time it is
    killed.

    ``layerwise``: prompts are read while they are computed, are preempted and given up in between.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        network: InMemoryNetwork,
        count: int,
        one: dict[str, Any],
        other: dict[str, Any],
        layerwise: bool = False,
        kills: int = 3,
        seed: int = 7,
    ) -> None:
        self.draw = random.Random(seed)
        self.cuts = LinkCuts(network, seed + 2, 0.002)
        self.make, self.network, self.count, self.shape, self.layerwise = (
            make,
            network,
            count,
            one,
            layerwise,
        )
        corrupt = 0.02 if other.get("verify", True) else 0.0
        rates: dict[str, Any] = {
            "fail": 0.02,
            "corrupt": corrupt,
            "delay": 0.03,
            "late": 0.02,
            "hang": 0.004,
        }
        if layerwise:  # As many per request, because a request has more reads.
            rates = {name: rate / 4 for name, rate in rates.items()}
        network.faults = Faults(draw=random.Random(seed + 1), seconds=0.02, **rates)
        options = {
            "transfer_timeout": TIMEOUT,
            "verify": True,
            "lanes": 8 if layerwise else 4,
        } | other
        self.consumer = make("d", blocks=BLOCKS, **options).consume()
        self.deaths = [count * (place + 1) // (kills + 1) for place in range(kills)]
        self.result = Result()
        self.prompts: dict[str, Prompt] = {}
        self.loads: dict[str, Load] = {}
        self.ended: dict[str, tuple[list[int], int]] = {}
        self.settled: Counter[str] = Counter()
        self.lives = 0
        self.new_producer()

    def new_producer(self) -> None:
        self.lives += 1
        self.producer = self.make(
            f"p{self.lives}", blocks=BLOCKS, lease=3.0, **self.shape
        ).produce()
        self.prompts.clear()

    def run(self) -> Result:
        left = [(f"r{number}", self.draw.choice(LENGTHS)) for number in range(self.count)]
        while left or self.loads or self.prompts:
            if self.deaths and len(left) <= self.deaths[-1]:
                self.deaths.pop()
                self.kill()
            self.cut()
            while (
                left
                and len(self.loads) < 8
                and min(len(self.producer.free), len(self.consumer.free)) > 20
            ):
                self.begin(*left.pop())
            if self.layerwise:
                self.compute()
            self.collect()
            sleep(0.001)
        self.network.faults.hung.set()
        self.result.faults = dict(self.network.faults.counts)
        ranks = self.producer.producers
        until = monotonic() + 20.0
        while (
            self.ended or any(len(rank.leases) or rank.buffers_in_use for rank in ranks)
        ) and monotonic() < until:
            self.free_settled()
            sleep(0.005)
        self.result.leaked += [
            f"{len(rank.leases)} leases, {rank.buffers_in_use} buffers"
            for rank in ranks
            if len(rank.leases) or rank.buffers_in_use
        ]
        for name, instance in (("producer", self.producer), ("consumer", self.consumer)):
            if len(set(instance.free)) != BLOCKS:
                self.result.leaked.append(
                    f"{BLOCKS - len(set(instance.free))} blocks of the {name}"
                )
        return self.result

    def kill(self) -> None:
        """Simulate a killed producer: its memory and connections are gone."""
        self.result.ended["(a producer was killed)"] += 1
        for rank in self.producer.producers:
            self.network.killed.add(rank.transport.session)
            rank.close()
        self.new_producer()

    def cut(self) -> None:
        sides = self.producer.producers, self.consumer.consumers
        sessions = [[rank.transport.session for rank in side] for side in sides]
        if self.cuts.step(lambda: itertools.product(*sessions)):
            self.result.ended["(the link was cut)"] += 1

    def begin(self, name: str, tokens: int) -> None:
        instance, ranks = self.producer, self.consumer.consumers
        leaves = self.draw.random() < 0.02
        if self.layerwise:
            self.prompts[name] = prompt = Prompt(name, tokens, instance.take(tokens))
            source = None
            announcement = PrefillStarted(
                name, instance.name, name, list(instance.source(name).ranks)
            )
            self.grow(prompt)
        else:
            seconds = 0.001 if self.draw.random() < 0.02 else 3.0
            source, blocks = instance.fill(name, tokens, seconds)
            self.prompts[name] = Prompt(name, tokens, blocks, finished=True)
            if leaves:
                self.result.ended["declined"] += 1
                for rank in ranks:
                    rank.release(source)
                return
        start = tokens // 2 // BLOCK_SIZE * BLOCK_SIZE
        self.loads[name] = Load(self.consumer.take(tokens - start), start, tokens, monotonic())
        for rank in ranks:
            if self.layerwise:
                rank.answer(announcement)
            rank.start(name, source, self.loads[name].blocks, start, tokens)
            if leaves:
                rank.cancel(name, TransferError("aborted", "the request has ended"))

    def grow(self, prompt: Prompt) -> None:
        for rank in self.producer.producers:
            rank.leases.track(prompt.name, prompt.blocks, prompt.tokens, prompt.progress)

    def compute(self) -> None:
        """One model step for the prompts in progress; some are preempted, some aborted."""
        for prompt in [prompt for prompt in self.prompts.values() if not prompt.finished]:
            chance = self.draw.random()
            if chance < 0.01:
                how = "" if chance < 0.007 else "given up there"
                for rank in self.producer.producers:
                    rank.leases.revoke(prompt.name, how)
                self.producer.free += prompt.blocks
                if how:
                    del self.prompts[prompt.name]
                    continue
                prompt.blocks, prompt.computed, prompt.progress = (
                    self.producer.take(prompt.tokens),
                    0,
                    PrefillProgress(),
                )
                self.grow(prompt)
            prompt.computed = min(prompt.tokens, prompt.computed + self.draw.choice((1, 4, 9, 20)))
            instance = self.producer
            regions = [region for cache in instance.caches for region in cache.regions]
            places = list(instance.places(prompt.name, prompt.blocks, 0, prompt.computed))
            for layer in dict.fromkeys(region.layer for region in regions):
                for region, (cache, rows, expected) in zip(regions, places, strict=True):
                    if region.layer == layer:
                        cache[rows] = expected
                prompt.progress.record(layer, prompt.computed, lambda: True)
            if prompt.computed == prompt.tokens:
                prompt.finished = True
                for rank in self.producer.producers:
                    rank.leases.grant(prompt.name, prompt.blocks, prompt.tokens, 3.0)

    def free_settled(self) -> None:
        """Free blocks of the consumer that no read can write to any more on any of its ranks."""
        for rank in self.consumer.consumers:
            for name in rank.pop_settled():
                self.settled[name] += 1
        for name in [
            name for name, (_, ranks) in self.ended.items() if self.settled[name] >= ranks
        ]:
            self.consumer.free += self.ended.pop(name)[0]

    def collect(self) -> None:
        """Collect finished requests of producer and consumer."""
        for rank in self.consumer.consumers:
            for outcome in rank.get_finished():
                self.loads[outcome.request].outcomes.append(outcome)
        for name, load in list(self.loads.items()):
            if len(load.outcomes) < len(self.consumer.consumers):
                if monotonic() - load.began > TIMEOUT + LATE and name not in self.result.late:
                    self.result.late.append(name)
                continue
            del self.loads[name]
            failed = [outcome for outcome in load.outcomes if isinstance(outcome, Failed)]
            self.result.ended[failed[0].kind if failed else "done"] += 1
            missing = {block for outcome in failed for block in outcome.blocks}
            good = (
                next(
                    (place for place, block in enumerate(load.blocks) if block in missing),
                    len(load.blocks),
                )
                * BLOCK_SIZE
            )
            stop = min(load.start + good, load.tokens)
            if not self.consumer.holds(
                name, load.blocks[: -(-good // BLOCK_SIZE)], load.start, stop
            ):
                self.result.wrong.append((name, load.outcomes))
            self.ended[name] = load.blocks, len(self.consumer.consumers)
        self.free_settled()
        for rank, freed in zip(self.producer.producers, self.producer.freed, strict=True):
            freed.update(rank.leases.pop_ended())
        for name, prompt in list(self.prompts.items()):
            if prompt.finished and all(name in freed for freed in self.producer.freed):
                self.producer.free += self.prompts.pop(name).blocks
