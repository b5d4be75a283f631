# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Weight server of an engine with ``serve_weights``: an accept thread, and a thread per connection
that sends chunks."""

import atexit
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from ascend_platform import extension

from ascend_model_loader import identity, registry, transports, wire
from ascend_model_loader.chunks import (
    CHUNK_BYTES,
    ChunkCopier,
    chunk_layout,
    tensor_specs,
    use_private_stream,
)
from ascend_model_loader.options import Options

MAX_HANDSHAKES = 64
"""Clients that have not authenticated yet; beyond that the oldest is disconnected."""

HANDSHAKE = 10.0
"""Seconds that a client has for the handshake."""

NO_THREAD = (
    "no thread can be started; fix: raise the limit of processes and threads (ulimit -u, pids.max)"
)

logger = extension.logger


class ReadGate:
    """Admits readers while the weights can be read; ``close`` waits until the last reader
    has left."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._open, self._readers = False, 0

    def open(self) -> None:
        with self._state:
            self._open = True

    def close(self, timeout: float) -> bool:
        """Close the gate; whether all readers left within ``timeout`` seconds."""
        with self._state:
            self._open = False
            return self._state.wait_for(lambda: not self._readers, timeout)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the gate while reading.

        Raises:
            PeerError: the gate is closed.
        """
        with self._state:
            if not self._open:
                raise wire.PeerError("the engine is asleep or not ready")
            self._readers += 1
        try:
            yield
        finally:
            with self._state:
                self._readers -= 1
                self._state.notify_all()


class RateLimiter:
    """Limit in bytes per second over all connections; None means unlimited."""

    def __init__(self, rate: float | None) -> None:
        self._rate, self._lock, self._free = rate, threading.Lock(), 0.0

    def acquire(self, size: int) -> None:
        if self._rate is None:
            return
        with self._lock:
            begin = max(self._free, time.monotonic())
            self._free = begin + size / self._rate
        time.sleep(max(0.0, begin - time.monotonic()))


class WeightServer:
    """Server of tensors, with the checksums that they had when they were loaded.

    A client verifies the checksums: it rejects weights that changed after loading.

    Args:
        tensors: plain tensors by name, on ``device`` or on the host.
        digests: of the chunks, by ``options.checksum``.
        rank: of this worker in its engine; added to the port.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        digests: Sequence[bytes],
        weight_identity: Mapping[str, str],
        options: Options,
        secret: bytes,
        device: torch.device,
        rank: int = 0,
    ) -> None:
        self.gate = ReadGate()
        self._tensors, self._layout = list(tensors.values()), chunk_layout(tensors)
        self._identity = dict(weight_identity)
        self._manifest = wire.Manifest(
            self._identity, tensor_specs(tensors), CHUNK_BYTES, options.checksum, [*digests]
        )
        self._options, self._secret, self._device = options, secret, device
        self._rate_limiter = RateLimiter(options.max_bytes_per_second)
        self._connections: set[socket.socket] = set()
        self._handshaking: dict[socket.socket, None] = {}  # oldest first
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._registration: registry.Registration | None = None
        self._listening = socket.create_server(
            (options.host, options.port + rank if options.port else 0),
            family=socket.AF_INET6 if ":" in options.host else socket.AF_INET,
            backlog=options.max_connections,
        )
        self._listening.settimeout(1.0)
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
        if not _start_thread(self._accept):
            logger.warning("cannot serve weights at %s: %s", self.address, NO_THREAD)
            return
        if self._options.registry:
            try:
                self._registration = registry.Registration(
                    self._options.registry, identity.registry_key(self._identity), self.address
                )
            except OSError as error:
                logger.warning("cannot register the weight server at %s: %s", self.address, error)
        logger.info("serving %.2f GB of weights at %s", self._layout.total / 1e9, self.address)

    def stop(self) -> None:
        """Close all connections."""
        self._ended.set()
        if self._registration:
            self._registration.remove()
        with self._lock:
            for connection in (*self._connections, *self._handshaking):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        next_heartbeat, was_served = 0.0, True
        while not self._ended.is_set():
            try:
                if self._registration and time.monotonic() > next_heartbeat:
                    self._registration.heartbeat()
                    next_heartbeat = time.monotonic() + registry.HEARTBEAT_INTERVAL
                connection, _ = self._listening.accept()
            except TimeoutError:
                continue
            except (OSError, ValueError):
                if not self._ended.is_set():
                    time.sleep(0.1)  # For example too many open files, which is transient.
                continue
            with self._lock:
                if len(self._handshaking) >= MAX_HANDSHAKES:
                    with contextlib.suppress(OSError):
                        next(iter(self._handshaking)).shutdown(socket.SHUT_RDWR)
                self._handshaking[connection] = None
            if not (is_served := _start_thread(self._serve, connection)):
                if was_served:
                    logger.warning("weight connections are closed: %s", NO_THREAD)
                connection.close()
                with self._lock:
                    self._handshaking.pop(connection, None)
            was_served = is_served

    def _admit(self, connection: socket.socket) -> None:
        """Count a connection whose client has the secret; others must not keep it out.

        Raises:
            PeerBusyError: there are as many as the options allow.
        """
        with self._lock:
            if len(self._connections) >= self._options.max_connections:
                raise wire.PeerBusyError(
                    f"all {self._options.max_connections} connections are in use"
                )
            del self._handshaking[connection]
            self._connections.add(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            channel = wire.Channel(connection, self._options.timeout, time.monotonic() + HANDSHAKE)
            channel.authenticate_as_server(self._secret, lambda: self._admit(connection))
            channel.deadline = time.monotonic() + self._options.deadline
            try:
                self._answer(channel)
            except wire.PeerError as error:
                with contextlib.suppress(wire.PeerError):
                    channel.send(wire.Refused(str(error)))
                raise
        except wire.PeerError as error:
            logger.debug("closing a weight connection: %s", error)
        except Exception as error:  # An error on a connection must not affect the engine.
            logger.warning("error on a weight connection: %s: %s", type(error).__name__, error)
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)
                self._handshaking.pop(connection, None)

    def _answer(self, channel: wire.Channel) -> None:
        with contextlib.ExitStack() as stack:
            copier: ChunkCopier | None = None
            sender: transports.Sender | None = None
            while not self._ended.is_set():
                message, _ = channel.receive(wire.GetManifest, wire.UseTransport, wire.GetChunks)
                if isinstance(message, wire.GetManifest):
                    with self.gate.reading():
                        # Refuse if the engine is asleep. A client that reads no chunks must not
                        # delay sleep.
                        pass
                    channel.send(self._manifest)
                    continue
                if copier is None:
                    use_private_stream(self._device)
                    copier = ChunkCopier(self._tensors)
                if sender is None:
                    name = message.transport if isinstance(message, wire.UseTransport) else "tcp"
                    sender = transports.make_sender(
                        name, channel, self._device, self._options, self._secret
                    )
                    stack.callback(sender.close)
                if isinstance(message, wire.GetChunks):
                    self._send(message, copier, sender)

    def _send(
        self, message: wire.GetChunks, copier: ChunkCopier, sender: transports.Sender
    ) -> None:
        if not 0 <= message.first < message.last <= self._layout.count:
            raise wire.PeerError(
                f"chunks {message.first} to {message.last} are out of range (0 to"
                f" {self._layout.count})"
            )
        sender.begin_request(message.last - message.first)
        for index in range(message.first, message.last):
            self._rate_limiter.acquire(self._layout.size(index))
            with self.gate.reading():
                chunk = copier.read(index, sender.buffer())
            sender.send(index, chunk)


def _start_thread(target: Callable[..., None], *arguments: Any) -> bool:
    """Run a function in a daemon thread; False if none can be started."""
    try:
        threading.Thread(target=target, args=arguments, name="weights", daemon=True).start()
    except RuntimeError:
        return False
    return True


class Publication:
    """This process's ``server``, None without one. It starts after the engine has captured its
    graphs, since reads from an NPU during capture would abort it."""

    def __init__(self) -> None:
        self.server: WeightServer | None = None
        self._started = False

    def publish(self, server: WeightServer) -> None:
        """Replace the server."""
        if self.server:
            self.server.stop()
        self.server, self._started = server, False
        atexit.register(server.stop)

    def awake(self, state: bool) -> None:
        """Hook of the platform's worker: True once the engine can serve, also after wake-up; False
        before its weights sleep.

        Raises:
            RefusedError: a peer is still reading the weights, which must not be freed.
        """
        if self.server is None:
            return
        if not state:
            if not self.server.gate.close(30.0):
                self.server.gate.open()
                raise extension.RefusedError(
                    "a peer is still reading the weights after 30 s, which cannot be put to sleep;"
                    " fix: call /sleep again, or /wake_up to go on serving"
                )
        elif self._started:
            self.server.gate.open()
        else:
            self._started = True
            self.server.start()


publication = Publication()
publish, awake = publication.publish, publication.awake
