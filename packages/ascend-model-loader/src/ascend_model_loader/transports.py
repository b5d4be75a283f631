"""How the bytes of chunks travel: behind their headers on TCP, or by HCCL from NPU to NPU, or by Mooncake's transfer engine.

The proof, the manifest with its checksums and a header for each chunk are on TCP in any case. A connection has one of these at
either end; at the server ``room`` and ``send`` take turns, at the client ``receive``.
"""

import functools
import importlib
import importlib.util
import os
import threading
from typing import Any, Protocol

import torch
from ascend_platform import extension
from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_model_loader import wire
from ascend_model_loader.chunks import CHUNK_BYTES, host_bytes, staging_buffer
from ascend_model_loader.options import Options

HCCL_LINK_SLOT = "hccl.link"
"""The slot of ascend_platform.extension in which HCCL between engines is offered."""

MOONCAKE_CHUNKS = 2
"""Chunks of a request over Mooncake: so many lie ready at the server while as many are read."""

TIMEOUT_VARIABLE = "MC_TRANSFER_TIMEOUT"
"""Seconds after which Mooncake ends a read; it reads this as an engine is engine, and takes at least 5 (Mooncake,
``transfer_engine_py.cpp``). Another component of the process may have set it for its own."""

QUARANTINED: list[torch.Tensor] = []
"""Memory into which a read that has failed may still write."""


ENGINE_LOCK = threading.Lock()


class Sender(Protocol):
    """The server's end."""

    def begin_request(self, count: int) -> None:
        """So many chunks are asked for. Raises PeerError where they are too many."""

    def buffer(self) -> torch.Tensor:
        """Where the next chunk is to be put, ``uint8`` of a chunk at least."""

    def send(self, index: int, chunk: torch.Tensor) -> None:
        """Send what is in the room, with its header. Raises PeerError."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """The client's end. ``block``: chunks of a request at most; ``inline``: whether they are the payload of their headers."""

    chunks_per_request: int
    inline: bool

    def begin_request(self, count: int) -> None:
        """The answer to a request of so many chunks is next."""

    def receive(self, size: int) -> torch.Tensor:
        """The chunk whose header has come, in memory that the next one may overwrite. Raises PeerError."""

    def close(self) -> None: ...


class TcpTransport:
    """Either end of TCP."""

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
    """Either end of HCCL: the server is rank 0. Chunks go from an NPU's memory to the other's.

    Raises:
        PeerError: HCCL is not offered, the other did not come, or one of the two has no NPU.
    """

    chunks_per_request, inline = 8, False

    def __init__(self, channel: wire.Channel, device: torch.device, info: bytes, rank: int) -> None:
        self._channel = channel
        try:
            self._link = hccl_link_class(device)(rank, info)
        except (RuntimeError, ValueError) as error:
            raise wire.PeerError(f"HCCL does not connect: {_one_line(error)}") from None
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
            raise wire.PeerError(f"HCCL has failed: {_one_line(error)}") from None


class MooncakeSender:
    """Memory with room for two requests, which the client reads."""

    def __init__(self, channel: wire.Channel, device: torch.device, protocol: str) -> None:
        self._channel = channel
        host = str(channel.connection.getsockname()[0])
        self._engine, session = mooncake_engine(host, protocol, channel.timeout)
        self._memory = _registered_buffer(self._engine, device, protocol, 2 * MOONCAKE_CHUNKS * CHUNK_BYTES)
        self._half, self._index = 1, 0
        channel.send(wire.ReadableRegion(session, self._memory.data_ptr()))

    def begin_request(self, count: int) -> None:
        if count > MOONCAKE_CHUNKS:
            raise wire.PeerError(f"{count} chunks were asked for at once; by mooncake {MOONCAKE_CHUNKS} can be")
        self._half, self._index = 1 - self._half, 0  # the client has read what was in it, or it would not ask

    def buffer(self) -> torch.Tensor:
        return self._memory[(self._half * MOONCAKE_CHUNKS + self._index) * CHUNK_BYTES :]

    def send(self, index: int, chunk: torch.Tensor) -> None:
        self._index += 1
        self._channel.send(wire.Chunk(index))

    def close(self) -> None:
        self._engine.unregister_memory(self._memory.data_ptr())


class MooncakeReceiver:
    """Reads of the server's memory."""

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
            raise wire.PeerError(f"mooncake's read of {size} bytes has failed (code {code})")
        return self._memory[:size]

    def close(self) -> None:
        self._engine.unregister_memory(self._memory.data_ptr())


def make_sender(transport: str, channel: wire.Channel, device: torch.device, options: Options) -> Sender:
    """The server's end of what a client has asked for.

    Raises:
        PeerError: it is not served, or cannot be.
    """
    if transport not in ("tcp", *options.transports):
        raise wire.PeerError(
            f"chunks are served by {', '.join(dict.fromkeys(['tcp', *options.transports]))}, not by {wire.printable(transport)}"
        )
    if transport == "mooncake":
        return MooncakeSender(channel, device, options.mooncake_protocol)
    if transport == "tcp":
        return TcpTransport(channel, device)
    try:
        info = hccl_link_class(device).root_info()
    except RuntimeError as error:
        raise wire.PeerError(f"HCCL does not connect: {_one_line(error)}") from None
    channel.send(wire.RootInfo(info))
    return HcclTransport(channel, device, info, rank=0)


def make_receiver(transport: str, channel: wire.Channel, device: torch.device, options: Options) -> Receiver:
    """The client's end.

    Raises:
        PeerError: it cannot be, here or at the server.
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
    """Look whether a transport can be, before a peer is asked for it.

    Raises:
        PeerError: it cannot; in one line.
    """
    if transport == "hccl":
        hccl_link_class(device)
    if transport == "mooncake" and importlib.util.find_spec("mooncake") is None:
        raise wire.PeerError("Mooncake's transfer engine is not installed; run: pip install mooncake-transfer-engine-npu")


def hccl_link_class(device: torch.device) -> Any:
    """The class that is offered for HCCL between engines.

    Raises:
        PeerError: there is none, or no NPU.
    """
    if device.type != "npu":
        raise wire.PeerError(f"hccl moves bytes between NPUs, and the weights are on {device.type}")
    if (name := extension.offered(HCCL_LINK_SLOT)) is None:
        raise wire.PeerError(f"hccl is ascend-communicator's, which is {extension.state('ascend-communicator')} here")
    return resolve_obj_by_qualname(name)


def mooncake_engine(host: str, protocol: str, timeout: float) -> tuple[Any, str]:
    """Mooncake's engine of this process, and its session.

    Raises:
        PeerError: Mooncake is not installed, lacks a library, or does not start.
    """
    with ENGINE_LOCK:
        return _start_mooncake_engine(host, protocol, timeout)


@functools.cache
def _start_mooncake_engine(host: str, protocol: str, timeout: float) -> tuple[Any, str]:
    check("mooncake", torch.device("cpu"))
    before = os.environ.get(TIMEOUT_VARIABLE)
    os.environ[TIMEOUT_VARIABLE] = str(max(5, int(timeout)))
    try:
        engine = importlib.import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise wire.PeerError(f"Mooncake's transfer engine cannot be loaded: {_one_line(error)}") from None
    finally:
        del os.environ[TIMEOUT_VARIABLE]
        if before is not None:
            os.environ[TIMEOUT_VARIABLE] = before
    if code := engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
        raise wire.PeerError(f"mooncake does not start for {protocol} on {host} (code {code})")
    return engine, f"{host}:{engine.get_rpc_port()}"


def _registered_buffer(engine: Any, device: torch.device, protocol: str, size: int) -> torch.Tensor:
    on_device = protocol == "ascend"
    memory = torch.empty(size, dtype=torch.uint8, device=device) if on_device else staging_buffer(device, size)
    if code := engine.register_memory(memory.data_ptr(), size):
        raise wire.PeerError(f"mooncake cannot register {size} bytes (code {code})")
    return memory


def _one_line(error: Exception) -> str:
    return wire.printable(" ".join(str(error).split()))
