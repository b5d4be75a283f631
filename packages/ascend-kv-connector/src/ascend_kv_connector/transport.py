"""What carries the bytes: buffers that a peer can read, and reading a peer's. Each transport is a class of this form."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
from ascend_platform import extension

from ascend_kv_connector.auth import CurveKeys

TRANSPORTS = {
    "mooncake": "ascend_kv_connector.mooncake.MooncakeTransport",
    "hccl": "ascend_kv_connector.hccl.HcclTransport",
}
"""Name, as ``transport`` of the options has it, to the qualified name of the class; its module has ``check()``."""


class Transport(Protocol):
    """One rank's end. Its constructor takes the host, the protocol and the keys, if instances share a secret, and raises
    RefusedError where it cannot serve.

    Attributes:
        name: for people, such as ``mooncake (tcp)``; two ranks need the same.
        session: what a peer gives to :meth:`read` to read from here.
        on_device: whether it reads and writes the NPU's memory; otherwise its buffers are on the host.
    """

    name: str
    session: str
    on_device: bool

    def register(self, buffer: torch.Tensor) -> None:
        """Let peers read this buffer, uint8 ``[bytes]``, and :meth:`read` write it. Raises TransferError."""

    def read(self, session: str, remote: int, local: int, size: int, seconds: float) -> None:
        """Copy ``size`` bytes from a peer's address to a registered one here; returns when they are there.

        ``seconds`` is for transports that can stop by themselves. One that cannot may return late: the client does not wait for
        it, and does not use the bytes.

        Raises:
            TransferError: what is at ``local`` is then undefined, and may still change for its ``rest`` in seconds.
        """

    def close(self) -> None:
        """Let go of everything; no read is under way any more, or can be waited for."""


def check(name: str) -> None:
    """Look whether there is a transport of this name and whether what it needs is installed, without loading it.

    Raises:
        RefusedError: in one line.
    """
    _module(name).check()


def make_transport(name: str, host: str, protocol: str, keys: CurveKeys | None = None) -> Transport:
    """The transport of this name.

    Raises:
        RefusedError: there is none, or it cannot serve here.
    """
    return getattr(_module(name), TRANSPORTS[name].rpartition(".")[2])(host, protocol, keys)


def _module(name: str) -> Any:
    if name not in TRANSPORTS:
        raise extension.RefusedError(f"kv_connector_extra_config.transport is {name!r}; it can be {', '.join(TRANSPORTS)}")
    return importlib.import_module(TRANSPORTS[name].rpartition(".")[0])
