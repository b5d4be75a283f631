# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Registered memory: buffers for an engine to read into, limited in number and kept aside after
failed reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import torch

from ascend_transfer.engine import Engine
from ascend_transfer.errors import Settled, TransferError


def allocate_buffer(engine: Engine, size: int, device: torch.device) -> torch.Tensor:
    """Allocate and register ``size`` bytes, uint8: on the device if the engine reads device memory,
    otherwise pinned on the host.

    In another thread, hence outside of the memory pool in which vLLM registers the KV cache, which
    is freed in sleep mode: what an engine has registered must keep its memory.
    """
    where = device if engine.on_device else torch.device("cpu")

    def allocate() -> torch.Tensor:
        if device.type == "npu":
            torch.npu.set_device(device)
        is_pinned = where.type != device.type
        return torch.empty(size, dtype=torch.uint8, device=where, pin_memory=is_pinned)

    with ThreadPoolExecutor(1, "transfer-buffers") as thread:
        buffer = thread.submit(allocate).result()
    engine.register(buffer)
    return buffer


MAX_QUARANTINED = 64
"""Receive buffers beyond the usual number, while others are in quarantine or in slow reads: 1 GiB
with chunks of 16 MiB."""

SLOW_READ_SECONDS = 1.0
"""A buffer that is in use for longer does not count, so that slow peers do not keep buffers from
others."""


class ReceiveBuffers:
    """Buffers that a rank receives into: ``count`` of them, and up to :data:`MAX_QUARANTINED` more
    while some are not usable."""

    def __init__(
        self,
        allocate: Callable[[], torch.Tensor],
        count: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._allocate, self._count, self._clock = allocate, count, clock
        self._most = count + MAX_QUARANTINED
        self._changed = threading.Condition()
        self._free = [allocate() for _ in range(count)]
        self._made = count
        self._in_use: dict[int, float] = {}  # by address, since when
        self._quarantined: list[tuple[Settled, torch.Tensor]] = []

    def acquire(self, check: Callable[[], object] = lambda: None) -> torch.Tensor:
        """A buffer, once one is free; ``check`` is called every 0.1 s meanwhile and may raise.

        Raises:
            TransferError: all are in quarantine or in slow reads.
        """
        while True:
            with self._changed:
                if (buffer := self._take()) is not None:
                    return buffer
                now = self._clock()
                in_time = sum(now - since < SLOW_READ_SECONDS for since in self._in_use.values())
                if not in_time and self._made >= self._most:
                    cause = f"all {self._made} receive buffers are in use or quarantined"
                    raise TransferError("transport", f"{cause} after failed reads")
                if grow := in_time < self._count and self._made < self._most:
                    self._made += 1
                else:
                    self._changed.wait(0.1)
            if grow:
                return self._new()
            check()

    def release(self, buffer: torch.Tensor) -> None:
        with self._changed:
            del self._in_use[buffer.data_ptr()]
            self._free.append(buffer)
            self._changed.notify()

    def quarantine(self, buffer: torch.Tensor, settled: Settled) -> None:
        """Do not use a buffer until the failed read that may still write to it is settled."""
        with self._changed:
            del self._in_use[buffer.data_ptr()]
            self._quarantined.append((settled, buffer))
            self._changed.notify()

    def _take(self) -> torch.Tensor | None:
        settled = (index for index, (is_over, _) in enumerate(self._quarantined) if is_over())
        over = next(settled, None)
        if self._free or over is not None:
            buffer = self._free.pop() if over is None else self._quarantined.pop(over)[1]
            self._in_use[buffer.data_ptr()] = self._clock()
            return buffer
        return None

    def _new(self) -> torch.Tensor:
        try:
            buffer = self._allocate()
        except BaseException:
            with self._changed:
                self._made -= 1
            raise
        with self._changed:
            self._in_use[buffer.data_ptr()] = self._clock()
        return buffer
