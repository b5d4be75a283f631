"""HCCL as a transport: a read becomes a send on the peer's NPU and a receive on this one.

HCCL has no reads of a peer's memory (Huawei's API reference "HCCL": HcclSend and HcclRecv are paired). So each end listens on a
port of its own, where a reader says what it wants to have sent; whoever asks gets bytes of registered buffers only. The
communicator is ascend-communicator's, and of two ranks: the peer is rank 0, the reader rank 1.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

import torch
import zmq
from ascend_platform import extension

from ascend_kv_connector.control import Caller, ControlServer
from ascend_kv_connector.errors import TransferError
from ascend_kv_connector.keys import Keys
from ascend_kv_connector.protocol import Answer, Meet, Noted, Part, Place, Question, Refused, Send

CONNECT = 60.0
"""Seconds that two NPUs may take to find each other, with the first read between them."""

ANSWER = 10.0
"""Seconds that a peer may take to answer one message."""

SLOT = "hccl.connect"


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
    """The peer's end of a pair: ``comm`` once the two have met, or ``failed``; ``sent`` says whether the last send is over."""

    comm: Any = None
    failed: str = ""
    stream: Any = None
    sent: Callable[[], bool] = field(default=lambda: True)


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

        self.connect = resolve_obj_by_qualname(extension.offered(SLOT))
        self.host, self.keys = host, keys
        self.context = zmq.Context()
        self._buffers: list[torch.Tensor] = []
        self._reading: dict[str, Pair] = {}
        self._sending: dict[str, Sending] = {}
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

    def part(self, address: int, size: int) -> torch.Tensor | None:
        """These bytes of a registered buffer; None if they are not of one."""
        for buffer in self._buffers:
            at = address - buffer.data_ptr()
            if at >= 0 and size > 0 and at + size <= buffer.numel():
                return buffer[at : at + size]
        return None

    def close(self) -> None:
        self._server.close()
        pairs = list(self._reading.values())
        for pair in pairs:
            pair.say_goodbye()
        sendings = list(self._sending.values())
        # to end a communicator waits for the NPU, which may have a send or a receive that never ends
        with suppress(Exception):
            if all(sending.sent() for sending in sendings) and not any(pair.over for pair in pairs):
                for end in [*pairs, *sendings]:
                    if end.comm is not None:
                        end.comm.destroy()
        if all(pair.caller is None for pair in pairs):
            self.context.destroy(linger=0)

    def device(self) -> None:
        """Let this thread use the NPU that the buffers are on."""
        torch.npu.set_device(self._buffers[0].device)

    def _answer(self, question: Question) -> Answer:
        match question:
            case Meet(reader=reader, seconds=seconds):
                return self._meet(reader, seconds)
            case Send(reader=reader, address=address, size=size):
                return self._send(reader, address, size)
            case Part(reader=reader):
                self._part(reader)
                return Noted()
        return Refused("mismatch", "this port is for HCCL between two NPUs")

    def _meet(self, reader: str, seconds: float) -> Answer:
        if reader in self._sending or not self._buffers:
            return Refused("transport", "these two have met before" if self._buffers else "nothing is registered there")
        with socket.create_server((self.host, 0), family=socket.AF_INET6 if ":" in self.host else socket.AF_INET) as free:
            port = free.getsockname()[1]
        sending = self._sending[reader] = Sending()

        def connect() -> None:
            try:
                self.device()
                comm = self.connect(self.host, port, 0, 2, max(1, int(min(seconds, CONNECT))))
                sending.stream = torch.npu.Stream()
                sending.comm = comm
            except Exception as error:
                sending.failed = _line(error)

        threading.Thread(target=connect, name="kv-hccl", daemon=True).start()
        return Place(self.host, port)

    def _send(self, reader: str, address: int, size: int) -> Answer:
        sending = self._sending.get(reader)
        if sending is None or sending.failed:
            return Refused("transport", sending.failed if sending else "these two have not met")
        if sending.comm is None:
            return Refused("transport", "it has not met this NPU yet", again=True)
        source = self.part(address, size)
        if source is None:
            return Refused("transport", f"{size} bytes were asked for that are in no buffer there")
        if not sending.sent():
            return Refused("transport", "an earlier send to this NPU has not ended")
        self.device()
        try:
            sending.comm.send(source, 1, stream=sending.stream)
            event = torch.npu.Event()
            event.record(sending.stream)
        except Exception as error:
            sending.failed = _line(error)
            return Refused("transport", sending.failed)
        sending.sent = event.query
        return Noted()

    def _part(self, reader: str) -> None:
        sending = self._sending.get(reader)
        if sending and sending.comm and sending.sent() and all(each.sent() for each in self._sending.values()):
            self.device()
            sending.comm.destroy()
            del self._sending[reader]


class Pair:
    """A reader's end: its communicator with one peer, for one read after another; once given up it is never used again."""

    def __init__(self, transport: HcclTransport, session: str, name: str) -> None:
        self._of, self._session, self._name = transport, session, name
        self.lock = threading.Lock()
        self.over = ""
        self.comm: Any = None
        self.caller: Caller | None = None
        self._stream: Any = None

    def read(self, remote: int, target: torch.Tensor, until: float) -> None:
        """Receive what is at the peer's address.

        Raises:
            TransferError: the pair is given up, with this read or an earlier one.
        """
        if self.over:
            cause = f"HCCL with {self._session} was given up: {self.over}"
            raise TransferError("transport", cause, "restart one of the two instances", rest=0)
        started = False
        try:
            self._of.device()
            if self.comm is None:
                self._open(until)
            assert self.caller is not None
            connection = self.caller.connection()
            self.caller.ask(Send(self._name, remote, target.numel()), until)
            started = True
            self.comm.recv(target, 0, stream=self._stream)
            event = torch.npu.Event()
            event.record(self._stream)
            pause = 0.0001
            while not event.query():
                if monotonic() >= until:
                    raise TransferError("transport", f"HCCL has not received {target.numel()} bytes in time")
                if self.caller.connection() != connection:
                    raise TransferError("transport", "the peer has closed the connection while HCCL received from it")
                sleep(pause)
                pause = min(2 * pause, 0.002)
            self._stream.synchronize()  # raises what has failed on it
        except Exception as error:
            self.over = _line(error)
            kind = error.kind if isinstance(error, TransferError) else "transport"
            raise TransferError(kind, self.over, rest=inf if started else 0) from None

    def say_goodbye(self) -> None:
        """Let the peer end its communicator, and close the connection."""
        if self.caller is not None and self.lock.acquire(timeout=2):
            with suppress(TransferError):
                if self.comm is not None and not self.over:
                    self.caller.ask(Part(self._name), monotonic() + 2)
            self.caller.close()
            self.caller = None
            self.lock.release()

    def _open(self, until: float) -> None:
        host, _, port = self._session.rpartition(":")
        self.caller = Caller(self._of.context, host, int(port), ANSWER, self._of.keys)
        seconds = min(CONNECT, until - monotonic())
        place = self.caller.ask(Meet(self._name, seconds), until)
        if not isinstance(place, Place):
            raise TransferError("mismatch", f"{type(place).__name__} is no answer to Meet")
        made: list[Any] = []

        def connect() -> None:
            try:
                self._of.device()
                made.append(self._of.connect(place.host, place.port, 1, 2, max(1, int(seconds))))
            except Exception as error:
                made.append(error)

        thread = threading.Thread(target=connect, name="kv-hccl", daemon=True)
        thread.start()
        thread.join(seconds)
        if not made:
            raise TransferError("transport", f"HCCL has not connected the two NPUs in {seconds:.3g} s")
        if isinstance(made[0], Exception):
            raise TransferError("transport", f"HCCL cannot connect the two NPUs: {_line(made[0])}")
        self.comm, self._stream = made[0], torch.npu.Stream()


def _line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())
