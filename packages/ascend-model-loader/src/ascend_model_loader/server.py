"""The loading server of an engine that has opted in: one thread accepts, and one for each connection sends pieces."""

import atexit
import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
from ascend_platform import extension

from ascend_model_loader import identity, registry, transports, wire
from ascend_model_loader.options import Options
from ascend_model_loader.state import PIECE, Copier, describe, layout_of, own_stream

HANDSHAKE = 10.0
"""Seconds that a client has to prove that it knows the secret."""

logger = extension.logger


class Gate:
    """Open while the weights can be read; ``shut`` returns once nobody reads."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._open, self._readers = False, 0

    def open(self) -> None:
        with self._state:
            self._open = True

    def shut(self, timeout: float) -> bool:
        """Whether all readers have left in time."""
        with self._state:
            self._open = False
            return self._state.wait_for(lambda: not self._readers, timeout)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While the gate is open.

        Raises:
            PeerError: it is shut.
        """
        with self._state:
            if not self._open:
                raise wire.PeerError("the engine is asleep or does not serve yet")
            self._readers += 1
        try:
            yield
        finally:
            with self._state:
                self._readers -= 1
                self._state.notify_all()


class Throttle:
    """Lets so many bytes a second through, of all connections together; None lets all through."""

    def __init__(self, rate: float | None) -> None:
        self._rate, self._lock, self._free = rate, threading.Lock(), 0.0

    def take(self, size: int) -> None:
        if self._rate is None:
            return
        with self._lock:
            begin = max(self._free, time.monotonic())
            self._free = begin + size / self._rate
        time.sleep(max(0.0, begin - time.monotonic()))


class WeightServer:
    """Serves tensors with the checksums that they had when they were loaded.

    A client compares what it gets with these: weights that have changed since are not taken.

    Args:
        tensors: plain ones, by name, on ``device`` or on the host.
        digests: of the pieces, by ``options.checksum``.
        rank: of this worker in its engine, which is added to the port.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        digests: Sequence[bytes],
        described: Mapping[str, str],
        options: Options,
        secret: bytes,
        device: torch.device,
        rank: int = 0,
    ) -> None:
        self.gate = Gate()
        self._tensors, self._layout = list(tensors.values()), layout_of(tensors)
        self._identity = dict(described)
        self._manifest = wire.Described(self._identity, describe(tensors), PIECE, options.checksum, [*digests])
        self._options, self._secret, self._device = options, secret, device
        self._throttle = Throttle(options.max_bytes_per_second)
        self._connections: set[socket.socket] = set()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._lease: registry.Lease | None = None
        self._listening = socket.create_server(
            (options.host, options.port + rank if options.port else 0),
            family=socket.AF_INET6 if ":" in options.host else socket.AF_INET,
            backlog=options.max_connections,
        )
        self.port = int(self._listening.getsockname()[1])

    @property
    def address(self) -> str:
        host = self._options.host
        if host in ("", "0.0.0.0", "::"):
            host = socket.getfqdn()
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def start(self) -> None:
        """Accept connections, and open the gate."""
        self.gate.open()
        threading.Thread(target=self._accept, name="weights", daemon=True).start()
        if self._options.registry:
            try:
                self._lease = registry.Lease(self._options.registry, identity.key(self._identity), self.address)
            except OSError as error:
                logger.warning("weights served at %s are not in the registry: %s", self.address, error)
        logger.info("serving %.2f GB of weights at %s", self._layout.total / 1e9, self.address)

    def stop(self) -> None:
        """End all connections."""
        self._ended.set()
        if self._lease:
            self._lease.end()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        beat = 0.0
        while not self._ended.is_set():
            try:
                ready, _, _ = select.select([self._listening], [], [], 1.0)
                if self._lease and time.monotonic() > beat:
                    self._lease.renew()
                    beat = time.monotonic() + registry.HEARTBEAT
                if not ready:
                    continue
                connection, _ = self._listening.accept()
            except (OSError, ValueError):
                if not self._ended.is_set():
                    time.sleep(0.1)  # too many open files, for example, which passes
                continue
            with self._lock:
                full = len(self._connections) >= self._options.max_connections
                if not full:
                    self._connections.add(connection)
            if full:
                self._turn_away(connection)
            else:
                threading.Thread(target=self._serve, args=[connection], name="weights", daemon=True).start()

    def _turn_away(self, connection: socket.socket) -> None:
        with contextlib.suppress(wire.PeerError):
            channel = wire.Channel(connection, 1, time.monotonic() + 1)
            channel.send(wire.Refused(f"all {self._options.max_connections} connections are in use"))
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            channel = wire.Channel(connection, self._options.timeout, time.monotonic() + HANDSHAKE)
            channel.demand(self._secret)
            channel.deadline = time.monotonic() + self._options.deadline
            try:
                self._answer(channel)
            except wire.PeerError as error:
                with contextlib.suppress(wire.PeerError):
                    channel.send(wire.Refused(str(error)))
                raise
        except wire.PeerError as error:
            logger.debug("a connection for weights ends: %s", error)
        except Exception as error:  # the engine goes on whatever becomes of a connection
            logger.warning("a connection for weights fails: %s: %s", type(error).__name__, error)
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, channel: wire.Channel) -> None:
        with contextlib.ExitStack() as at_end:
            copier: Copier | None = None
            way: transports.Sending | None = None
            while not self._ended.is_set():
                message, _ = channel.receive(wire.Ask, wire.Over, wire.Get)
                if isinstance(message, wire.Ask):
                    with self.gate.reading():
                        pass  # says so now if the engine is asleep; a client that takes no bytes does not keep it awake
                    channel.send(self._manifest)
                    continue
                if copier is None:
                    own_stream(self._device)
                    copier = Copier(self._tensors)
                if way is None:
                    name = message.transport if isinstance(message, wire.Over) else "tcp"
                    way = transports.sending(name, channel, self._device, self._options)
                    at_end.callback(way.close)
                if isinstance(message, wire.Get):
                    self._send(message, copier, way)

    def _send(self, message: wire.Get, copier: Copier, way: transports.Sending) -> None:
        if not 0 <= message.first < message.last <= self._layout.count:
            raise wire.PeerError(f"there are no pieces {message.first} to {message.last} of {self._layout.count}")
        way.begin(message.last - message.first)
        for index in range(message.first, message.last):
            self._throttle.take(self._layout.size(index))
            with self.gate.reading():
                piece = copier.read(index, way.room())
            way.send(index, piece)


_published: WeightServer | None = None
_started = False


def publish(server: WeightServer) -> None:
    """Have a server start as soon as the engine has captured its graphs: reading from an NPU while it captures would end that."""
    global _published, _started
    if _published:
        _published.stop()
    _published, _started = server, False
    atexit.register(server.stop)


def awake(state: bool) -> None:
    """What the platform's worker calls: True once it can serve, also after sleep, and False before its weights go to sleep."""
    global _started
    if _published is None:
        return
    if not state:
        if not _published.gate.shut(30.0):
            logger.warning("weights are put to sleep while a peer still reads them, after 30 s")
    elif _started:
        _published.gate.open()
    else:
        _started = True
        _published.start()
