# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A weight server in this process, for the tests of ascend-model-loader."""

import contextlib
import functools
import socket
import threading
import time
from typing import Any, Self

import torch
from ascend_model_loader import peer
from ascend_model_loader.chunks import chunk_digests
from ascend_model_loader.options import Options
from ascend_model_loader.report import Report
from ascend_model_loader.server import WeightServer

SECRET = b"0123456789abcdef"
IDENTITY = {
    "name": "m@main",
    "checkpoint": "c0ffee",
    "config": "c",
    "dtype": "bfloat16",
    "tensor parallelism": "rank 0 of 1",
}


def weights(device: str = "cpu") -> dict[str, torch.Tensor]:
    """39 MB, in tensors that are smaller and larger than a chunk, empty, of no dimension and of odd
    sizes."""
    return {name: each.clone().to(device) for name, each in _weights().items()}


@functools.cache
def _weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        tensor.view(-1).view(torch.uint8).random_(0, 256, generator=draw)
        return tensor

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "embedding.weight": ((4001, 1024), torch.bfloat16),
        "scale": ((), torch.float32),
        "empty": ((0, 5), torch.float32),
        "quantized.weight": ((3333, 777), torch.int8),
        **{f"layers.{i}.norm": ((1023,), torch.bfloat16) for i in range(20)},
        "head.weight": ((14_000_000,), torch.float16),
        "flag": ((7,), torch.bool),
    }
    tensors = {name: random(*shape) for name, shape in shapes.items()}
    tensors["flag"] = tensors["flag"].view(torch.uint8).remainder(2).view(torch.bool)
    return tensors


def room(device: str = "cpu") -> dict[str, torch.Tensor]:
    """Tensors to load the weights into, with other content."""
    return {name: torch.zeros_like(each) for name, each in weights(device=device).items()}


def as_bytes(tensors: dict[str, torch.Tensor]) -> list[bytes]:
    return [
        each.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for each in tensors.values()
    ]


class Serving:
    """A weight server, and the weights that it serves."""

    def __init__(
        self, tensors: dict[str, torch.Tensor] | None = None, device: str = "cpu", **options: Any
    ) -> None:
        self.tensors = weights(device=device) if tensors is None else tensors
        self.options = Options(
            port=0, serve_weights=True, **{"timeout": 5.0, "deadline": 30.0} | options
        )
        self.device = torch.device(device)
        digests = chunk_digests(self.tensors, self.options.checksum, self.device)
        self.server = WeightServer(
            self.tensors, digests, IDENTITY, self.options, SECRET, self.device
        )
        self.server.start()

    def fetch(
        self,
        into: dict[str, torch.Tensor],
        identity: dict[str, str] = IDENTITY,
        secret: bytes = SECRET,
        **options: Any,
    ) -> Report:
        report, given = Report(), Options(**{"timeout": 5.0, "deadline": 30.0} | options)
        where = ("127.0.0.1", self.server.port)
        peer.Fetch(into, identity, given, secret, self.device, report).from_peer(where)
        return report


class Cut:
    """A proxy to a server that disconnects after some bytes, changes one, or passes one at a time.

    Args:
        after: bytes of all connections together; None for no end.
        flip: the number of the byte, of one connection, whose lowest bit is turned.
        delay: seconds that each byte waits.
    """

    def __init__(
        self, port: int, after: int | None, flip: int | None = None, delay: float = 0.0
    ) -> None:
        self._target, self._left, self._flip, self._delay = port, after, flip, delay
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listening.accept()
                theirs = socket.create_connection(("127.0.0.1", self._target))
                self._open += [ours, theirs]
                threading.Thread(target=self._pass, args=[ours, theirs, False], daemon=True).start()
                threading.Thread(target=self._pass, args=[theirs, ours, True], daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, counted: bool) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 if counted and self._delay else 1 << 16)):
                if counted:
                    if self._flip is not None and at <= self._flip < at + len(data):
                        data[self._flip - at] ^= 1
                    at += len(data)
                    time.sleep(self._delay)
                    with self._lock:
                        if self._left is not None:
                            self._left -= len(data)
                            data = data[: len(data) + min(0, self._left)]
                to.sendall(data)
                if self._left is not None and self._left <= 0:
                    return self._end()
            to.shutdown(socket.SHUT_WR)

    def _end(self) -> None:
        for each in [self._listening, *self._open]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
