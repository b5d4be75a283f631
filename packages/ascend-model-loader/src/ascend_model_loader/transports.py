"""Transports for chunks: inline over TCP, NPU to NPU over HCCL, or reads by Mooncake's transfer engine.

Handshake, manifest and a header per chunk use the TCP connection in any case. A connection has one Sender (server) and one
Receiver (client); the server calls ``buffer`` and ``send`` alternately, the client ``receive``.
"""

import functools
import threading
from typing import Any, Protocol

import torch
from ascend_platform import extension
from ascend_platform.transfer import mooncake
from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_model_loader import wire
from ascend_model_loader.chunks import CHUNK_BYTES, host_bytes, staging_buffer
from ascend_model_loader.options import Options

HCCL_LINK_SLOT = "hccl.link"
"""Slot of ascend_platform.extension for HCCL between engines."""

MOONCAKE_CHUNKS = 2
"""Chunks per request over Mooncake; the server stages this many while the client reads as many."""

QUARANTINED: list[torch.Tensor] = []
"""Buffers that a failed read may still write to."""


ENGINE_LOCK = threading.Lock()


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
    """Client side of a transport. ``chunks_per_request`` is a limit; ``inline``: chunks are the payload of their headers."""

    chunks_per_request: int
    inline: bool

    def begin_request(self, count: int) -> None:
        """Start receiving the answer to a request of ``count`` chunks."""

    def receive(self, size: int) -> torch.Tensor:
        """Receive the chunk whose header was received, into memory that the next one may overwrite. Raises PeerError."""

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


class HcclTransport:
    """Both sides of HCCL, between buffers on the NPUs; the server is rank 0.

    Raises:
        PeerError: HCCL is not available, the other rank did not connect, or a side has no NPU.
    """

    chunks_per_request, inline = 8, False

    def __init__(self, channel: wire.Channel, device: torch.device, info: bytes, rank: int) -> None:
        self._channel = channel
        try:
            self._link = hccl_link_class(device)(rank, info)
        except (RuntimeError, ValueError) as error:
            raise wire.PeerError(f"HCCL cannot connect: {_one_line(error)}") from None
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device)

    def begin_request(self, count: int) -> None: ...

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def send(self, index: int, chunk: torch.Tensor) -> None:
        self._channel.send(wire.Chunk(index))
        self._transfer(self._link.send, chunk, "taken")

    def receive(self, size: int) -> torch.Tensor:
        self._transfer(self._link.recv, self._buffer[:size], "sent")
        return self._buffer[:size]

    def close(self) -> None:
        self._link.destroy()

    def _transfer(self, call: Any, chunk: torch.Tensor, did: str) -> None:
        try:
            call(chunk)
            self._channel.wait_for(self._link.wait, did)
        except RuntimeError as error:  # HCCL's
            raise wire.PeerError(f"HCCL failed: {_one_line(error)}") from None


class MooncakeSender:
    """Server side of Mooncake: registered memory for two requests, which the client reads."""

    def __init__(self, channel: wire.Channel, device: torch.device, protocol: str) -> None:
        self._channel = channel
        host = str(channel.connection.getsockname()[0])
        self._engine, session = mooncake_engine(host, protocol, channel.timeout)
        self._memory = _registered_buffer(self._engine, device, protocol, 2 * MOONCAKE_CHUNKS * CHUNK_BYTES)
        self._half, self._index = 1, 0
        channel.send(wire.ReadableRegion(session, self._memory.data_ptr()))

    def begin_request(self, count: int) -> None:
        if count > MOONCAKE_CHUNKS:
            raise wire.PeerError(f"a request for {count} chunks over mooncake; at most {MOONCAKE_CHUNKS} are supported")
        self._half, self._index = 1 - self._half, 0  # free: the client requests more only after reading it

    def buffer(self) -> torch.Tensor:
        return self._memory[(self._half * MOONCAKE_CHUNKS + self._index) * CHUNK_BYTES :]

    def send(self, index: int, chunk: torch.Tensor) -> None:
        self._index += 1
        self._channel.send(wire.Chunk(index))

    def close(self) -> None:
        self._engine.unregister_memory(self._memory.data_ptr())


class MooncakeReceiver:
    """Client side of Mooncake: reads of the server's memory."""

    chunks_per_request, inline = MOONCAKE_CHUNKS, False

    def __init__(self, channel: wire.Channel, device: torch.device, protocol: str, region: wire.ReadableRegion) -> None:
        self._region, self._half, self._index = region, 1, 0
        self._engine, _ = mooncake_engine(str(channel.connection.getsockname()[0]), protocol, channel.timeout)
        self._memory = _registered_buffer(self._engine, device, protocol, CHUNK_BYTES)

    def begin_request(self, count: int) -> None:
        self._half, self._index = 1 - self._half, 0

    def receive(self, size: int) -> torch.Tensor:
        begin = self._region.address + (self._half * MOONCAKE_CHUNKS + self._index) * CHUNK_BYTES
        self._index += 1
        if code := self._engine.transfer_sync_read(self._region.session, self._memory.data_ptr(), begin, size):
            QUARANTINED.append(self._memory)
            raise wire.PeerError(f"mooncake failed to read {size} bytes (code {code})")
        return self._memory[:size]

    def close(self) -> None:
        self._engine.unregister_memory(self._memory.data_ptr())


def make_sender(transport: str, channel: wire.Channel, device: torch.device, options: Options) -> Sender:
    """Sender for the transport that a client requested.

    Raises:
        PeerError: it is not enabled, or not available.
    """
    if transport not in ("tcp", *options.transports):
        raise wire.PeerError(
            f"transport {wire.printable(transport)} is not served; supported: "
            f"{', '.join(dict.fromkeys(['tcp', *options.transports]))}"
        )
    if transport == "mooncake":
        return MooncakeSender(channel, device, options.mooncake_protocol)
    if transport == "tcp":
        return TcpTransport(channel, device)
    try:
        info = hccl_link_class(device).root_info()
    except RuntimeError as error:
        raise wire.PeerError(f"HCCL cannot connect: {_one_line(error)}") from None
    channel.send(wire.RootInfo(info))
    return HcclTransport(channel, device, info, rank=0)


def make_receiver(transport: str, channel: wire.Channel, device: torch.device, options: Options) -> Receiver:
    """Receiver for a transport, after requesting it from the server.

    Raises:
        PeerError: it is not available here or at the server.
    """
    if transport == "tcp":
        return TcpTransport(channel, device)
    check(transport, device)
    channel.send(wire.UseTransport(transport))
    if transport == "mooncake":
        region, _ = channel.receive(wire.ReadableRegion)
        return MooncakeReceiver(channel, device, options.mooncake_protocol, region)
    root, _ = channel.receive(wire.RootInfo, max_size=2 * wire.MAX_HEADER_BYTES)
    return HcclTransport(channel, device, root.info, rank=1)


def check(transport: str, device: torch.device) -> None:
    """Check whether a transport is available here, before requesting it from a peer.

    Raises:
        PeerError: it is not; in one line.
    """
    if transport == "hccl":
        hccl_link_class(device)
    if transport == "mooncake":
        try:
            mooncake.check()
        except extension.RefusedError as error:
            raise wire.PeerError(str(error)) from None


def hccl_link_class(device: torch.device) -> Any:
    """Class registered for HCCL between engines.

    Raises:
        PeerError: none is registered, or the device is not an NPU.
    """
    if device.type != "npu":
        raise wire.PeerError(f"transport hccl needs weights on an NPU; these are on {device.type}")
    if (name := extension.offered(HCCL_LINK_SLOT)) is None:
        raise wire.PeerError(f"transport hccl needs ascend-communicator, which is {extension.state('ascend-communicator')}")
    return resolve_obj_by_qualname(name)


def mooncake_engine(host: str, protocol: str, timeout: float) -> tuple[Any, str]:
    """The loader's Mooncake engine in this process, and its session.

    Raises:
        PeerError: Mooncake is not installed, lacks a library, or does not start.
    """
    with ENGINE_LOCK:
        try:
            return _start_mooncake_engine(host, protocol, timeout)
        except extension.RefusedError as error:
            raise wire.PeerError(str(error)) from None


_start_mooncake_engine = functools.cache(mooncake.start_engine)


def _registered_buffer(engine: Any, device: torch.device, protocol: str, size: int) -> torch.Tensor:
    on_device = protocol == "ascend"
    memory = torch.empty(size, dtype=torch.uint8, device=device) if on_device else staging_buffer(device, size)
    if code := engine.register_memory(memory.data_ptr(), size):
        raise wire.PeerError(f"mooncake cannot register {size} bytes (code {code})")
    return memory


def _one_line(error: Exception) -> str:
    return wire.printable(" ".join(str(error).split()))
