# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sending side of HCCL as an engine: messages between reader and peer, and a thread for each link."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Annotated, Any, Protocol

import msgspec
import torch
from ascend_transfer.errors import TransferError, one_line
from ascend_transfer.messages import Ack, Codec, Message, Refused

POLL_SECONDS = 0.05
"""Interval of checks that the peer is alive while HCCL sends or receives."""

IDLE_SECONDS = 300.0
"""A link that was not used for this long is closed when another one is opened: its peer may have
ended, and HCCL's buffers use memory of the NPU. If the peer is alive, its next read opens a new
link."""

MAX_SEND_SECONDS = 600.0
"""Longest time for a send, whatever its reader says."""

MAX_QUEUED = 64
"""Sends that may wait on a link: a reader has one at a time."""

MAX_LINKS = 256
"""Links to readers, each with a thread and a rank of HCCL; beyond that the one that was not used for
longest is closed, unless it sends."""

MAX_CONNECTING = 32
"""Links whose reader has not connected; further readers are told to try again."""

NOT_CONNECTED = "the link is not connected"
"""Cause of a refusal after which a reader opens a new link."""


class Connect(Message, frozen=True):
    """Establish a link with ``reader``, a link's name. Reply: RootInfo."""

    reader: str


class RootInfo(Message, frozen=True):
    """HCCL root info; the replying side is rank 0, the reader rank 1."""

    info: bytes


class Send(Message, frozen=True):
    """Send these runs of registered memory to ``reader``, which receives them next. Reply: Ack.

    The send may take ``seconds``.
    """

    reader: str
    addresses: list[int]
    sizes: list[int]
    seconds: Annotated[float, msgspec.Meta(ge=0)]


class Disconnect(Message, frozen=True):
    """``reader`` receives nothing more. Reply: Ack."""

    reader: str


CODEC = Codec(Connect | Send | Disconnect, RootInfo | Ack | Refused)


@dataclass
class HcclSender:
    """Peer's side of a link, in a thread of its own: ``ready`` once connected, or ``failed``;
    ``used`` until then, in monotonic seconds.

    ``work`` has tensors to send with their timeouts in seconds; None ends the thread.
    """

    ready: bool = False
    failed: str = ""
    closed: bool = False
    used: float = field(default_factory=monotonic)
    work: queue.SimpleQueue[tuple[list[torch.Tensor], float] | None] = field(
        default_factory=queue.SimpleQueue
    )

    def run(self, make: Callable[[], Any]) -> None:
        """Connect to the reader, and send until closed or failed."""
        link = None
        try:
            link = make()
            self.ready = True
            while not self.closed and (work := self.work.get()) is not None:
                self._send(link, *work)
                self.used = monotonic()
        except Exception as error:
            self.failed = one_line(error)
        with suppress(Exception):  # the NPU may have failed
            if link is not None:
                link.destroy()

    def _send(self, link: Any, sources: list[torch.Tensor], seconds: float) -> None:
        until = monotonic() + seconds
        for source in sources:
            link.send(source)
        while not link.wait(POLL_SECONDS):
            if self.closed or monotonic() >= until:
                cause = (
                    f"the reader did not receive {total_bytes(sources)} bytes in {seconds:.3g} s"
                )
                raise TransferError("transport", cause)

    def is_idle(self, seconds: float) -> bool:
        """Whether it sends nothing, and has not for this long."""
        return self.ready and self.work.empty() and monotonic() - self.used > seconds

    def end(self) -> None:
        self.closed = True
        self.work.put(None)


class EngineView(Protocol):
    """The part of :class:`~ascend_communicator.hccl_engine.HcclEngine` that links use."""

    link: Any

    def has_memory(self) -> bool: ...

    def set_device(self) -> None: ...

    def registered_slices(
        self, addresses: list[int], sizes: list[int]
    ) -> list[torch.Tensor] | None: ...


class HcclSenders:
    """Links to readers; the methods are called by the engine's server thread."""

    def __init__(self, engine: EngineView) -> None:
        self._engine = engine
        self._senders: dict[str, HcclSender] = {}
        self._threads: dict[threading.Thread, HcclSender] = {}

    def answer(self, query: Message) -> Message:
        match query:
            case Connect(reader=reader):
                return self._connect(reader)
            case Send():
                return self._send(query)
            case Disconnect(reader=reader):
                if sending := self._senders.pop(reader, None):
                    sending.end()
                return Ack()
        return Refused("mismatch", "not a message of an HCCL reader")

    def close(self) -> None:
        """End all links, and wait for their threads, two seconds for all."""
        for sending in self._senders.values():
            sending.end()
        until = monotonic() + 2
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))

    def _connect(self, reader: str) -> Message:
        if not self._engine.has_memory():
            return Refused("transport", "the peer has no registered memory")
        self._engine.set_device()
        try:
            of_reader = reader.partition("/")[0]
            for name, sending in list(self._senders.items()):
                # A link that this reader discarded, or whose reader may be gone.
                is_over = sending.failed or sending.is_idle(IDLE_SECONDS)
                if is_over or name.partition("/")[0] == of_reader:
                    self._senders.pop(name).end()
            if refused := self._limit_links():
                return refused
            info = self._engine.link.root_info()
        except Exception as error:
            return Refused("transport", one_line(error))
        sending = HcclSender()

        def make() -> Any:
            self._engine.set_device()
            return self._engine.link(0, info)

        thread = threading.Thread(
            target=sending.run, args=[make], name="transfer-hccl", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # too many processes and threads
            return Refused("transport", one_line(error))
        self._threads[thread] = sending
        self._senders[reader] = sending
        return RootInfo(info)

    def _limit_links(self) -> Refused | None:
        """Make a link possible, or say why there are too many."""
        self._threads = {
            thread: sending for thread, sending in self._threads.items() if thread.is_alive()
        }
        # Also for readers that have been dropped.
        if sum(not each.ready for each in self._threads.values()) >= MAX_CONNECTING:
            return Refused("transport", f"{MAX_CONNECTING} links are still connecting", again=True)
        while len(self._senders) >= MAX_LINKS:
            idle = {name: each.used for name, each in self._senders.items() if each.is_idle(0.0)}
            if not idle:
                return Refused("transport", f"{MAX_LINKS} links are in use", again=True)
            self._senders.pop(min(idle, key=idle.__getitem__)).end()
        return None

    def _send(self, message: Send) -> Message:
        sending = self._senders.get(message.reader)
        if sending is None or sending.failed:
            return Refused("transport", sending.failed if sending else NOT_CONNECTED)
        if not sending.ready:
            return Refused("transport", "the link is still connecting", again=True)
        if sending.work.qsize() >= MAX_QUEUED:
            return Refused("transport", f"{MAX_QUEUED} sends wait on the link", again=True)
        same = len(message.addresses) == len(message.sizes)
        sources = self._engine.registered_slices(message.addresses, message.sizes) if same else None
        if not sources:
            cause = (
                f"{sum(message.sizes)} bytes were requested outside of the peer's registered memory"
            )
            return Refused("transport", cause)
        seconds = min(message.seconds, MAX_SEND_SECONDS)
        sending.used = monotonic() + seconds
        sending.work.put((sources, seconds))
        return Ack()


def total_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of uint8 tensors."""
    return sum(tensor.numel() for tensor in tensors)
