"""Mooncake's transfer engine (``mooncake.engine.TransferEngine``) as a transport."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
from ascend_platform import extension

from ascend_kv_connector.auth import CurveKeys
from ascend_kv_connector.errors import TransferError

WHEELS = ("mooncake-transfer-engine-npu", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
"""They have the same modules; which one fits depends on the machine, so that this wheel requires none."""

TIMEOUT_VARIABLE = "MC_TRANSFER_TIMEOUT"
"""Seconds after which Mooncake ends a read by itself; it reads this as an engine is made, 30 without it, and takes at least 5
(Mooncake, ``mooncake-integration/transfer_engine/transfer_engine_py.cpp``)."""


def check() -> None:
    """Look whether Mooncake is installed, without loading it.

    Raises:
        RefusedError: it is not.
    """
    if importlib.util.find_spec("mooncake") is None:
        raise extension.RefusedError(
            f"transport mooncake: Mooncake's transfer engine is not installed; run: pip install {WHEELS[0]} "
            f"(or {WHEELS[1]} where protocol tcp is enough)"
        )


def import_mooncake(module: str, title: str) -> Any:
    """A module of Mooncake's; ``title`` begins the line that refuses.

    Raises:
        RefusedError: Mooncake is not installed, or lacks a library.
    """
    check()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise extension.RefusedError(
            f"{title} cannot be loaded ({error}); install that library, on Debian libibverbs1, libnuma1 and libcurl4"
        ) from None


class MooncakeTransport:
    """Reads of a peer's registered memory; see :class:`~ascend_kv_connector.transport.Transport`.

    Peers find each other by host and port, without a metadata server (``P2PHANDSHAKE``).
    """

    def __init__(self, host: str, protocol: str, keys: CurveKeys | None = None) -> None:
        """Start an engine; it has no use for keys.

        Raises:
            RefusedError: Mooncake is not installed, lacks a library, or does not start.
        """
        engine = import_mooncake("mooncake.engine", "transport mooncake: Mooncake's transfer engine")
        os.environ.setdefault(TIMEOUT_VARIABLE, "30")
        self.name = f"mooncake ({protocol})"
        self.on_device = protocol == "ascend"
        self._engine = engine.TransferEngine()
        if code := self._engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
            raise extension.RefusedError(
                f"transport mooncake: an engine for {protocol} on {host} does not start (code {code}); protocol "
                f"can be tcp, or ascend with {WHEELS[0]}"
            )
        self.session = f"{host}:{self._engine.get_rpc_port()}"

    def register(self, buffer: torch.Tensor) -> None:
        if code := self._engine.register_memory(buffer.data_ptr(), buffer.numel()):
            raise TransferError("transport", f"mooncake cannot register {buffer.numel()} bytes (code {code})")

    def read(self, session: str, remote: int, local: int, size: int, seconds: float) -> None:
        if code := self._engine.transfer_sync_read(session, local, remote, size):
            raise TransferError("transport", f"mooncake's read of {size} bytes has failed (code {code})")

    def close(self) -> None:
        del self._engine
