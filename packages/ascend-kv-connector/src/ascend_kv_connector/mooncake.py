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
"""Wheels with the same modules; which one to install depends on the machine, so this wheel requires none of them."""

TIMEOUT_VARIABLE = "MC_TRANSFER_TIMEOUT"
"""Seconds after which Mooncake aborts a read; read when an engine is created, default 30, at least 5 (Mooncake,
``mooncake-integration/transfer_engine/transfer_engine_py.cpp``)."""


def check() -> None:
    """Check that Mooncake is installed, without loading it.

    Raises:
        RefusedError: it is not.
    """
    if importlib.util.find_spec("mooncake") is None:
        raise extension.RefusedError(
            f"transport mooncake: Mooncake's transfer engine is not installed; fix: pip install {WHEELS[0]} "
            f"(or {WHEELS[1]} if protocol tcp is enough)"
        )


def import_mooncake(module: str, title: str) -> Any:
    """Import a Mooncake module; ``title`` is the prefix of the error message.

    Raises:
        RefusedError: Mooncake is not installed, or lacks a library.
    """
    check()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise extension.RefusedError(
            f"{title} cannot be loaded ({error}); install the missing library, on Debian libibverbs1, libnuma1 and libcurl4"
        ) from None


class MooncakeTransport:
    """Reads of a peer's registered memory; see :class:`~ascend_kv_connector.transport.Transport`.

    Peers connect by host and port, without a metadata server (``P2PHANDSHAKE``).
    """

    def __init__(self, host: str, protocol: str, keys: CurveKeys | None = None) -> None:
        """Start an engine; the keys are not used.

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
                f"transport mooncake: cannot start with protocol {protocol} on {host} (code {code}); protocol "
                f"must be tcp, or ascend with {WHEELS[0]}"
            )
        self.session = f"{host}:{self._engine.get_rpc_port()}"

    def register(self, buffer: torch.Tensor) -> None:
        if code := self._engine.register_memory(buffer.data_ptr(), buffer.numel()):
            raise TransferError("transport", f"mooncake cannot register {buffer.numel()} bytes (code {code})")

    def read(self, session: str, remote: int, local: int, size: int, seconds: float) -> None:
        if code := self._engine.transfer_sync_read(session, local, remote, size):
            raise TransferError("transport", f"mooncake failed to read {size} bytes (code {code})")

    def close(self) -> None:
        del self._engine
