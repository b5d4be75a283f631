# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Transports for chunks: inline over TCP, or reads by Mooncake's transfer engine or HCCL.

Handshake, manifest and a header per chunk use the TCP connection in any case. A connection has one
Sender (server) and one Receiver (client); the server calls ``buffer`` and ``send`` alternately, the
client ``receive``.
"""

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from ascend_platform import extension
from ascend_transfer import engine as engines
from ascend_transfer.auth import CurveKeys
from ascend_transfer.engine import Engine, Runs
from ascend_transfer.errors import TransferError, printable
from ascend_transfer.memory import allocate_buffer

from ascend_model_loader import wire
from ascend_model_loader.chunks import CHUNK_BYTES, host_bytes, staging_buffer
from ascend_model_loader.options import Options

ENGINE_CHUNKS = 4
"""Chunks per request over an engine, which are one read; the server stages the next ones
meanwhile."""

CONNECT_SECONDS = 60.0
"""Timeout for two NPUs to connect."""


class Sender(Protocol):
    """Server side of a transport."""

    def begin_request(self, count: int) -> None:
        """Start a request of ``count`` chunks. Raises PeerError if that is too many."""

    def buffer(self) -> torch.Tensor:
        """Where to put the next chunk, ``uint8 [>= chunk bytes]``."""

    def send(self, index: int, chunk: torch.Tensor) -> None:
        """Send the chunk in the buffer, with its header. Raises PeerError."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """Client side of a transport. ``chunks_per_request`` is a limit.

    ``inline``: a chunk is the payload of its header, and the next one may overwrite it. Otherwise
    all chunks of a request are received at once after their headers, into other memory than those
    of the request before.
    """

    chunks_per_request: int
    inline: bool

    def receive(self, size: int) -> torch.Tensor:
        """Receive the chunk, or the chunks of the request one behind the other. Raises
        PeerError."""

    def close(self) -> None: ...


class TcpTransport:
    """Both sides of TCP."""

    chunks_per_request, inline = 8, True

    def __init__(self, channel: wire.Channel, device: torch.device) -> None:
        self._channel, self._buffer = channel, staging_buffer(device)

    def begin_request(self, count: int) -> None: ...

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def send(self, index: int, chunk: torch.Tensor) -> None:
        self._channel.send(wire.Chunk(index), host_bytes(chunk))

    def receive(self, size: int) -> torch.Tensor:
        chunk = self._buffer[:size]
        self._channel.receive_into(host_bytes(chunk))
        return chunk

    def close(self) -> None: ...


class EngineSender:
    """Server side of an engine: registered memory for two requests, which the client reads."""

    def __init__(self, channel: wire.Channel, device: torch.device, engine: Engine) -> None:
        self._channel, self._engine = channel, engine
        self._memory = allocate_buffer(engine, 2 * ENGINE_CHUNKS * CHUNK_BYTES, device)
        self._half, self._index = 1, 0
        channel.send(wire.ReadableRegion(engine.session, self._memory.data_ptr()))

    def begin_request(self, count: int) -> None:
        if count > ENGINE_CHUNKS:
            raise wire.PeerError(
                f"a request for {count} chunks over {self._engine.name}; at most {ENGINE_CHUNKS}"
                " are supported"
            )
        # The buffer is free: the client requests more only after reading it.
        self._half, self._index = 1 - self._half, 0

    def buffer(self) -> torch.Tensor:
        return self._memory[(self._half * ENGINE_CHUNKS + self._index) * CHUNK_BYTES :]

    def send(self, index: int, chunk: torch.Tensor) -> None:
        self._index += 1
        self._channel.send(wire.Chunk(index))

    def close(self) -> None:
        self._engine.close()


class EngineReceiver:
    """Client side of an engine: reads of the server's memory."""

    chunks_per_request, inline = ENGINE_CHUNKS, False

    def __init__(
        self,
        channel: wire.Channel,
        device: torch.device,
        engine: Engine,
        region: wire.ReadableRegion,
    ) -> None:
        self._channel, self._engine, self._region = channel, engine, region
        self._buffers = [
            allocate_buffer(engine, ENGINE_CHUNKS * CHUNK_BYTES, device) for _ in range(2)
        ]
        self._half = 1
        engine.connect(region.session, min(CONNECT_SECONDS, channel.seconds_left()))

    def receive(self, size: int) -> torch.Tensor:
        self._half = 1 - self._half
        buffer = self._buffers[self._half]
        begin = self._region.address + self._half * ENGINE_CHUNKS * CHUNK_BYTES
        runs = Runs([begin], [buffer.data_ptr()], [size])
        seconds = min(self._channel.timeout, self._channel.seconds_left())
        try:
            self._engine.read(self._region.session, runs, seconds)
        except TransferError as error:
            raise wire.PeerError(printable(str(error))) from None
        return buffer[:size]

    def close(self) -> None:
        self._engine.close()


def make_sender(
    transport: str, channel: wire.Channel, device: torch.device, options: Options, secret: bytes
) -> Sender:
    """Sender for the transport that a client requested.

    Raises:
        PeerError: it is not enabled, or not available.
    """
    if transport not in ("tcp", *options.transports):
        raise wire.PeerError(
            f"transport {printable(transport)} is not served; supported:"
            f" {', '.join(dict.fromkeys(['tcp', *options.transports]))}"
        )
    if transport == "tcp":
        return TcpTransport(channel, device)
    engine = _make_engine(transport, channel, device, options, secret)
    with _closed_on_error(engine):
        return EngineSender(channel, device, engine)


def make_receiver(
    transport: str, channel: wire.Channel, device: torch.device, options: Options, secret: bytes
) -> Receiver:
    """Receiver for a transport, after requesting it from the server.

    Raises:
        PeerError: it is not available here or at the server.
    """
    if transport == "tcp":
        return TcpTransport(channel, device)
    engine = _make_engine(transport, channel, device, options, secret)
    with _closed_on_error(engine):
        channel.send(wire.UseTransport(transport))
        region, _ = channel.receive(wire.ReadableRegion)
        return EngineReceiver(channel, device, engine, region)


@contextlib.contextmanager
def _closed_on_error(engine: Engine) -> Iterator[None]:
    """Close the engine if the block raises; a TransferError becomes a PeerError."""
    try:
        yield
    except BaseException as error:
        engine.close()
        if isinstance(error, TransferError):
            raise wire.PeerError(str(error)) from None
        raise


def _make_engine(
    transport: str, channel: wire.Channel, device: torch.device, options: Options, secret: bytes
) -> Engine:
    """This side's engine, at the address of the connection.

    Raises:
        PeerError: it is not available here.
    """
    if transport == "hccl" and device.type != "npu":
        raise wire.PeerError(f"transport hccl needs weights on an NPU; these are on {device.type}")
    try:
        engines.check(transport, "transport")
        host = str(channel.connection.getsockname()[0])
        return engines.make_engine(
            transport, host, options.mooncake_protocol, CurveKeys(secret), timeout=channel.timeout
        )
    except extension.RefusedError as error:
        raise wire.PeerError(str(error)) from None
