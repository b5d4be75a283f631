"""Weights from a peer: over several connections, compared with the manifest's checksums, then into the parameters."""

import contextlib
import functools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import torch

from ascend_model_loader import transports, wire
from ascend_model_loader.identity import differences
from ascend_model_loader.options import Options
from ascend_model_loader.report import Report
from ascend_model_loader.state import CHECKSUMS, PIECE, Copier, describe, is_plain, layout_of, own_stream, view


def connect(address: tuple[str, int], options: Options, secret: bytes, deadline: float) -> wire.Channel:
    """A connection to a peer that has the secret.

    Raises:
        PeerError: nobody is there, or it does not have the secret.
    """
    try:
        connection = socket.create_connection(address, min(options.connect_timeout, max(0.001, deadline - time.monotonic())))
    except (OSError, OverflowError, UnicodeError) as error:  # the latter two of a port or a name that cannot be
        raise wire.PeerError(f"it cannot be reached: {getattr(error, 'strerror', None) or error}") from None
    channel = wire.Channel(connection, options.timeout, deadline)
    try:
        channel.prove(secret)
    except wire.PeerError:
        channel.close()
        raise
    return channel


def fetch(
    address: tuple[str, int],
    tensors: Mapping[str, torch.Tensor],
    described: Mapping[str, str],
    options: Options,
    secret: bytes,
    device: torch.device,
    report: Report,
) -> wire.Described:
    """Fill tensors with a peer's weights.

    Args:
        tensors: as the peer's in names, shapes and dtypes. Only bytes that met their checksum are written to them.
        described: what the weights have to be (identity.py).

    Returns:
        the peer's manifest.

    Raises:
        PeerError: why these are not its weights, or not all of them; the tensors may then have some.
    """
    deadline = time.monotonic() + options.deadline
    first: wire.Channel | None = None
    with report.phase("manifest"):
        first = connect(address, options, secret, deadline)
        try:
            first.send(wire.Ask())
            manifest, _ = first.receive(wire.Described, most=wire.LARGE)
            _check(manifest, tensors, described)
        except wire.PeerError:
            first.close()
            raise
    reasons = []
    for transport in options.transports:
        try:
            with report.phase(_phase(transport, device)) as phase:
                transfer = _Transfer(manifest, tensors, device, transport, options)
                transfer.run(first, lambda: connect(address, options, secret, deadline))
                phase.bytes = transfer.layout.total
            return manifest
        except wire.PeerError as error:
            reasons.append(str(error) if options.transports == ("tcp",) else f"by {transport}: {error}")
            first = None
    raise wire.PeerError(", ".join(reasons))


def _phase(transport: str, device: torch.device) -> str:
    return f"peer to {'NPU' if device.type == 'npu' else 'memory'}" + (f", {transport}" if transport != "tcp" else "")


def _check(manifest: wire.Described, tensors: Mapping[str, torch.Tensor], described: Mapping[str, str]) -> None:
    if other := differences(manifest.identity, described):
        raise wire.PeerError(f"its weights are others: {other}")
    theirs, ours = manifest.tensors, describe(tensors)
    if theirs != ours:
        pairs = ((a, b) for a, b in zip(theirs, ours, strict=False) if a != b)
        differing = next(pairs, (f"{len(theirs)} tensors", f"{len(ours)} tensors"))
        found, expected = (wire.printable(str(each)) for each in differing)
        raise wire.PeerError(f"its tensors are others: it has {found}, and this engine {expected}")
    if manifest.piece != PIECE or manifest.checksum not in CHECKSUMS:
        raise wire.PeerError(
            f"its pieces are of {manifest.piece} bytes with {wire.printable(manifest.checksum)}; taken here are those of {PIECE} "
            f"bytes with {' or '.join(CHECKSUMS)}"
        )
    if len(manifest.digests) != (count := layout_of(tensors).count):
        raise wire.PeerError(f"it has checksums of {len(manifest.digests)} pieces, and the tensors have {count}")


class _Transfer:
    """The pieces of one load, dealt to connections as each has taken its last ones."""

    def __init__(
        self,
        manifest: wire.Described,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        transport: str,
        options: Options,
    ) -> None:
        self.layout, self.device = layout_of(tensors), device
        self._transport, self._options = transport, options
        self._manifest, self._hashed = manifest, CHECKSUMS[manifest.checksum]
        self._stand_ins = {
            name: torch.empty(each.shape, dtype=each.dtype) for name, each in tensors.items() if not is_plain(each)
        }
        self._tensors = tensors
        self._targets = [self._stand_ins.get(name, each) for name, each in tensors.items()]
        self._lock, self._next = threading.Lock(), 0
        self._channels: list[wire.Channel] = []
        self._errors: list[wire.PeerError | Exception] = []

    def run(self, first: wire.Channel | None, connect_again: Callable[[], wire.Channel]) -> None:
        """Take all pieces.

        Args:
            first: a connection, if there is one.

        Raises:
            PeerError: the first thing that went wrong on any connection.
        """
        if self.device.type == "npu":
            torch.npu.synchronize()  # what had the parameters' memory before may still be in use on the current stream
        # HCCL takes memory of the NPU for each connection
        connections = 1 if self._transport == "hccl" else self._options.connections
        count = max(1, min(connections, -(-self.layout.count // transports.Tcp.block)))
        makers = [lambda: first or connect_again(), *[functools.partial(_another, connect_again)] * (count - 1)]
        threads = [threading.Thread(target=self._work, args=[make], name="weights", daemon=True) for make in makers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # each ends by its channel's deadline
        if self._errors:
            raise self._errors[0]
        with torch.no_grad():
            for name, stand_in in self._stand_ins.items():
                self._tensors[name].copy_(stand_in)

    def _work(self, make: Callable[[], wire.Channel | None]) -> None:
        channel = None
        try:
            if (channel := make()) is None:
                return
            with self._lock:
                if self._errors:
                    return
                self._channels.append(channel)
            own_stream(self.device)
            way = transports.receiving(self._transport, channel, self.device, self._options)
            try:
                with torch.inference_mode():  # as the thread that has made the parameters, perhaps
                    self._take(channel, way)
            finally:
                way.close()
        except Exception as error:
            with self._lock:
                self._errors.append(error)
                for other in self._channels:
                    _interrupt(other)
        finally:
            if channel:
                channel.close()

    def _take(self, channel: wire.Channel, way: transports.Receiving) -> None:
        copier = Copier(self._targets)
        ahead: deque[range] = deque()
        while True:
            while len(ahead) < 2 and (block := self._deal(way.block)):
                channel.send(wire.Get(block.start, block.stop))
                ahead.append(block)
            if not ahead:
                break
            block = ahead.popleft()
            way.begin(len(block))
            for index in block:
                length = self.layout.size(index)
                message, size = channel.receive(wire.Piece)
                due = length if way.inline else 0
                if message.index != index or size != due:
                    raise wire.PeerError(f"it sent {size} bytes as piece {message.index}; due were {due} as piece {index}")
                piece = way.receive(length)
                if self._hashed(view(piece.cpu())) != self._manifest.digests[index]:
                    raise wire.PeerError(
                        f"piece {index} of {self.layout.count} ({self._names(index)}) does not meet its checksum: changed on its "
                        "way, or in the peer since it was loaded"
                    )
                copier.write(index, piece)

    def _names(self, index: int) -> str:
        first, *others = [self._manifest.tensors[number][0] for number, _, _ in self.layout.parts(index)]
        return f"{first} and {len(others)} more" if others else first

    def _deal(self, most: int) -> range:
        with self._lock:
            first = self._next
            self._next = min(first + most, self.layout.count)
            return range(first, self._next) if not self._errors else range(0)


def _another(connect_again: Callable[[], wire.Channel]) -> wire.Channel | None:
    """One more connection; None if the peer has none left, as the first can take all pieces."""
    try:
        return connect_again()
    except wire.PeerError:
        return None


def _interrupt(channel: wire.Channel) -> None:
    with contextlib.suppress(OSError):
        channel.connection.shutdown(socket.SHUT_RDWR)
