# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fault injection for pools of KV cache: hundreds of requests, and the outcome of each.

The engine is that of ``ascend_kv_connector.testing``: vLLM's scheduler, no model, and every token
of every block compared.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

from ascend_kv_connector.store.pool import LOADED, STORED, PoolError
from ascend_kv_connector.store.tier import PoolTier
from harness.kv.memory_transport import Faults

ANSWER, TRANSFER, BACKOFF, DEAD = 0.3, 0.6, 0.02, 0.3
"""Seconds. The backoff is short, because a fast machine serves many requests in it, all without the
pool."""
LATE = 4.0
"""Seconds more than the first two that a request may take on this machine, however busy, as some
wait for blocks of others."""

TRANSFER_CONFIG = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 40 * 12288,
        "secondary_tiers": [
            {
                "type": "FaultyTier",
                "module_path": __name__,
                "answer_timeout": ANSWER,
                "transfer_timeout": TRANSFER,
                "rest": BACKOFF,
            }
        ],
    },
}
"""Host memory for 40 blocks of the suite's, so that most of what comes again comes from the pool.
"""


def outcome_words(op: str, outcome: str, code: str) -> str:
    """Labels of the metric of chunks, in short."""
    words = outcome if outcome in ("found", "present", "stored", "loaded") else f"{op} {outcome}"
    return f"{words} ({code})" if code else words


@dataclass
class PoolFaults(Faults):
    """More faults. cut: truncated data; lost: a chunk is listed but missing; full: no space for a
    chunk."""

    cut: float = 0.0
    lost: float = 0.0
    full: float = 0.0

    def choose(self) -> str:
        point = self.draw.random()
        for name in ("cut", "lost", "full"):
            point -= getattr(self, name)
            if point < 0:
                self.counts[name] = self.counts.get(name, 0) + 1
                return name
        return super().choose()


class FaultyPool:
    """See :class:`~ascend_kv_connector.store.pool.Pool`: a dictionary. While it is ``dead`` nothing
    answers."""

    description = "memory that fails"

    def __init__(self) -> None:
        self.faults, self.dead = PoolFaults(), False
        self.held: dict[str, bytes] = {}
        self.outcomes: Counter[str] = Counter()

    def buffer(self, size: int) -> memoryview:
        return memoryview(mmap.mmap(-1, size))

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._fault()
        return [name in self.held for name in names]

    def put(self, names: Sequence[str], records: Sequence[memoryview]) -> list[str]:
        out = []
        for name, record in zip(names, records, strict=True):
            fault, data = self._fault(), bytearray(record)
            if fault == "corrupt":
                data[self.faults.draw.randrange(len(data))] ^= 1
            if fault == "cut":
                del data[len(data) // 2 :]
            if fault not in ("full", "lost"):
                self.held[name] = bytes(data)
            out.append("full" if fault == "full" else STORED)
        return out

    def get(self, names: Sequence[str], records: Sequence[memoryview]) -> list[str]:
        out = []
        for name, record in zip(names, records, strict=True):
            fault, data = self._fault(), self.held.get(name)
            if data is None or fault == "lost":
                self.held.pop(name, None)
                out.append("missing")
                continue
            record[: len(data)] = data
            if fault == "late":
                threading.Timer(self.faults.seconds, _garble, (record,)).start()
                out.append("failed")
            elif fault == "cut" or len(data) < len(record):
                out.append("cut")
            else:
                if fault == "corrupt":
                    record[self.faults.draw.randrange(len(record) // 2)] ^= 1
                out.append(LOADED)
        return out

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.held.pop(name, None)

    def close(self) -> None:
        pass

    def _fault(self) -> str:
        if self.dead:
            raise PoolError("it is dead")
        fault = self.faults.choose()
        if fault == "hang":
            self.faults.hung.wait(2.0)
        if fault == "delay":
            sleep(self.faults.seconds)
        if fault == "fail":
            raise PoolError("it says no")
        return fault


def _garble(record: memoryview) -> None:
    record[: len(record) // 2] = bytes([0x5A]) * (len(record) // 2)


POOL = FaultyPool()
"""The one that all engines of this process share."""


class FaultyTier(PoolTier):
    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **more: Any
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, POOL, **more)

    def _count(self, op: str, outcome: str, code: str = "", number: int = 1) -> None:
        super()._count(op, outcome, code, number)
        POOL.outcomes[outcome_words(op, outcome, code)] += number


@dataclass
class Result:
    """``ended``: requests by how they ended. The others should be empty or 0: requests with another
    token or another KV cache, those that took longer than their deadline, and blocks that are
    neither used nor free."""

    ended: Counter[str] = field(default_factory=Counter)
    chunks: Counter[str] = field(default_factory=Counter)
    faults: dict[str, int] = field(default_factory=dict)
    wrong: list[Any] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    leaked: int = 0
    restarts: int = 0


class Endurance:
    """``count`` requests, an eighth of which leave; ``deaths`` times the instance is made anew and
    the pool is dead for a while.

    ``make`` makes an engine of the suite's.
    """

    def __init__(
        self, make: Callable[[], Any], count: int, deaths: int = 3, seed: int = 11
    ) -> None:
        rates: dict[str, Any] = {
            "fail": 0.01,
            "corrupt": 0.02,
            "delay": 0.03,
            "late": 0.01,
            "hang": 0.002,
            "cut": 0.02,
            "lost": 0.02,
            "full": 0.02,
        }
        POOL.__init__()  # type: ignore[misc]
        POOL.faults = PoolFaults(draw=random.Random(seed), seconds=0.02, **rates)
        self.make, self.count, self.draw, self.result = (
            make,
            count,
            random.Random(seed + 1),
            Result(),
        )
        self.events = [
            (count * place // (2 * deaths + 1), "restart" if place % 2 else "dead")
            for place in range(1, 2 * deaths + 1)
        ]

    def run(self) -> Result:
        from ascend_kv_connector.testing import expected_tokens, prompts

        left, engine = list(prompts(self.count, 5).items()), self.make()
        known = [prompt for _, prompt in left if len(prompt) > 60][:20]
        began: dict[str, float] = {}
        given: dict[str, list[int]] = {}
        leaving: dict[str, float] = {}
        alive_from = 0.0
        while left or began:
            if self.events and len(left) <= self.events[-1][0]:
                if self.events.pop()[1] == "dead":
                    POOL.dead, alive_from = True, monotonic() + DEAD
                else:
                    self._end(engine, began)
                    engine, self.result.restarts = self.make(), self.result.restarts + 1
            if POOL.dead and monotonic() > alive_from:
                POOL.dead = False
            while left and len(began) < 8:
                name, prompt = left.pop()
                if self.draw.random() < 0.6:  # Like an earlier prompt, with some more tokens.
                    prompt = (self.draw.choice(known) + prompt[:9])[:150]
                began[name], given[name] = monotonic(), prompt
                engine.add(name, prompt, 3)
                if self.draw.random() < 1 / 8:
                    leaving[name] = monotonic() + self.draw.random() * 0.05
            for name in [name for name, at in leaving.items() if at < monotonic()]:
                del leaving[name]
                if name in began:
                    engine.abort(name)
            engine.step()
            sleep(0.0005)
            for name in [name for name in began if engine.ended.get(name, ("",))[0]]:
                reason, tokens, _ = engine.ended[name]
                self.result.ended["left" if reason == "abort" else reason] += 1
                if reason != "abort" and tokens != expected_tokens(given[name], 3):
                    self.result.wrong.append((name, tokens))
                if monotonic() - began.pop(name) > ANSWER + TRANSFER + LATE:
                    self.result.late.append(name)
            for name in [name for name, at in began.items() if monotonic() - at > 30]:
                self.result.late.append(name)
                return self.result
        self._end(engine, began)
        POOL.faults.hung.set()
        self.result.chunks, self.result.faults = POOL.outcomes, dict(POOL.faults.counts)
        return self.result

    def _end(self, engine: Any, began: dict[str, float]) -> None:
        """End an instance: its requests are lost for their clients."""
        for name in list(began):
            self.result.ended["in flight at restart"] += 1
            engine.abort(name)
            del began[name]
        until = monotonic() + ANSWER + TRANSFER + LATE + BACKOFF
        while engine.held and monotonic() < until:
            engine.step()
            sleep(0.001)
        self.result.wrong += engine.wrong
        self.result.leaked += engine.held
        engine.close()
