"""Questions and answers of protocol.py over zmq: a thread that answers on the producer's side, a caller on the consumer's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import msgspec
import zmq
from ascend_platform import extension
from zmq.utils.monitor import recv_monitor_message

from ascend_kv_connector import protocol
from ascend_kv_connector.errors import KINDS, TransferError
from ascend_kv_connector.keys import Keys
from ascend_kv_connector.protocol import Answer, Question, Refused

ATTEMPTS = 5
"""To connect, a tenth of a second apart, before a peer counts as not there."""

STRANGER = "it does not take this instance's secret, or only one of the two has one; give both the same secret_file"

HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

TICK = 100
"""Milliseconds after which a wait looks whether it should end."""


def url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class ControlServer:
    """Answers each question by ``answer``, one after another, in a thread of its own."""

    def __init__(self, answer: Callable[[Question], Answer], host: str, port: int = 0, keys: Keys | None = None) -> None:
        """Listen on a port, on any free one if it is 0; with keys to those who have them.

        Raises:
            RefusedError: the port or the address cannot be had.
        """
        self._answer, self.host = answer, host
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._socket.setsockopt(zmq.MAXMSGSIZE, protocol.LONGEST_MESSAGE)
        self._guard = keys.answer(self._socket) if keys else None
        try:
            self._socket.bind(url(host, port).replace(":0", ":*") if port == 0 else url(host, port))
        except zmq.ZMQError as error:
            self._end()
            raise extension.RefusedError(
                f"KV connector: cannot listen on {host}:{port} ({error}); give another kv_port, or another host in "
                "kv_connector_extra_config"
            ) from None
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        self._end()

    def _end(self) -> None:
        if self._guard:
            self._guard.stop()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(TICK):
                continue
            frames = self._socket.recv_multipart()
            try:
                sender, number, content = frames
                reply: Answer = self._answer(protocol.decode_question(content))
            except (ValueError, msgspec.MsgspecError) as error:
                if len(frames) != 3:
                    continue
                reply = Refused("mismatch", f"a message that it does not understand: {error}")
            except TransferError as error:
                reply = Refused(error.kind, str(error))
            except Exception as error:
                extension.logger.warning("KV connector: cannot answer a peer: %s: %s", type(error).__name__, error)
                reply = Refused("internal", f"{type(error).__name__}: {error}")
            self._socket.send_multipart([sender, number, protocol.encode(reply)])


class Caller:
    """One thread's questions to one rank, of which the last is the one whose answer is waited for."""

    def __init__(self, context: zmq.Context, host: str, port: int, answer_timeout: float, keys: Keys | None = None) -> None:
        self.peer = f"{host}:{port}"
        self._timeout = answer_timeout
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 2000)  # a last Release still goes out, in the background
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._socket.setsockopt(zmq.MAXMSGSIZE, protocol.LONGEST_MESSAGE)
        if keys:
            keys.ask(self._socket)
        watched = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | HANDSHAKES
        self._monitor = self._socket.get_monitor_socket(watched)
        self._poller = zmq.Poller()
        for socket in (self._socket, self._monitor):
            self._poller.register(socket, zmq.POLLIN)
        self._socket.connect(url(host, port))
        self._number = self._attempts = self._connections = self._strange = 0

    def send(self, question: Question) -> int:
        """Ask, and drop the answers to earlier questions; the number is for :meth:`receive`."""
        while self._socket.poll(0):
            self._socket.recv_multipart()
        self.connection()
        self._attempts = self._strange = 0
        self._number += 1
        self._socket.send_multipart([str(self._number).encode(), protocol.encode(question)])
        return self._number

    def receive(self, number: int, deadline: float) -> Answer:
        """The answer to that question; those to earlier ones are dropped. ``deadline`` is monotonic time.

        Raises:
            TransferError: no answer in time, or one that is not understood.
        """
        began = monotonic()
        until = min(deadline, began + self._timeout)
        while monotonic() < until:
            if self._socket not in dict(self._poller.poll(max(1, min(TICK, int((until - monotonic()) * 1000))))):
                self._look_at_connection()
                continue
            frames = self._socket.recv_multipart()
            if len(frames) == 2 and frames[0] == str(number).encode():
                try:
                    return protocol.decode_answer(frames[1])
                except msgspec.MsgspecError as error:
                    raise TransferError("mismatch", f"an answer that is not understood: {error}") from None
        raise TransferError("peer", f"no answer in {monotonic() - began:.2g} s")

    def connection(self) -> int:
        """Another number after each time that the connection was lost: it may be another peer that is there now."""
        while self._monitor.poll(0):
            self._connections += recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED
        return self._connections

    def _look_at_connection(self) -> None:
        """zmq itself goes on trying to connect for ever.

        Raises:
            TransferError: nobody listens there, or the connection has ended since the question was sent.
        """
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event & HANDSHAKES:  # one without detail is also what a peer leaves that ends meanwhile
                self._strange += 1
                if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or self._strange > 1:
                    raise TransferError("peer", STRANGER)
                continue
            if event == zmq.EVENT_DISCONNECTED:
                self._connections += 1
                if not self._strange:
                    raise TransferError("peer", "it has closed the connection")
            self._attempts = self._attempts + 1 if event == zmq.EVENT_CONNECT_RETRIED else 0
            if self._attempts >= ATTEMPTS:
                raise TransferError("peer", f"it does not listen ({ATTEMPTS} attempts)")

    def ask(self, question: Question, deadline: float) -> Answer:
        """Ask, and ask anew while the peer says so.

        Raises:
            TransferError: as :meth:`receive`, and what the peer refuses.
        """
        return self.settle(self.send(question), question, deadline)

    def settle(
        self, number: int, question: Question, deadline: float, patience: float | None = None, longest_pause: float = 0.1
    ) -> Answer:
        """Like :meth:`ask`, for a question that has been sent. It is asked anew for ``patience`` seconds, else for as long as an
        answer may take."""
        pause, first = 0.002, monotonic()
        patience = self._timeout if patience is None else patience
        while True:
            answer = self.receive(number, deadline)
            if not isinstance(answer, Refused):
                return answer
            if not answer.again or monotonic() - first > patience or monotonic() + pause > deadline:
                waited = f" ({monotonic() - first:.2g} s long)" if answer.again else ""
                raise TransferError(answer.kind if answer.kind in KINDS else "internal", f"{answer.cause}{waited}")
            threading.Event().wait(pause)
            pause = min(2 * pause, longest_pause)
            number = self.send(question)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
