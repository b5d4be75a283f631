# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Staging buffers that a rank packs KV cache into, where the KV cache itself is not read."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import NamedTuple

import torch

from ascend_kv_connector.p2p.protocol import Owner


class Loan(NamedTuple):
    """A buffer lent to a transfer until ``until``. ``ticket`` distinguishes it from earlier loans
    of the buffer."""

    owner: Owner
    until: float
    ticket: int


class SendBuffers:
    """Buffers that a rank sends from: lent to a transfer for a limited time, until it releases
    them."""

    def __init__(self, buffers: list[torch.Tensor], clock: Callable[[], float] = monotonic) -> None:
        self.buffers = buffers
        self._clock = clock
        self._lock = threading.Lock()
        self._loans: dict[int, Loan] = {}
        self._tickets = itertools.count()

    def acquire(self, owner: Owner, seconds: float) -> tuple[int, torch.Tensor] | None:
        """Lend a buffer to this transfer: ticket and buffer, or None if all are in use."""
        with self._lock:
            now = self._clock()
            for index, buffer in enumerate(self.buffers):
                if index not in self._loans or self._loans[index].until <= now:
                    loan = self._loans[index] = Loan(owner, now + seconds, next(self._tickets))
                    return loan.ticket, buffer
        return None

    def release(self, owner: Owner, tickets: Sequence[int] = ()) -> None:
        """Take back the buffers of these tickets if the transfer holds them; without tickets, all
        that it holds."""
        self._release(lambda loan: loan.owner == owner and (not tickets or loan.ticket in tickets))

    def release_request(self, request: str, reader: str, rank: int) -> None:
        """Take back all buffers that a reader's rank has of a request."""
        self._release(lambda loan: loan.owner[:3] == (request, reader, rank))

    def _release(self, ended: Callable[[Loan], bool]) -> None:
        with self._lock:
            self._loans = {index: loan for index, loan in self._loans.items() if not ended(loan)}

    @property
    def in_use(self) -> int:
        """Number of buffers lent to readers."""
        with self._lock:
            now = self._clock()
            return sum(loan.until > now for loan in self._loans.values())
