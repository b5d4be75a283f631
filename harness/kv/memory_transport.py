# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""In-memory transport within one process, for tests, with fault injection."""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic, sleep

import torch
from ascend_transfer.engine import Runs
from ascend_transfer.errors import TransferError, at_once

CUT_SECONDS = 0.05


@dataclass
class Faults:
    """Fault probabilities per read, drawn by ``draw``; ``hung`` releases hanging reads.

    fail: the read fails after a part of the bytes. corrupt: one bit is flipped. delay: it takes
    ``seconds`` longer. late: it fails, and the bytes arrive ``seconds`` later; until then it is not
    settled. hang: it does not return until ``hung`` is set.
    """

    draw: random.Random = field(default_factory=lambda: random.Random(0))
    fail: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0
    late: float = 0.0
    hang: float = 0.0
    seconds: float = 0.05
    hung: threading.Event = field(default_factory=threading.Event)
    counts: dict[str, int] = field(default_factory=dict)

    def choose(self) -> str:
        """The fault of one read, or ""; it is counted."""
        point, chosen = self.draw.random(), ""
        for name in ("fail", "corrupt", "delay", "late", "hang"):
            point -= getattr(self, name)
            if point < 0:
                chosen = name
                break
        self.counts[chosen] = self.counts.get(chosen, 0) + 1
        return chosen


class InMemoryNetwork:
    """Sessions that can read from each other. ``killed`` sessions do not respond; ``cut`` pairs
    cannot reach each other."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.killed: set[str] = set()
        self.cut: set[frozenset[str]] = set()
        self.transports: dict[str, InMemoryTransport] = {}
        self._numbers = itertools.count()

    def make_transport(self) -> InMemoryTransport:
        transport = InMemoryTransport(self, f"localhost:{next(self._numbers)}")
        self.transports[transport.session] = transport
        return transport


class LinkCuts:
    """Cuts links of a network for 50 ms at a time; a cut begins with ``probability`` at a step."""

    def __init__(self, network: InMemoryNetwork, seed: int, probability: float) -> None:
        # A generator of its own: how often it is drawn from depends on the time.
        self._network, self._draw, self._probability = network, random.Random(seed), probability
        self._until = 0.0

    def step(self, pairs: Callable[[], Iterable[Iterable[str]]]) -> bool:
        """End a cut that is over, or begin one between each of the ``pairs`` of sessions; whether
        one begins."""
        if self._until:
            if monotonic() > self._until:
                self._network.cut.clear()
                self._until = 0.0
            return False
        if self._draw.random() >= self._probability:
            return False
        self._network.cut.update(map(frozenset, pairs()))
        self._until = monotonic() + CUT_SECONDS
        return True


class InMemoryTransport:
    """See :class:`~ascend_transfer.engine.Engine`. It checks that both addresses are in
    registered memory."""

    name = "memory"
    on_device = False
    most_runs = sys.maxsize
    can_write = True

    def __init__(self, network: InMemoryNetwork, session: str) -> None:
        self._network, self.session = network, session
        self._memory: list[range] = []

    def register(self, buffer: torch.Tensor) -> None:
        self._memory.append(range(buffer.data_ptr(), buffer.data_ptr() + buffer.numel()))

    def unregister(self, buffer: torch.Tensor) -> None:
        self._memory.remove(range(buffer.data_ptr(), buffer.data_ptr() + buffer.numel()))

    def is_registered(self, address: int, size: int) -> bool:
        return any(address in region and address + size <= region.stop for region in self._memory)

    def write(self, session: str, runs: Runs) -> None:
        self._copy(session, runs, 60.0, read=False)

    def read(self, session: str, runs: Runs, seconds: float) -> None:
        self._copy(session, runs, seconds, read=True)

    def _copy(self, session: str, runs: Runs, seconds: float, read: bool) -> None:
        network, peer = self._network, self._network.transports.get(session)
        if peer is None or not network.killed.isdisjoint((session, self.session)):
            raise TransferError("transport", f"session {session} does not exist", settled=at_once)
        if frozenset((session, self.session)) in network.cut:
            network.faults.hung.wait(seconds)
            raise TransferError(
                "transport", f"no data from session {session} in {seconds:g} s", settled=at_once
            )
        each = list(zip(*runs, strict=True))
        if not all(
            peer.is_registered(remote, size) and self.is_registered(local, size)
            for remote, local, size in each
        ):
            raise TransferError("transport", "the memory is not registered", settled=at_once)
        fault = network.faults.choose()
        if fault == "hang":
            network.faults.hung.wait(60)
        if fault == "delay":
            sleep(network.faults.seconds)
        targets = [
            (local, remote, size) if read else (remote, local, size) for remote, local, size in each
        ]
        if fault in ("fail", "late"):
            for target, source, size in targets:
                ctypes.memmove(target, source, size // 2)
            arrived = threading.Event()
            if fault == "late":
                threading.Timer(network.faults.seconds, _overwrite, (targets, arrived)).start()
            settled = arrived.is_set if fault == "late" else at_once
            raise TransferError(
                "transport", f"session {session} closed the connection", settled=settled
            )
        for target, source, size in targets:
            ctypes.memmove(target, source, size)
        if fault == "corrupt":
            target, _, size = network.faults.draw.choice(targets)
            ctypes.c_ubyte.from_address(target + network.faults.draw.randrange(size)).value ^= 1

    def close(self) -> None:
        self._network.transports.pop(self.session, None)


def _overwrite(targets: list[tuple[int, int, int]], arrived: threading.Event) -> None:
    for target, _, size in targets:
        ctypes.memset(target, 0x5A, size)
    arrived.set()
