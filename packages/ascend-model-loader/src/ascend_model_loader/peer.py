# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Client of a weight server: receives chunks over several connections and verifies their checksums
before writing parameters."""

import contextlib
import functools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from ascend_transfer.errors import printable

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


def connect(
    address: tuple[str, int], options: Options, secret: bytes, deadline: float
) -> wire.Channel:
    """Open an authenticated connection to a weight server.

    Raises:
        PeerError: it cannot be reached, or does not have the secret.
    """
    try:
        connection = socket.create_connection(
            address, min(options.connect_timeout, max(0.001, deadline - time.monotonic()))
        )
    except (OSError, OverflowError, UnicodeError) as error:
        # The last two are an invalid port or host name.
        raise wire.PeerError(
            f"cannot be reached: {getattr(error, 'strerror', None) or error}"
        ) from None
    channel = wire.Channel(connection, options.timeout, deadline)
    try:
        channel.authenticate_as_client(secret)
    except wire.PeerError:
        channel.close()
        raise
    return channel


LEAST_RATED = 10.0
"""Seconds over which a peer's rate is measured at least: Mooncake needs five to abort a read."""

BUSY_PAUSE = 1.0
"""Seconds after which busy peers are queried again."""


@dataclass(frozen=True)
class Fetch:
    """Fetch weights into ``tensors``, which have the same names, shapes and dtypes as at the peer.
    Only bytes whose checksum matched are written to them.

    ``identity`` is the required identity of the weights (identity.py).
    """

    tensors: Mapping[str, torch.Tensor]
    identity: Mapping[str, str]
    options: Options
    secret: bytes
    device: torch.device
    report: Report

    def from_peer(self, address: tuple[str, int]) -> wire.Manifest:
        """Fill the tensors with a peer's weights; returns its manifest.

        Raises:
            PeerError: the peer's weights are different or incomplete; the tensors may have been
                partly written.
        """
        options = self.options
        deadline = time.monotonic() + options.deadline
        first: wire.Channel | None
        with self.report.phase("manifest"):
            first = connect(address, options, self.secret, deadline)
            try:
                first.send(wire.GetManifest())
                manifest, _ = first.receive(wire.Manifest, max_size=wire.MAX_MANIFEST_BYTES)
                _check_manifest(manifest, self.tensors, self.identity, options.checksum)
            except wire.PeerError:
                first.close()
                raise
        reasons = []
        for transport in options.transports:
            try:
                with self.report.phase(_phase(transport, self.device)) as phase:
                    transfer = _Transfer(manifest, self, transport)
                    transfer.run(first, lambda: connect(address, options, self.secret, deadline))
                    phase.bytes = transfer.layout.total
                return manifest
            except wire.PeerError as error:
                by = "" if options.transports == ("tcp",) else f"by {transport}: "
                reasons.append(f"{by}{error}")
                first = None
        raise wire.PeerError(", ".join(reasons))

    def from_first(
        self, find: Callable[[], Iterable[tuple[str, int]]]
    ) -> tuple[wire.Manifest, tuple[str, int]]:
        """:meth:`from_peer` from the first of several peers that has the weights; the deadline is
        for all together.

        If some of them only have too many clients, ``find`` is called again: these clients may
        serve meanwhile, so that the peers become a tree.

        Raises:
            PeerError: none of them has; with each one's reason.
        """
        options, began = self.options, time.monotonic()
        failed: dict[tuple[str, int], str] = {}
        while True:
            busy: dict[tuple[str, int], str] = {}
            for address in dict.fromkeys(find()):
                if address in failed:
                    continue
                if (left := began + options.deadline - time.monotonic()) <= 0:
                    untried = (
                        f"the deadline of {options.deadline:g} s has passed, and further peers were"
                        " not tried"
                    )
                    raise wire.PeerError(", ".join([*_reasons(failed | busy), untried]))
                remaining = replace(options, deadline=left)
                try:
                    return replace(self, options=remaining).from_peer(address), address
                except wire.PeerBusyError as error:
                    busy[address] = str(error)
                except wire.PeerError as error:
                    failed[address] = str(error)
            if not busy or time.monotonic() + BUSY_PAUSE > began + min(
                options.busy_timeout, options.deadline
            ):
                raise wire.PeerError(", ".join(_reasons(failed | busy)))
            time.sleep(BUSY_PAUSE)


def _reasons(failed: Mapping[tuple[str, int], str]) -> list[str]:
    return [f"{host}:{port}: {reason}" for (host, port), reason in failed.items()]


def _phase(transport: str, device: torch.device) -> str:
    by = f", {transport}" if transport != "tcp" else ""
    return f"peer to {'NPU' if device.type == 'npu' else 'memory'}{by}"


def _check_manifest(
    manifest: wire.Manifest,
    tensors: Mapping[str, torch.Tensor],
    identity: Mapping[str, str],
    checksum: str,
) -> None:
    if other := differences(manifest.identity, identity):
        raise wire.PeerError(f"its weights differ: {other}")
    theirs, ours = manifest.tensors, tensor_specs(tensors)
    if theirs != ours:
        pairs = ((a, b) for a, b in zip(theirs, ours, strict=False) if a != b)
        differing = next(pairs, (f"{len(theirs)} tensors", f"{len(ours)} tensors"))
        has, expected = (printable(str(each)) for each in differing)
        raise wire.PeerError(f"its tensors differ: the peer has {has}, this engine {expected}")
    if manifest.chunk_bytes != CHUNK_BYTES or manifest.checksum not in CHECKSUMS:
        raise wire.PeerError(
            f"its chunks have {manifest.chunk_bytes} bytes and checksum"
            f" {printable(manifest.checksum)}; supported: {CHUNK_BYTES} bytes and"
            f" {' or '.join(CHECKSUMS)}"
        )
    if checksum == "blake3" != manifest.checksum:
        raise wire.PeerError(
            f"its checksums are {manifest.checksum}; this engine's option checksum is {checksum}"
        )
    if len(manifest.digests) != (count := chunk_layout(tensors).count):
        raise wire.PeerError(
            f"its manifest has checksums of {len(manifest.digests)} chunks; the tensors have"
            f" {count}"
        )


class _Transfer:
    """Transfer of all chunks, distributed over connections on demand."""

    def __init__(self, manifest: wire.Manifest, fetch: Fetch, transport: str) -> None:
        tensors, self.device = fetch.tensors, fetch.device
        self.layout = chunk_layout(tensors)
        self._transport, self._options, self._secret = transport, fetch.options, fetch.secret
        self._manifest, self._hashed = manifest, CHECKSUMS[manifest.checksum]
        self._staged = {
            name: torch.empty(each.shape, dtype=each.dtype)
            for name, each in tensors.items()
            if not is_plain(each)
        }
        self._tensors = tensors
        self._targets = [self._staged.get(name, each) for name, each in tensors.items()]
        self._lock, self._next, self._written = threading.Lock(), 0, 0
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
            # The parameters' memory may still be in use by earlier work on the current stream.
            torch.npu.synchronize()
        # Each HCCL communicator allocates buffers on the NPU.
        connections = 1 if self._transport == "hccl" else self._options.connections
        requests = -(-self.layout.count // transports.TcpTransport.chunks_per_request)
        extra = functools.partial(_extra_connection, reconnect)
        connects = [lambda: first or reconnect(), *[extra] * (min(connections, requests) - 1)]
        threads = [
            threading.Thread(target=self._work, args=[connect_channel], name="weights", daemon=True)
            for connect_channel in connects
        ]
        started: list[threading.Thread] = []
        for thread in threads:
            try:
                thread.start()
            except RuntimeError as error:  # too many processes and threads
                if not started:
                    cause = f"{error}; fix: raise the limit (ulimit -u, pids.max)"
                    raise wire.PeerError(cause) from None
                break
            started.append(thread)
        since, before = time.monotonic(), 0
        for thread in started:
            while thread.is_alive():  # bounded by its channel's deadline
                thread.join(0.2)
                seconds = time.monotonic() - since
                if seconds > max(LEAST_RATED, 2 * self._options.timeout):
                    self._check_rate((self._written - before) / seconds)
                    since, before = time.monotonic(), self._written
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
            receiver = transports.make_receiver(
                self._transport, channel, self.device, self._options, self._secret
            )
            try:
                self._receive_chunks(channel, receiver)
            finally:
                receiver.close()
        except Exception as error:
            self._fail(error)
        finally:
            if channel:
                channel.close()

    def _check_rate(self, rate: float) -> None:
        if rate < (least := self._options.min_bytes_per_second):
            slow = f"it sends {rate / 1e6:.3g} MB/s, less than min_bytes_per_second"
            self._fail(wire.PeerError(f"{slow}, {least / 1e6:.3g} MB/s"))

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._errors.append(error)
            for channel in self._channels:
                _shut_down(channel)

    def _receive_chunks(self, channel: wire.Channel, receiver: transports.Receiver) -> None:
        """Receive chunks until all are requested. Those of an engine are verified and copied while
        the next ones are read."""
        copier = ChunkCopier(self._targets)
        ahead: deque[range] = deque()
        copying: Future[None] | None = None
        with ThreadPoolExecutor(1, "weights", use_private_stream, (self.device,)) as copies:
            while True:
                while len(ahead) < 2 and (chunks := self._next_chunks(receiver.chunks_per_request)):
                    channel.send(wire.GetChunks(chunks.start, chunks.stop))
                    ahead.append(chunks)
                if not ahead:
                    break
                chunks = ahead.popleft()
                for index in chunks:
                    length = self.layout.size(index)
                    message, size = channel.receive(wire.Chunk)
                    due = length if receiver.inline else 0
                    if (message.index, size) != (index, due):
                        raise wire.PeerError(
                            f"received chunk {message.index} with {size} bytes; expected chunk"
                            f" {index} with {due}"
                        )
                    if receiver.inline:
                        self._write(copier, index, receiver.receive(length), chunk_is_private=True)
                if not receiver.inline:
                    received = receiver.receive(sum(map(self.layout.size, chunks)))
                    if copying:
                        copying.result()
                    copying = copies.submit(self._write_all, copier, chunks, received)
            if copying:
                copying.result()

    def _write_all(self, copier: ChunkCopier, chunks: range, received: torch.Tensor) -> None:
        for index, chunk in zip(chunks, received.split(CHUNK_BYTES), strict=True):
            self._write(copier, index, chunk, chunk_is_private=False)

    def _write(
        self, copier: ChunkCopier, index: int, chunk: torch.Tensor, chunk_is_private: bool
    ) -> None:
        """Copy a chunk into the tensors.

        Raises:
            PeerError: its checksum is wrong.
        """
        # Copy first: any process that reaches the engine can write its buffer, also between
        # checksum and use.
        chunk = chunk if chunk_is_private else chunk.to("cpu", copy=True)
        if self._hashed(host_bytes(chunk)) != self._manifest.digests[index]:
            raise wire.PeerError(
                f"chunk {index} of {self.layout.count} ({self._names(index)}) fails its checksum:"
                " it changed in transit, or in the peer since loading"
            )
        with torch.inference_mode():  # the parameters may be inference tensors
            copier.write(index, chunk)
        with self._lock:
            self._written += self.layout.size(index)

    def _names(self, index: int) -> str:
        first, *others = [
            self._manifest.tensors[number][0] for number, _, _ in self.layout.slices(index)
        ]
        return f"{first} and {len(others)} more" if others else first

    def _next_chunks(self, most: int) -> range:
        with self._lock:
            first = self._next
            self._next = min(first + most, self.layout.count)
            return range(first, self._next) if not self._errors else range(0)


def _extra_connection(reconnect: Callable[[], wire.Channel]) -> wire.Channel | None:
    """An additional connection, or None if the server's limit is reached: the first connection can
    receive all chunks."""
    try:
        return reconnect()
    except wire.PeerError:
        return None


def _shut_down(channel: wire.Channel) -> None:
    with contextlib.suppress(OSError):
        channel.connection.shutdown(socket.SHUT_RDWR)
