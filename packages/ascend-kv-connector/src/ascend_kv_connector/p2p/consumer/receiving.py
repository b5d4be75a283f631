# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Reads of a peer's memory into the KV cache, or into receive buffers that are unpacked
afterwards."""

from __future__ import annotations

from concurrent.futures import Future
from time import monotonic

import torch
from ascend_transfer.engine import Runs
from ascend_transfer.errors import TransferError, never

from ascend_kv_connector.p2p.consumer.connections import Part
from ascend_kv_connector.p2p.consumer.view import ConsumerView
from ascend_kv_connector.p2p.paged_cache import checksum
from ascend_kv_connector.p2p.runs import Placement


class Receiving:
    """Reads of one thread. A buffer is unpacked in another thread while the next one is read."""

    def __init__(self, consumer: ConsumerView) -> None:
        self._consumer = consumer
        self._unpacking: Future[None] | None = None

    def placement(self, part: Part, start: int, stop: int) -> Placement | None:
        """Where the tokens belong, if a read may write them there; otherwise they are staged.

        With several KV cache groups, vLLM takes note of a failure only when the blocks may be
        freed, which a failed read delays.
        """
        cache, memory, plan = self._consumer.cache, self._consumer.memory, part.plan
        if (
            not memory
            or plan.heads != cache.heads
            or cache.is_hybrid
            or not self._consumer.may_write_directly()
        ):
            return None
        slots = self._slots(part, start, stop)
        return Placement([memory[index] for index in plan.local], cache.block_tokens, slots.numpy())

    def read_into_cache(self, part: Part, runs: Runs, until: float) -> None:
        part.transfer.wait_until_writable(self._consumer.rank.stream_context)
        with part.transfer.reading():
            self._read(part, runs, until)

    def read_into_buffer(self, part: Part, runs: Runs, until: float) -> torch.Tensor:
        """A receive buffer with the bytes of runs whose local addresses are relative to it; the
        caller releases it, or lets :meth:`unpack_later` do so."""
        buffers = self._consumer.buffers
        buffer = buffers.acquire(part.transfer.remaining)
        runs = runs._replace(local=[buffer.data_ptr() + offset for offset in runs.local])
        try:
            self._read(part, runs, until)
        except Exception as error:
            buffers.quarantine(buffer, getattr(error, "settled", never))
            raise
        return buffer

    def release(self, buffer: torch.Tensor) -> None:
        self._consumer.buffers.release(buffer)

    def unpack_later(
        self,
        part: Part,
        tokens: range,
        buffer: torch.Tensor,
        size: int,
        crc: int | None = None,
    ) -> None:
        """Copy ``size`` bytes of a receive buffer to the cache, and release the buffer.

        Raises:
            TransferError, TransferEndedError: as :meth:`wait`, of the buffer before.
        """
        self.wait()
        self._unpacking = self._consumer.unpackers.submit(
            self._unpack, part, tokens, buffer, size, crc
        )

    def wait(self) -> None:
        """Wait for the buffer that is being unpacked, if any.

        Raises:
            TransferError: its checksum was wrong.
            TransferEndedError: the transfer has ended.
        """
        unpacking, self._unpacking = self._unpacking, None
        if unpacking is not None:
            unpacking.result()

    def _read(self, part: Part, runs: Runs, until: float) -> None:
        transfer = part.transfer
        with transfer.phase("read"):
            self._consumer.transport.read(
                part.peer.session, runs, max(0.0, min(transfer.deadline, until) - monotonic())
            )

    def _slots(self, part: Part, start: int, stop: int) -> torch.Tensor:
        transfer = part.transfer
        first = transfer.start
        return self._consumer.cache.slot_mapping(
            transfer.blocks, start - first, stop - first, part.plan.group
        )

    def _unpack(
        self, part: Part, tokens: range, buffer: torch.Tensor, size: int, crc: int | None
    ) -> None:
        transfer, data = part.transfer, buffer[:size]
        try:
            if crc is not None and checksum(data) != crc:
                raise TransferError("verify", f"a chunk of {size} bytes failed its checksum")
            with (
                transfer.phase("unpack"),
                transfer.writing(),
                self._consumer.rank.stream_context(transfer.after),
            ):
                slots = self._slots(part, tokens.start, tokens.stop)
                self._consumer.cache.unpack(slots, part.plan.local, part.plan.heads, data)
        finally:
            self._consumer.buffers.release(buffer)
        transfer.copied += size
        transfer.count(part.number, size, tokens.stop)
