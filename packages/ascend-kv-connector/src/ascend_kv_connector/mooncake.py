"""Mooncake's transfer engine (``mooncake.engine.TransferEngine``) as a transport."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from ascend_platform import extension
from ascend_platform.transfer import mooncake

from ascend_kv_connector.auth import CurveKeys
from ascend_kv_connector.errors import TransferError
from ascend_kv_connector.runs import Runs

READ_SECONDS = 30.0
"""Timeout of a read."""


@contextmanager
def _prefixed_refusal() -> Iterator[None]:
    try:
        yield
    except extension.RefusedError as error:
        raise extension.RefusedError(f"transport mooncake: {error}") from None


def check() -> None:
    """Check that Mooncake is installed, without loading it.

    Raises:
        RefusedError: it is not.
    """
    with _prefixed_refusal():
        mooncake.check()


class MooncakeTransport:
    """Reads of a peer's registered memory; see :class:`~ascend_kv_connector.transport.Transport`.

    Peers connect by host and port, without a metadata server (``P2PHANDSHAKE``).
    """

    most_runs = sys.maxsize
    can_write = True

    def __init__(self, host: str, protocol: str, keys: CurveKeys | None = None, ports: range | None = None) -> None:
        """Start an engine; the keys are not used.

        Raises:
            RefusedError: Mooncake is not installed, lacks a library, or does not start.
        """
        with _prefixed_refusal():
            self._engine, self.session = mooncake.start_engine(host, protocol, READ_SECONDS, ports)
        self.name = f"mooncake ({protocol})"
        self.on_device = protocol == "ascend"

    def register(self, buffer: torch.Tensor) -> None:
        if code := self._engine.register_memory(buffer.data_ptr(), buffer.numel()):
            raise TransferError("transport", f"mooncake cannot register {buffer.numel()} bytes (code {code})")

    def read(self, session: str, runs: Runs, seconds: float) -> None:
        if code := self._engine.batch_transfer_sync_read(session, runs.local, runs.remote, runs.size):
            raise TransferError("transport", f"mooncake failed to read {runs.total} bytes (code {code})")

    def write(self, session: str, runs: Runs) -> None:
        if code := self._engine.batch_transfer_sync_write(session, runs.local, runs.remote, runs.size):
            raise TransferError("transport", f"mooncake failed to write {runs.total} bytes (code {code})")

    def close(self) -> None:
        del self._engine
