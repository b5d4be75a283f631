"""HCCL as a transport: a read becomes a send on the peer's NPU and a receive on this one.

HCCL has no reads of a peer's memory (Huawei's API reference "HCCL": HcclSend and HcclRecv are paired). So each end listens on a
port of its own, where a reader says what it wants to have sent; whoever asks gets bytes of registered buffers only. The link of
the two is ascend-communicator's: the peer is rank 0, the reader rank 1. It has a stream of its own and ends with all that is on
it, so that nothing on this NPU waits for a peer that is gone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from uuid import uuid4

import torch
import zmq
from ascend_platform import extension

from ascend_kv_connector.control import Caller, ControlServer
from ascend_kv_connector.errors import REST, TransferError
from ascend_kv_connector.keys import Keys
from ascend_kv_connector.protocol import Answer, Meet, Meeting, Noted, Part, Question, Refused, Send

CONNECT = 60.0
"""Seconds that two NPUs may take to find each other, with the first read between them."""

ANSWER = 10.0
"""Seconds that a peer may take to answer one message."""

TICK = 0.05
"""Seconds between two looks whether the peer is still there, while HCCL receives from it."""

SLOT = "hccl.link"


def check() -> None:
    """Look whether ascend-communicator is there.

    Raises:
        RefusedError: it is not, or it is filtered out.
    """
    if extension.offered(SLOT) is None:
        raise extension.RefusedError(
            "transport hccl: HCCL between engines comes with ascend-communicator, which is not active; run: pip install "
            "ascend-communicator, and have ascend_communicator in VLLM_PLUGINS where that is set"
        )


@dataclass
class Sending:
    """The peer's end of a pair, which a thread of its own has: ``ready`` once the two have met, or ``failed``.

    ``work`` is what to send and for how many seconds that may last, and None to end it.
    """

    ready: bool = False
    failed: str = ""
    over: bool = False
    work: queue.SimpleQueue[tuple[torch.Tensor, float] | None] = field(default_factory=queue.SimpleQueue)

    def run(self, make: Callable[[], Any]) -> None:
        """Meet the reader, and send until it is over or has failed."""
        link = None
        try:
            link = make()
            self.ready = True
            while not self.over and (work := self.work.get()) is not None:
                self._send(link, *work)
        except Exception as error:
            self.failed = _line(error)
        with suppress(Exception):  # of an NPU that has failed
            if link is not None:
                link.destroy()

    def _send(self, link: Any, source: torch.Tensor, seconds: float) -> None:
        until = monotonic() + seconds
        link.send(source)
        while not link.wait(TICK):
            if self.over or monotonic() >= until:
                raise TransferError("transport", f"the reader has not taken {source.numel()} bytes in {seconds:.3g} s")

    def end(self) -> None:
        self.over = True
        self.work.put(None)


class HcclTransport:
    """See :class:`~ascend_kv_connector.transport.Transport`; the buffers are on the NPU."""

    name = "hccl"
    on_device = True

    def __init__(self, host: str, protocol: str = "", keys: Keys | None = None) -> None:
        """Listen on a free port of ``host``.

        Raises:
            RefusedError: ascend-communicator is missing, or there is no port to be had.
        """
        check()
        from vllm.utils.import_utils import resolve_obj_by_qualname

        self.link = resolve_obj_by_qualname(extension.offered(SLOT))
        self.keys = keys
        self.context = zmq.Context()
        self._buffers: list[torch.Tensor] = []
        self._reading: dict[str, Pair] = {}
        self._sending: dict[str, Sending] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._server = ControlServer(self._answer, host, keys=keys)
        self.session = f"{host}:{self._server.port}"

    def register(self, buffer: torch.Tensor) -> None:
        self._buffers.append(buffer)

    def read(self, session: str, remote: int, local: int, size: int, seconds: float) -> None:
        until = monotonic() + seconds
        target = self.part(local, size)
        if target is None:
            raise TransferError("transport", "memory that is not registered", rest=0)
        with self._lock:
            if session not in self._reading:
                self._reading[session] = Pair(self, session, f"{self.session}/{uuid4().hex}")
            pair = self._reading[session]
        if not pair.lock.acquire(timeout=seconds):
            raise TransferError("transport", f"other reads from this NPU took {seconds:.3g} s", rest=0)
        try:
            pair.read(remote, target, until)
        finally:
            pair.lock.release()

    def forget(self, session: str, pair: Pair) -> None:
        """The next read from there makes another pair."""
        with self._lock:
            if self._reading.get(session) is pair:
                del self._reading[session]

    def part(self, address: int, size: int) -> torch.Tensor | None:
        """These bytes of a registered buffer; None if they are not of one."""
        for buffer in self._buffers:
            at = address - buffer.data_ptr()
            if at >= 0 and size > 0 and at + size <= buffer.numel():
                return buffer[at : at + size]
        return None

    def close(self) -> None:
        self._server.close()
        for pair in list(self._reading.values()):
            pair.say_goodbye()
        for sending in self._sending.values():
            sending.end()
        for thread in self._threads:
            thread.join(1)
        if not self._reading:  # otherwise a thread still uses it
            self.context.destroy(linger=0)

    def device(self) -> None:
        """Let this thread use the NPU that the buffers are on."""
        torch.npu.set_device(self._buffers[0].device)

    def _answer(self, question: Question) -> Answer:
        match question:
            case Meet(reader=reader):
                return self._meet(reader)
            case Send():
                return self._send(question)
            case Part(reader=reader):
                self._part(reader)
                return Noted()
        return Refused("mismatch", "this port is for HCCL between two NPUs")

    def _meet(self, reader: str) -> Answer:
        if not self._buffers:
            return Refused("transport", "nothing is registered there")
        self.device()
        try:
            for name in [name for name in self._sending if name.partition("/")[0] == reader.partition("/")[0]]:
                self._sending.pop(name).end()  # of a pair that this reader has given up
            info = self.link.root_info()
        except Exception as error:
            return Refused("transport", _line(error))
        sending = self._sending[reader] = Sending()

        def make() -> Any:
            self.device()
            return self.link(0, info)

        thread = threading.Thread(target=sending.run, args=[make], name="kv-hccl", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()
        return Meeting(info)

    def _send(self, asked: Send) -> Answer:
        sending = self._sending.get(asked.reader)
        if sending is None or sending.failed:
            return Refused("transport", sending.failed if sending else "these two have not met")
        if not sending.ready:
            return Refused("transport", "it has not met this NPU yet", again=True)
        source = self.part(asked.address, asked.size)
        if source is None:
            return Refused("transport", f"{asked.size} bytes were asked for that are in no buffer there")
        sending.work.put((source, asked.seconds))
        return Noted()

    def _part(self, reader: str) -> None:
        if sending := self._sending.pop(reader, None):
            sending.end()


class Pair:
    """A reader's end: its link with one peer, for one read after another. After one that has failed it is not used again."""

    def __init__(self, transport: HcclTransport, session: str, name: str) -> None:
        self._of, self._session, self._name = transport, session, name
        self.lock = threading.Lock()
        self.over = False
        self.link: Any = None
        self.caller: Caller | None = None

    def read(self, remote: int, target: torch.Tensor, until: float) -> None:
        """Receive what is at the peer's address.

        Raises:
            TransferError: and the pair is given up.
        """
        started = False
        try:
            if self.over:  # by a read that this one has waited for
                raise TransferError("transport", f"HCCL with {self._session} was given up meanwhile")
            self._of.device()
            if self.link is None:
                self._open(until)
            assert self.caller is not None
            connection = self.caller.connection()
            self.caller.ask(Send(self._name, remote, target.numel(), until - monotonic()), until)
            started = True
            self.link.recv(target)
            while not self.link.wait(min(TICK, until - monotonic())):
                if monotonic() >= until:
                    raise TransferError("transport", f"HCCL has not received {target.numel()} bytes in time")
                if self.caller.connection() != connection:
                    raise TransferError("peer", "it has closed the connection while HCCL received from it")
        except Exception as error:
            self._give_up()
            kind = error.kind if isinstance(error, TransferError) else "transport"
            raise TransferError(kind, _line(error), rest=REST if started else 0) from None

    def say_goodbye(self) -> None:
        """Let the peer end its side, and end this one."""
        if self.lock.acquire(timeout=2):
            with suppress(TransferError):
                if self.caller is not None:
                    self.caller.ask(Part(self._name), monotonic() + 2)
            with suppress(Exception):  # of an NPU that has failed
                self._give_up()
            self.lock.release()

    def _give_up(self) -> None:
        self.over = True
        self._of.forget(self._session, self)
        caller, self.caller = self.caller, None
        if caller is not None:
            caller.close()
        link, self.link = self.link, None
        if link is not None:
            link.destroy()

    def _open(self, until: float) -> None:
        host, _, port = self._session.rpartition(":")
        self.caller = Caller(self._of.context, host, int(port), ANSWER, self._of.keys)
        meeting = self.caller.ask(Meet(self._name), until)
        if not isinstance(meeting, Meeting):
            raise TransferError("mismatch", f"{type(meeting).__name__} is no answer to Meet")
        made: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def connect() -> None:
            try:
                self._of.device()
                made.put(link := self._of.link(1, meeting.info))
                if self.over:  # it comes too late
                    link.destroy()
            except Exception as error:
                made.put(error)

        threading.Thread(target=connect, name="kv-hccl", daemon=True).start()
        seconds = max(0.0, min(CONNECT, until - monotonic()))
        try:
            self.link = made.get(timeout=seconds)
        except queue.Empty:
            raise TransferError("transport", f"HCCL has not connected the two NPUs in {seconds:.3g} s") from None
        if isinstance(self.link, Exception):
            error, self.link = self.link, None
            raise TransferError("transport", f"HCCL cannot connect the two NPUs: {_line(error)}")


def _line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())
