"""How the bytes of pieces travel: behind their headers on TCP, or by HCCL from NPU to NPU, or by Mooncake's transfer engine.

The proof, the manifest with its checksums and a header for each piece are on TCP in any case. A connection has one of these at
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
from ascend_model_loader.options import Options
from ascend_model_loader.state import PIECE, staging, view

LINK = "hccl.link"
"""The slot of ascend_platform.extension in which HCCL between engines is offered."""

HALF = 2
"""Pieces of a request over Mooncake: so many lie ready at the server while as many are read."""

GIVES_UP = "MC_TRANSFER_TIMEOUT"
"""Seconds after which Mooncake ends a read; it reads this as an engine is made, and takes at least 5 (Mooncake,
``transfer_engine_py.cpp``). Another component of the process may have set it for its own."""

ABANDONED: list[torch.Tensor] = []
"""Memory into which a read that has failed may still write."""


ENGINES = threading.Lock()


class Sending(Protocol):
    """The server's end."""

    def begin(self, count: int) -> None:
        """So many pieces are asked for. Raises PeerError where they are too many."""

    def room(self) -> torch.Tensor:
        """Where the next piece is to be put, ``uint8`` of a piece at least."""

    def send(self, index: int, piece: torch.Tensor) -> None:
        """Send what is in the room, with its header. Raises PeerError."""

    def close(self) -> None: ...


class Receiving(Protocol):
    """The client's end. ``block``: pieces of a request at most; ``inline``: whether they are the payload of their headers."""

    block: int
    inline: bool

    def begin(self, count: int) -> None:
        """The answer to a request of so many pieces is next."""

    def receive(self, size: int) -> torch.Tensor:
        """The piece whose header has come, in memory that the next one may overwrite. Raises PeerError."""

    def close(self) -> None: ...


class Tcp:
    """Either end of TCP."""

    block, inline = 8, True

    def __init__(self, channel: wire.Channel, device: torch.device) -> None:
        self._channel, self._buffer = channel, staging(device)

    def begin(self, count: int) -> None: ...

    def room(self) -> torch.Tensor:
        return self._buffer

    def send(self, index: int, piece: torch.Tensor) -> None:
        self._channel.send(wire.Piece(index), view(piece))

    def receive(self, size: int) -> torch.Tensor:
        piece = self._buffer[:size]
        self._channel.receive_into(view(piece))
        return piece

    def close(self) -> None: ...


class Hccl:
    """Either end of HCCL: the server is rank 0. Pieces go from an NPU's memory to the other's.

    Raises:
        PeerError: HCCL is not offered, the other did not come, or one of the two has no NPU.
    """

    block, inline = 8, False

    def __init__(self, channel: wire.Channel, device: torch.device, info: bytes, rank: int) -> None:
        self._channel = channel
        try:
            self._link = linking(device)(rank, info)
        except (RuntimeError, ValueError) as error:
            raise wire.PeerError(f"HCCL does not connect: {_line(error)}") from None
        self._buffer = torch.empty(PIECE, dtype=torch.uint8, device=device)

    def begin(self, count: int) -> None: ...

    def room(self) -> torch.Tensor:
        return self._buffer

    def send(self, index: int, piece: torch.Tensor) -> None:
        self._channel.send(wire.Piece(index))
        self._carry(self._link.send, piece, "taken")

    def receive(self, size: int) -> torch.Tensor:
        self._carry(self._link.recv, self._buffer[:size], "sent")
        return self._buffer[:size]

    def close(self) -> None:
        self._link.destroy()

    def _carry(self, call: Any, piece: torch.Tensor, did: str) -> None:
        try:
            call(piece)
            self._channel.wait_for(self._link.wait, did)
        except RuntimeError as error:  # HCCL's
            raise wire.PeerError(f"HCCL has failed: {_line(error)}") from None


class MooncakeSending:
    """Memory with room for two requests, which the client reads."""

    def __init__(self, channel: wire.Channel, device: torch.device, protocol: str) -> None:
        self._channel = channel
        host = str(channel.connection.getsockname()[0])
        self._engine, session = engine(host, protocol, channel.timeout)
        self._memory = _registered(self._engine, device, protocol, 2 * HALF * PIECE)
        self._half, self._at = 1, 0
        channel.send(wire.Region(session, self._memory.data_ptr()))

    def begin(self, count: int) -> None:
        if count > HALF:
            raise wire.PeerError(f"{count} pieces were asked for at once; by mooncake {HALF} can be")
        self._half, self._at = 1 - self._half, 0  # the client has read what was in it, or it would not ask

    def room(self) -> torch.Tensor:
        return self._memory[(self._half * HALF + self._at) * PIECE :]

    def send(self, index: int, piece: torch.Tensor) -> None:
        self._at += 1
        self._channel.send(wire.Piece(index))

    def close(self) -> None:
        self._engine.unregister_memory(self._memory.data_ptr())


class MooncakeReceiving:
    """Reads of the server's memory."""

    block, inline = HALF, False

    def __init__(self, channel: wire.Channel, device: torch.device, protocol: str, where: wire.Region) -> None:
        self._where, self._half, self._at = where, 1, 0
        self._engine, _ = engine(str(channel.connection.getsockname()[0]), protocol, channel.timeout)
        self._memory = _registered(self._engine, device, protocol, PIECE)

    def begin(self, count: int) -> None:
        self._half, self._at = 1 - self._half, 0

    def receive(self, size: int) -> torch.Tensor:
        begin = self._where.address + (self._half * HALF + self._at) * PIECE
        self._at += 1
        if code := self._engine.transfer_sync_read(self._where.session, self._memory.data_ptr(), begin, size):
            ABANDONED.append(self._memory)
            raise wire.PeerError(f"mooncake's read of {size} bytes has failed (code {code})")
        return self._memory[:size]

    def close(self) -> None:
        self._engine.unregister_memory(self._memory.data_ptr())


def sending(transport: str, channel: wire.Channel, device: torch.device, options: Options) -> Sending:
    """The server's end of what a client has asked for.

    Raises:
        PeerError: it is not served, or cannot be.
    """
    if transport not in ("tcp", *options.transports):
        raise wire.PeerError(
            f"pieces are served by {', '.join(dict.fromkeys(['tcp', *options.transports]))}, not by {wire.printable(transport)}"
        )
    if transport == "mooncake":
        return MooncakeSending(channel, device, options.mooncake_protocol)
    if transport == "tcp":
        return Tcp(channel, device)
    try:
        info = linking(device).root_info()
    except RuntimeError as error:
        raise wire.PeerError(f"HCCL does not connect: {_line(error)}") from None
    channel.send(wire.Meeting(info))
    return Hccl(channel, device, info, rank=0)


def receiving(transport: str, channel: wire.Channel, device: torch.device, options: Options) -> Receiving:
    """The client's end.

    Raises:
        PeerError: it cannot be, here or at the server.
    """
    if transport == "tcp":
        return Tcp(channel, device)
    check(transport, device)
    channel.send(wire.Over(transport))
    if transport == "mooncake":
        region, _ = channel.receive(wire.Region)
        return MooncakeReceiving(channel, device, options.mooncake_protocol, region)
    meeting, _ = channel.receive(wire.Meeting, most=2 * wire.SMALL)
    return Hccl(channel, device, meeting.info, rank=1)


def check(transport: str, device: torch.device) -> None:
    """Look whether a transport can be, before a peer is asked for it.

    Raises:
        PeerError: it cannot; in one line.
    """
    if transport == "hccl":
        linking(device)
    if transport == "mooncake" and importlib.util.find_spec("mooncake") is None:
        raise wire.PeerError("Mooncake's transfer engine is not installed; run: pip install mooncake-transfer-engine-npu")


def linking(device: torch.device) -> Any:
    """The class that is offered for HCCL between engines.

    Raises:
        PeerError: there is none, or no NPU.
    """
    if device.type != "npu":
        raise wire.PeerError(f"hccl moves bytes between NPUs, and the weights are on {device.type}")
    if (name := extension.offered(LINK)) is None:
        raise wire.PeerError(f"hccl is ascend-communicator's, which is {extension.state('ascend-communicator')} here")
    return resolve_obj_by_qualname(name)


def engine(host: str, protocol: str, timeout: float) -> tuple[Any, str]:
    """Mooncake's engine of this process, and its session.

    Raises:
        PeerError: Mooncake is not installed, lacks a library, or does not start.
    """
    with ENGINES:
        return _engine(host, protocol, timeout)


@functools.cache
def _engine(host: str, protocol: str, timeout: float) -> tuple[Any, str]:
    check("mooncake", torch.device("cpu"))
    before = os.environ.get(GIVES_UP)
    os.environ[GIVES_UP] = str(max(5, int(timeout)))
    try:
        made = importlib.import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise wire.PeerError(f"Mooncake's transfer engine cannot be loaded: {_line(error)}") from None
    finally:
        del os.environ[GIVES_UP]
        if before is not None:
            os.environ[GIVES_UP] = before
    if code := made.initialize(host, "P2PHANDSHAKE", protocol, ""):
        raise wire.PeerError(f"mooncake does not start for {protocol} on {host} (code {code})")
    return made, f"{host}:{made.get_rpc_port()}"


def _registered(made: Any, device: torch.device, protocol: str, size: int) -> torch.Tensor:
    on_device = protocol == "ascend"
    memory = torch.empty(size, dtype=torch.uint8, device=device) if on_device else staging(device, size)
    if code := made.register_memory(memory.data_ptr(), size):
        raise wire.PeerError(f"mooncake cannot register {size} bytes (code {code})")
    return memory


def _line(error: Exception) -> str:
    return wire.printable(" ".join(str(error).split()))
