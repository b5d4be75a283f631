# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""HCCL as an engine: a read is a send on the peer's NPU and a receive on this one.

HCCL has no one-sided reads (Huawei's API reference "HCCL": HcclSend and HcclRecv are paired). So
each rank listens on a port of its own, where readers request sends; only bytes of registered
buffers are sent. A pair of ranks uses ascend-communicator's point-to-point link: the peer is rank
0, the reader rank 1. The link has a private stream and is destroyed with all work on it, so that
nothing on this NPU waits for a lost peer.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, NamedTuple
from uuid import uuid4

import torch
import zmq
from ascend_platform import extension
from ascend_transfer.auth import CurveKeys
from ascend_transfer.engine import Runs
from ascend_transfer.errors import Settled, TransferError, at_once, never, one_line
from ascend_transfer.rpc import RpcClient, RpcServer

from ascend_communicator.hccl_sender import (
    CODEC,
    IDLE_SECONDS,
    NOT_CONNECTED,
    POLL_SECONDS,
    Connect,
    Disconnect,
    HcclSenders,
    RootInfo,
    Send,
    total_bytes,
)
from ascend_communicator.p2p_link import P2PLink

CONNECT_SECONDS = 60.0
"""Timeout for two NPUs to connect, in the first read between them."""

REPLY_SECONDS = 10.0
"""Timeout for a peer's reply to one message."""


class Memory(NamedTuple):
    """Registered buffers by address, and where they start; replaced as a whole, since other threads
    look slices up."""

    buffers: list[torch.Tensor]
    starts: list[int]


_kept: list[torch.Tensor] = []
"""Memory that a link which cannot be destroyed may still write to: kept for the life of the
process."""


class HcclEngine:
    """See :class:`~ascend_transfer.engine.Engine`; buffers are on the NPU."""

    name = "hccl"
    on_device = True
    can_write = False
    # Each is a send and a receive, and the host launches about 100,000 of them per second.
    most_runs = 4

    def __init__(
        self,
        host: str,
        protocol: str = "",
        keys: CurveKeys | None = None,
        ports: range | None = None,
        timeout: float = 0.0,
    ) -> None:
        """Listen on a free port of ``host``, of ``ports`` if given.

        Raises:
            RefusedError: no port is available.
        """
        self.link: Any = P2PLink
        self.keys = keys
        self.context = zmq.Context()
        self._memory = Memory([], [])
        self._readers: dict[str, HcclReader] = {}
        self._senders = HcclSenders(self)
        self._closing: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._server = RpcServer(CODEC, self._senders.answer, host, ports or 0, keys)
        self.session = f"{host}:{self._server.port}"

    def register(self, buffer: torch.Tensor) -> None:
        with self._lock:
            ordered = sorted([*self._memory.buffers, buffer], key=torch.Tensor.data_ptr)
            self._memory = Memory(ordered, [each.data_ptr() for each in ordered])

    def read(self, session: str, runs: Runs, seconds: float) -> None:
        until = monotonic() + seconds
        targets = self.registered_slices(runs.local, runs.size)
        if targets is None:
            raise TransferError("transport", "the memory is not registered", settled=at_once)
        with self._use_reader(session, seconds) as reader:
            reader.read(runs.remote, targets, until)

    def connect(self, session: str, seconds: float) -> None:
        until = monotonic() + seconds
        with self._use_reader(session, seconds) as reader:
            reader.connect(until)

    @contextmanager
    def _use_reader(self, session: str, seconds: float) -> Iterator[HcclReader]:
        with self._lock:
            if session not in self._readers:
                self._close_idle_readers()
                self._readers[session] = HcclReader(self, session, f"{self.session}/{uuid4().hex}")
            reader = self._readers[session]
            reader.used = monotonic()
        if not reader.lock.acquire(timeout=seconds):
            cause = f"waited {seconds:.3g} s for other reads from this NPU"
            raise TransferError("transport", cause, settled=at_once)
        try:
            yield reader
        finally:
            reader.used = monotonic()
            reader.lock.release()

    def _close_idle_readers(self) -> None:
        for session, reader in list(self._readers.items()):
            if not reader.lock.locked() and monotonic() - reader.used > IDLE_SECONDS:
                # In a thread, because it waits for a peer that is gone.
                thread = threading.Thread(
                    target=reader.disconnect, name="transfer-hccl", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:  # too many processes and threads
                    return
                del self._readers[session]
                self._closing = [each for each in self._closing if each.is_alive()] + [thread]

    def write(self, session: str, runs: Runs) -> None:
        raise TransferError("internal", "HCCL has no one-sided writes")

    def forget(self, session: str, reader: HcclReader) -> None:
        """Drop a reader; the next read from the session creates a new one."""
        with self._lock:
            if self._readers.get(session) is reader:
                del self._readers[session]

    def registered_slices(
        self, addresses: list[int], sizes: list[int]
    ) -> list[torch.Tensor] | None:
        """These bytes of registered memory; None if some are outside."""
        slices, memory = [], self._memory
        for address, size in zip(addresses, sizes, strict=True):
            index = bisect_right(memory.starts, address) - 1
            at = address - memory.starts[index] if index >= 0 else -1
            if at < 0 or size <= 0 or at + size > memory.buffers[index].numel():
                return None
            slices.append(memory.buffers[index][at : at + size])
        return slices

    def close(self) -> None:
        self._server.close()
        for reader in list(self._readers.values()):
            reader.disconnect()
        self._senders.close()
        for thread in self._closing:
            thread.join(1)
        # Otherwise a thread may still use it.
        if not self._readers and not any(thread.is_alive() for thread in self._closing):
            self.context.destroy(linger=0)

    def has_memory(self) -> bool:
        """Whether anything is registered."""
        return bool(self._memory.buffers)

    def set_device(self) -> None:
        """Set this thread's NPU to that of the buffers."""
        torch.npu.set_device(self._memory.buffers[0].device)


class HcclReader:
    """Reader's side of a link with one peer, for successive reads, last ``used`` at that monotonic
    time. It is discarded after a failure."""

    def __init__(self, engine: HcclEngine, session: str, name: str) -> None:
        self._engine, self._session, self._name = engine, session, name
        self.lock = threading.Lock()
        self.closed = False
        self.used = monotonic()
        self.link: Any = None
        self.client: RpcClient | None = None

    def connect(self, until: float) -> None:
        """Open the link. Raises TransferError, and the link is discarded."""
        try:
            self._raise_if_closed()
            self._engine.set_device()
            if self.link is None:
                self._open(until)
        except Exception as error:
            self._abandon()
            raise _as_transfer_error(error, at_once) from None

    def read(self, remote: list[int], targets: list[torch.Tensor], until: float) -> None:
        """Receive the bytes at the peer's addresses.

        Raises:
            TransferError: and the link is discarded.
        """
        started = False
        try:
            self._raise_if_closed()
            self._engine.set_device()
            sizes = [target.numel() for target in targets]
            connection = self._request(remote, sizes, until)
            assert self.client is not None
            started = True
            for target in targets:
                self.link.recv(target)
            while not self.link.wait(min(POLL_SECONDS, until - monotonic())):
                if monotonic() >= until:
                    cause = f"HCCL did not receive {total_bytes(targets)} bytes in time"
                    raise TransferError("transport", cause)
                if self.client.connection_count() != connection:
                    cause = "the peer closed the connection during an HCCL receive"
                    raise TransferError("peer", cause)
        except Exception as error:
            settled = at_once if self._abandon() or not started else never
            if settled is never:
                _kept.extend(targets)
            raise _as_transfer_error(error, settled) from None

    def _raise_if_closed(self) -> None:
        """Check that the previous read has not discarded this reader, whose link would be lost."""
        if self.closed:
            cause = f"the HCCL link with {self._session} failed in another read"
            raise TransferError("transport", cause)

    def _request(self, remote: list[int], sizes: list[int], until: float) -> int:
        """Let the peer send these bytes, by a new link if it has closed this one; the client's
        ``connection_count`` before."""
        is_known = self.link is not None
        if not is_known:
            self._open(until)
        assert self.client is not None
        connection = self.client.connection_count()
        try:
            self.client.call(Send(self._name, remote, sizes, until - monotonic()), until)
        except TransferError as error:
            if not is_known or str(error) != NOT_CONNECTED or not self._close():
                raise
            return self._request(remote, sizes, until)
        return connection

    def disconnect(self) -> None:
        """Tell the peer to close its side, and close this one."""
        if self.lock.acquire(timeout=2):
            with suppress(TransferError):
                if self.client is not None:
                    self.client.call(Disconnect(self._name), monotonic() + 2)
            self._abandon()
            self.lock.release()

    def _abandon(self) -> bool:
        """Discard the link with all work on it; whether that has succeeded, so that nothing is
        received any more."""
        self.closed = True
        self._engine.forget(self._session, self)
        return self._close()

    def _close(self) -> bool:
        """Destroy the link with all work on it, as far as there is one; whether that has succeeded."""
        client, self.client = self.client, None
        if client is not None:
            client.close()
        link, self.link = self.link, None
        return link is None or self._destroy(link)

    def _open(self, until: float) -> None:
        host, _, port = self._session.rpartition(":")
        self.client = RpcClient(
            CODEC, self._engine.context, host, int(port), REPLY_SECONDS, self._engine.keys
        )
        root = self.client.call(Connect(self._name), until)
        if not isinstance(root, RootInfo):
            raise TransferError("mismatch", f"unexpected reply to Connect: {type(root).__name__}")
        made: Future[Any] = Future()

        def connect() -> None:
            try:
                self._engine.set_device()
                made.set_result(self._engine.link(1, root.info))
            except Exception as error:
                made.set_exception(error)

        threading.Thread(target=connect, name="transfer-hccl", daemon=True).start()
        seconds = max(0.0, min(CONNECT_SECONDS, until - monotonic()))
        if not wait([made], seconds).done:
            made.add_done_callback(self._destroy_late)
            cause = f"HCCL did not connect the two NPUs in {seconds:.3g} s"
            raise TransferError("transport", cause)
        try:
            self.link = made.result()
        except Exception as error:
            cause = f"HCCL cannot connect the two NPUs: {one_line(error)}"
            raise TransferError("transport", cause) from None

    def _destroy_late(self, made: Future[Any]) -> None:
        """Destroy a link that was made too late, in the thread that made it, or in this one if that
        was just now."""
        if made.exception() is None:
            self._destroy(made.result())

    def _destroy(self, link: Any) -> bool:
        """Destroy a link with all work on it; whether that has succeeded."""
        try:
            link.destroy()
        except Exception as error:  # the NPU may have failed
            failed = "HCCL link with %s cannot be destroyed: %s"
            extension.logger.warning(failed, self._session, one_line(error))
            return False
        return True


def _as_transfer_error(error: Exception, settled: Settled) -> TransferError:
    if isinstance(error, TransferError):
        return TransferError(error.kind, one_line(error), settled=settled)
    return TransferError("transport", f"HCCL failed: {one_line(error)}", settled=settled)
