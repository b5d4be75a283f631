"""Client of a weight server: receives chunks over several connections and verifies their checksums before writing parameters."""

import contextlib
import functools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import msgspec
import torch

from ascend_model_loader import transports, wire
from ascend_model_loader.chunks import (
    CHECKSUMS,
    CHUNK_BYTES,
    ChunkCopier,
    chunk_layout,
    host_bytes,
    is_plain,
    tensor_specs,
    use_private_stream,
)
from ascend_model_loader.identity import differences
from ascend_model_loader.options import Options
from ascend_model_loader.report import Report


def connect(address: tuple[str, int], options: Options, secret: bytes, deadline: float) -> wire.Channel:
    """Open an authenticated connection to a weight server.

    Raises:
        PeerError: it cannot be reached, or does not have the secret.
    """
    try:
        connection = socket.create_connection(address, min(options.connect_timeout, max(0.001, deadline - time.monotonic())))
    except (OSError, OverflowError, UnicodeError) as error:  # the last two: invalid port or host name
        raise wire.PeerError(f"cannot be reached: {getattr(error, 'strerror', None) or error}") from None
    channel = wire.Channel(connection, options.timeout, deadline)
    try:
        channel.authenticate_as_client(secret)
    except wire.PeerError:
        channel.close()
        raise
    return channel


def fetch(
    address: tuple[str, int],
    tensors: Mapping[str, torch.Tensor],
    identity: Mapping[str, str],
    options: Options,
    secret: bytes,
    device: torch.device,
    report: Report,
) -> wire.Manifest:
    """Fill tensors with a peer's weights.

    Args:
        tensors: same names, shapes and dtypes as the peer's. Only bytes whose checksum matched are written to them.
        identity: required identity of the weights (identity.py).

    Returns:
        The peer's manifest.

    Raises:
        PeerError: the peer's weights are different or incomplete; the tensors may have been partly written.
    """
    deadline = time.monotonic() + options.deadline
    first: wire.Channel | None = None
    with report.phase("manifest"):
        first = connect(address, options, secret, deadline)
        try:
            first.send(wire.GetManifest())
            manifest, _ = first.receive(wire.Manifest, max_size=wire.MAX_MANIFEST_BYTES)
            _check_manifest(manifest, tensors, identity)
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


def fetch_from_first(
    addresses: Iterable[tuple[str, int]],
    tensors: Mapping[str, torch.Tensor],
    identity: Mapping[str, str],
    options: Options,
    secret: bytes,
    device: torch.device,
    report: Report,
) -> tuple[wire.Manifest, tuple[str, int]]:
    """:func:`fetch` from the first of several peers that has the weights; the deadline is for all together.

    Raises:
        PeerError: none of them has; with each one's reason.
    """
    reasons, until = [], time.monotonic() + options.deadline
    for host, port in dict.fromkeys(addresses):
        if (left := until - time.monotonic()) <= 0:
            reasons.append(f"the deadline of {options.deadline:g} s has passed, and further peers were not tried")
            break
        remaining = msgspec.structs.replace(options, deadline=left)
        try:
            return fetch((host, port), tensors, identity, remaining, secret, device, report), (host, port)
        except wire.PeerError as error:
            reasons.append(f"{host}:{port}: {error}")
    raise wire.PeerError(", ".join(reasons))


def _phase(transport: str, device: torch.device) -> str:
    return f"peer to {'NPU' if device.type == 'npu' else 'memory'}" + (f", {transport}" if transport != "tcp" else "")


def _check_manifest(manifest: wire.Manifest, tensors: Mapping[str, torch.Tensor], identity: Mapping[str, str]) -> None:
    if other := differences(manifest.identity, identity):
        raise wire.PeerError(f"its weights differ: {other}")
    theirs, ours = manifest.tensors, tensor_specs(tensors)
    if theirs != ours:
        pairs = ((a, b) for a, b in zip(theirs, ours, strict=False) if a != b)
        differing = next(pairs, (f"{len(theirs)} tensors", f"{len(ours)} tensors"))
        found, expected = (wire.printable(str(each)) for each in differing)
        raise wire.PeerError(f"its tensors differ: the peer has {found}, this engine {expected}")
    if manifest.chunk_bytes != CHUNK_BYTES or manifest.checksum not in CHECKSUMS:
        raise wire.PeerError(
            f"its chunks have {manifest.chunk_bytes} bytes and checksum {wire.printable(manifest.checksum)}; supported: "
            f"{CHUNK_BYTES} bytes and {' or '.join(CHECKSUMS)}"
        )
    if len(manifest.digests) != (count := chunk_layout(tensors).count):
        raise wire.PeerError(f"its manifest has checksums of {len(manifest.digests)} chunks; the tensors have {count}")


class _Transfer:
    """Transfer of all chunks, distributed over connections on demand."""

    def __init__(
        self,
        manifest: wire.Manifest,
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
        transport: str,
        options: Options,
    ) -> None:
        self.layout, self.device = chunk_layout(tensors), device
        self._transport, self._options = transport, options
        self._manifest, self._hashed = manifest, CHECKSUMS[manifest.checksum]
        self._staged = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in tensors.items() if not is_plain(each)}
        self._tensors = tensors
        self._targets = [self._staged.get(name, each) for name, each in tensors.items()]
        self._lock, self._next = threading.Lock(), 0
        self._channels: list[wire.Channel] = []
        self._errors: list[wire.PeerError | Exception] = []

    def run(self, first: wire.Channel | None, reconnect: Callable[[], wire.Channel]) -> None:
        """Receive all chunks.

        Args:
            first: an open connection to use first, or None.

        Raises:
            PeerError: the first error on any connection.
        """
        if self.device.type == "npu":
            torch.npu.synchronize()  # the parameters' memory may still be in use by earlier work on the current stream
        # each HCCL communicator allocates buffers on the NPU
        connections = 1 if self._transport == "hccl" else self._options.connections
        count = max(1, min(connections, -(-self.layout.count // transports.TcpTransport.chunks_per_request)))
        connects = [lambda: first or reconnect(), *[functools.partial(_extra_connection, reconnect)] * (count - 1)]
        threads = [
            threading.Thread(target=self._work, args=[connect_channel], name="weights", daemon=True)
            for connect_channel in connects
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # bounded by its channel's deadline
        if self._errors:
            raise self._errors[0]
        with torch.no_grad():
            for name, staged in self._staged.items():
                self._tensors[name].copy_(staged)

    def _work(self, connect_channel: Callable[[], wire.Channel | None]) -> None:
        channel = None
        try:
            if (channel := connect_channel()) is None:
                return
            with self._lock:
                if self._errors:
                    return
                self._channels.append(channel)
            use_private_stream(self.device)
            receiver = transports.make_receiver(self._transport, channel, self.device, self._options)
            try:
                with torch.inference_mode():  # the parameters may be inference tensors
                    self._receive_chunks(channel, receiver)
            finally:
                receiver.close()
        except Exception as error:
            with self._lock:
                self._errors.append(error)
                for other in self._channels:
                    _shut_down(other)
        finally:
            if channel:
                channel.close()

    def _receive_chunks(self, channel: wire.Channel, receiver: transports.Receiver) -> None:
        copier = ChunkCopier(self._targets)
        ahead: deque[range] = deque()
        while True:
            while len(ahead) < 2 and (chunks := self._next_chunks(receiver.chunks_per_request)):
                channel.send(wire.GetChunks(chunks.start, chunks.stop))
                ahead.append(chunks)
            if not ahead:
                break
            chunks = ahead.popleft()
            receiver.begin_request(len(chunks))
            for index in chunks:
                length = self.layout.size(index)
                message, size = channel.receive(wire.Chunk)
                due = length if receiver.inline else 0
                if message.index != index or size != due:
                    raise wire.PeerError(f"received chunk {message.index} with {size} bytes; expected chunk {index} with {due}")
                chunk = receiver.receive(length)
                if self._hashed(host_bytes(chunk.cpu())) != self._manifest.digests[index]:
                    raise wire.PeerError(
                        f"chunk {index} of {self.layout.count} ({self._names(index)}) fails its checksum: it changed in "
                        "transit, or in the peer since loading"
                    )
                copier.write(index, chunk)

    def _names(self, index: int) -> str:
        first, *others = [self._manifest.tensors[number][0] for number, _, _ in self.layout.slices(index)]
        return f"{first} and {len(others)} more" if others else first

    def _next_chunks(self, most: int) -> range:
        with self._lock:
            first = self._next
            self._next = min(first + most, self.layout.count)
            return range(first, self._next) if not self._errors else range(0)


def _extra_connection(reconnect: Callable[[], wire.Channel]) -> wire.Channel | None:
    """An additional connection, or None if the server's limit is reached: the first connection can receive all chunks."""
    try:
        return reconnect()
    except wire.PeerError:
        return None


def _shut_down(channel: wire.Channel) -> None:
    with contextlib.suppress(OSError):
        channel.connection.shutdown(socket.SHUT_RDWR)
