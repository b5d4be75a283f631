# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Request/reply over ZMQ with msgpack messages of known types: a server thread, and clients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec
import zmq
from ascend_platform.extension import RefusedError, logger
from zmq.utils.monitor import recv_monitor_message

from ascend_transfer.auth import CurveKeys
from ascend_transfer.errors import KINDS, Kind, TransferError, printable
from ascend_transfer.messages import LONGEST_MESSAGE, Codec, Message, Refused
from ascend_transfer.query_queue import BusyError, QueryQueue, ReceivedQuery

MAX_PORT = 65535
MAX_CONNECT_ATTEMPTS = 5
"""Connection attempts, 0.1 s apart, before a peer counts as unreachable."""

AUTH_FAILED = (
    "authentication failed: the secrets differ or only one instance has one; give both the same"
    " secret_file"
)

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

HANDSHAKES = HANDSHAKE_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED

HANDSHAKE_MS = 5000
"""Milliseconds after which a server closes a connection without a complete handshake: anyone can
open them, and each takes a file of the process. ZMQ's default is 30 s."""

POLL_MS = 100
"""Milliseconds between checks of whether a wait should end."""


MAX_SOCKETS = 16_384

MAX_CLIENTS = 128
"""Connections of one thread; beyond that the one that was not used for longest is closed."""

IDLE_SECONDS = 60.0
"""Seconds after which an unused connection is closed, because its peer may have ended."""

QUEUE_POLL_MS = 5
"""The same while queries wait for a buffer, whose loan may expire."""


def endpoint_url(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _too_long(message: Message, content: bytes) -> str:
    return f"a {type(message).__name__} of {len(content)} bytes; the most is {LONGEST_MESSAGE}"


class NotYetError(TransferError):
    """The peer has refused a query for as long as it was tried, and may not do so later."""


class RpcServer:
    """Answers queries one after another by ``handler``, in a thread of its own."""

    def __init__(
        self,
        codec: Codec,
        handler: Callable[[Any], Message],
        host: str,
        port: int | range = 0,
        keys: CurveKeys | None = None,
        waiting: QueryQueue | None = None,
    ) -> None:
        """Listen on a port, on any free one if it is 0, or on the first free one of a range.

        With keys only authenticated clients are accepted.

        Queries for which the handler raises BusyError are kept in ``waiting``.

        Raises:
            RefusedError: the port or address is not available.
        """
        self._codec, self._handler, self.host = codec, handler, host
        self._waiting = QueryQueue(5.0) if waiting is None else waiting
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_MESSAGE)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._authenticator = keys.configure_server(self._socket) if keys else None
        try:
            self._bind(range(port, port + 1) if isinstance(port, int) else port)
        except RefusedError:
            self._close()
            raise
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="transfer-rpc", daemon=True)
        self._thread.start()

    def _bind(self, ports: range) -> None:
        change = "change kv_port, or host or ports in kv_connector_extra_config"
        if ports[-1] > MAX_PORT:  # ZeroMQ would take the port modulo 65536.
            raise RefusedError(
                f"cannot listen on {self.host}:{ports[-1]}; supported: ports up to {MAX_PORT}, of which"
                f" each rank takes one; fix: {change}"
            )
        for port in ports:
            try:
                url = endpoint_url(self.host, port)
                self._socket.bind(url if port else f"{url[:-1]}*")
                return
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE and port != ports[-1]:
                    continue
                which = f"{ports[0]} to {port}" if port != ports[0] else str(port)
                raise RefusedError(
                    f"cannot listen on {self.host}:{which} ({error}); fix: {change}, or the model"
                    " loader's host"
                ) from None

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        # Otherwise it still uses the socket, which is closed with the process.
        if not self._thread.is_alive():
            self._close()

    def _close(self) -> None:
        if self._authenticator:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(QUEUE_POLL_MS if len(self._waiting) else POLL_MS):
                self._receive(self._socket.recv_multipart())
            self._waiting.serve(self._answer)

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            return
        sender, request_id, content = frames

        def reply(message: Message) -> None:
            # the peer would close the connection
            if len(content := self._codec.encode(message)) > LONGEST_MESSAGE:
                content = self._codec.encode(Refused("mismatch", _too_long(message, content)))
            self._socket.send_multipart([sender, request_id, content])

        try:
            query = self._codec.decode_query(content)
        except (ValueError, msgspec.MsgspecError) as error:
            reply(Refused("mismatch", f"the peer received an invalid message: {error}"))
            return
        try:
            answer = self._answer(query)
        except BusyError as error:
            self._waiting.add(error, ReceivedQuery(query, reply))
        else:
            reply(answer)

    def _answer(self, query: Message) -> Message:
        try:
            return self._handler(query)
        except BusyError:
            raise
        except TransferError as error:
            return Refused(error.kind, str(error))
        except Exception as error:
            cause = printable(f"{type(error).__name__}: {error}")
            logger.warning("transfer: error while answering a peer: %s", cause)
            return Refused("internal", cause)


def make_context() -> zmq.Context:
    """Context for clients; a client takes three of its sockets, and ZMQ's default is 1023."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, min(MAX_SOCKETS, context.get(zmq.SOCKET_LIMIT)))
    return context


class RpcClient:
    """Client of one rank for one thread; only the latest query's reply is awaited. It was sent not
    before ``sent_at``."""

    def __init__(
        self,
        codec: Codec,
        context: zmq.Context,
        host: str,
        port: int,
        answer_timeout: float,
        keys: CurveKeys | None = None,
    ) -> None:
        self.peer, self._codec = printable(f"{host}:{port}"), codec
        self._timeout = answer_timeout
        self._socket = context.socket(zmq.DEALER)
        # This allows a final Release to be sent in the background.
        self._socket.setsockopt(zmq.LINGER, 2000)
        # Otherwise a send waits forever once the queue is full.
        self._socket.setsockopt(zmq.SNDTIMEO, int(answer_timeout * 1000))
        self._socket.setsockopt(zmq.IPV6, int(":" in host))
        self._socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_MESSAGE)
        if keys:
            keys.configure_client(self._socket)
        watched = (
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | HANDSHAKES
        )
        self._monitor = self._socket.get_monitor_socket(watched)
        self._poller = zmq.Poller()
        for socket in (self._socket, self._monitor):
            self._poller.register(socket, zmq.POLLIN)
        self._socket.connect(endpoint_url(host, port))
        self._request_id = self._attempts = self._disconnects = self._handshake_failures = 0
        self._rejected = False
        self.sent, self.sent_at = 0, 0.0

    def send(self, query: Message) -> int:
        """Send a query and discard replies to earlier ones; returns a request id for
        :meth:`receive`.

        Raises:
            TransferError: the peer has rejected this client, or takes no more messages.
        """
        while self._socket.poll(0):
            self._socket.recv_multipart()
        self.connection_count()
        self._attempts = 0
        self._request_id += 1
        self.sent_at = monotonic()
        self._send(str(self._request_id).encode(), query)
        return self._request_id

    def post(self, query: Message) -> None:
        """Send a query whose reply is not awaited; one to an earlier query still is.

        Raises:
            TransferError: as :meth:`send`.
        """
        self._send(b"", query)

    def _send(self, request_id: bytes, query: Message) -> None:
        self._raise_if_rejected()
        # the peer would close the connection
        if len(content := self._codec.encode(query)) > LONGEST_MESSAGE:
            raise TransferError("mismatch", _too_long(query, content))
        self.sent += 1
        try:
            self._socket.send_multipart([request_id, content])
        except zmq.Again:
            self.connection_count()
            self._raise_if_rejected()
            raise TransferError("peer", f"it took no message in {self._timeout:g} s") from None

    def receive(
        self, request_id: int, deadline: float, check: Callable[[], object] = lambda: None
    ) -> Message:
        """The reply to this query; replies to earlier ones are discarded. ``deadline`` is monotonic
        time.

        ``check`` is called every 0.1 s and may raise.

        Raises:
            TransferError: no reply in time, or an invalid one.
        """
        began = monotonic()
        until = min(deadline, began + self._timeout)
        while monotonic() < until:
            milliseconds = max(1, min(POLL_MS, int((until - monotonic()) * 1000)))
            if self._socket not in dict(self._poller.poll(milliseconds)):
                check()
                self._check_connection()
                continue
            frames = self._socket.recv_multipart()
            if len(frames) == 2 and frames[0] == str(request_id).encode():
                try:
                    return self._codec.decode_reply(frames[1])
                except msgspec.MsgspecError as error:
                    raise TransferError("mismatch", f"invalid reply: {error}") from None
        kind: Kind = "peer" if until < deadline else "deadline"
        raise TransferError(kind, f"no answer in {max(0.0, until - began):.2g} s")

    def connection_count(self) -> int:
        """Number of times the connection was lost; if it changed, another process may be listening
        at the address."""
        while self._monitor.poll(0):
            self._next_event()
        return self._disconnects

    def _next_event(self) -> int:
        """Read and count one event of the connection.

        ZMQ gives up a connection whose security mechanism or keys do not fit, so that event, which
        may come before the first query, comes once. A handshake that ends without detail is
        repeated, and may also be a peer that is exiting.
        """
        event = int(recv_monitor_message(self._monitor)["event"])
        if event & HANDSHAKE_FAILED:
            self._handshake_failures += 1
            if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or self._handshake_failures > 1:
                self._rejected = True
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._handshake_failures = 0
        elif event == zmq.EVENT_DISCONNECTED:
            self._disconnects += 1
        return event

    def _raise_if_rejected(self) -> None:
        if self._rejected:
            raise TransferError("peer", AUTH_FAILED)

    def _check_connection(self) -> None:
        """Detect lost connections; ZMQ itself reconnects forever.

        Raises:
            TransferError: nothing listens at the address, or the connection was closed after the
                query was sent.
        """
        while self._monitor.poll(0):
            event = self._next_event()
            self._raise_if_rejected()
            if event & HANDSHAKE_FAILED:
                continue
            if event == zmq.EVENT_DISCONNECTED and not self._handshake_failures:
                raise TransferError("peer", "the peer closed the connection")
            self._attempts = self._attempts + 1 if event == zmq.EVENT_CONNECT_RETRIED else 0
            if self._attempts >= MAX_CONNECT_ATTEMPTS:
                cause = f"nothing listens at its address ({MAX_CONNECT_ATTEMPTS} attempts)"
                raise TransferError("peer", cause)

    def call(self, query: Message, deadline: float) -> Message:
        """Send a query and await its reply, retrying while the peer asks for it.

        Raises:
            TransferError: as :meth:`receive`, or the peer refused.
        """
        return self.await_reply(self.send(query), query, deadline)

    def await_reply(
        self,
        request_id: int,
        query: Message,
        deadline: float,
        retry_seconds: float | None = None,
        max_pause: float = 0.1,
        check: Callable[[], object] = lambda: None,
    ) -> Message:
        """Await the reply to a query that was sent, as :meth:`call` does.

        Refused replies with ``again`` are retried for ``retry_seconds`` seconds, by default the
        answer timeout; ``queued`` ones until the deadline.
        """
        pause, first = 0.002, monotonic()
        retry_seconds = self._timeout if retry_seconds is None else retry_seconds
        while True:
            reply = self.receive(request_id, deadline, check)
            check()
            if not isinstance(reply, Refused):
                return reply
            if reply.queued and monotonic() < deadline:
                request_id = self.send(query)
                continue
            now = monotonic()
            if not reply.again or now - first > retry_seconds or now + pause > deadline:
                waited = f" (for {now - first:.2g} s)" if reply.again else ""
                failure = NotYetError if reply.again else TransferError
                kind = reply.kind if reply.kind in KINDS else "mismatch"
                raise failure(kind, f"{printable(reply.cause)}{waited}")
            threading.Event().wait(pause)
            pause = min(2 * pause, max_pause)
            request_id = self.send(query)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()


class ClientPool:
    """Clients of one thread, by address; ``on_close(address)`` is called for each that
    is closed."""

    def __init__(
        self,
        codec: Codec,
        context: zmq.Context,
        answer_timeout: float,
        keys: CurveKeys | None = None,
        on_close: Callable[[tuple[str, int]], object] = lambda address: None,
    ) -> None:
        self._make = lambda address: RpcClient(
            codec, context, address[0], address[1], answer_timeout, keys
        )
        self._on_close = on_close
        self._sent = 0  # by clients that are closed
        # With the time of their last use, oldest first.
        self._clients: dict[tuple[str, int], tuple[RpcClient, float]] = {}

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def sent(self) -> int:
        """Number of messages sent."""
        return self._sent + sum(client.sent for client, _ in self._clients.values())

    def get(self, address: tuple[str, int]) -> RpcClient:
        """The client of an address.

        Raises:
            TransferError: the address is not valid.
        """
        client, _ = self._clients.pop(address, (None, 0.0))
        if client is None:
            self.close_idle()
            while len(self._clients) >= MAX_CLIENTS:
                self.close(next(iter(self._clients)))
            try:
                client = self._make(address)
            except zmq.ZMQError as error:
                cause = f"cannot connect to {printable(address[0])}:{address[1]} ({error})"
                raise TransferError("peer", cause) from None
        self._clients[address] = client, monotonic()
        return client

    def close(self, address: tuple[str, int]) -> None:
        """Close an address's client, if any."""
        client, _ = self._clients.pop(address, (None, 0.0))
        if client is not None:
            client.close()
            self._sent += client.sent
            self._on_close(address)

    def close_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Close the clients that were not used for this long."""
        for address, (_, used) in list(self._clients.items()):
            if monotonic() - used >= seconds:
                self.close(address)
