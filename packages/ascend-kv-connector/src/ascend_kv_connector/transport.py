"""Interface of transports: registered memory, and one-sided reads of a peer's."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
from ascend_platform import extension

from ascend_kv_connector.auth import CurveKeys
from ascend_kv_connector.runs import Runs

TRANSPORTS = {
    "mooncake": "ascend_kv_connector.mooncake.MooncakeTransport",
    "hccl": "ascend_kv_connector.hccl.HcclTransport",
}
"""Class by value of option ``transport``; its module has ``check()``."""


class Transport(Protocol):
    """One rank's side of a transport.

    The constructor takes the host, the protocol, if instances share a secret the keys, and ports to choose from, None for any; it
    raises RefusedError if the transport is not available.

    Attributes:
        name: for messages, such as ``mooncake (tcp)``; must be the same on both ranks.
        session: what a peer passes to :meth:`read` to read from this rank.
        on_device: whether it reads and writes NPU memory; otherwise buffers are on the host.
        can_write: whether it has :meth:`write`.
        most_runs: runs of a region's tokens up to which reading them is faster than packing them first.
    """

    name: str
    session: str
    on_device: bool
    most_runs: int
    can_write: bool

    def register(self, buffer: torch.Tensor) -> None:
        """Register a buffer, uint8 ``[bytes]``, for peers to read and for :meth:`read` to write. Raises TransferError."""

    def read(self, session: str, runs: Runs, seconds: float) -> None:
        """Copy runs of a peer's registered memory to registered memory here; returns when all have arrived.

        ``seconds`` is for transports that can abort a read. Others may return late: the caller does not wait for them and
        discards the bytes.

        Raises:
            TransferError: the memory here is undefined, and may change for the error's ``quarantine`` seconds.
        """

    def write(self, session: str, runs: Runs) -> None:
        """Copy runs of registered memory here to a peer's, whose addresses are ``remote``; only if ``can_write``.

        Raises:
            TransferError: the memory there is undefined, and may change for the error's ``quarantine`` seconds.
        """

    def close(self) -> None:
        """Release all resources; no read is in progress any more, or can be waited for."""


def check(name: str) -> None:
    """Check that a transport exists and its dependencies are installed, without loading it.

    Raises:
        RefusedError: in one line.
    """
    _module(name).check()


def make_transport(name: str, host: str, protocol: str, keys: CurveKeys | None = None, ports: range | None = None) -> Transport:
    """Create the transport of this name.

    Raises:
        RefusedError: it does not exist, or is not available.
    """
    return getattr(_module(name), TRANSPORTS[name].rpartition(".")[2])(host, protocol, keys, ports)


def _module(name: str) -> Any:
    if name not in TRANSPORTS:
        raise extension.RefusedError(f"kv_connector_extra_config.transport is {name!r}; supported: {', '.join(TRANSPORTS)}")
    return importlib.import_module(TRANSPORTS[name].rpartition(".")[0])
