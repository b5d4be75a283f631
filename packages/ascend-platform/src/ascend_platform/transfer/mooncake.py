"""Mooncake's transfer engine: whether it is installed, and engines of this process."""

import importlib
import importlib.util
import os
import threading
from typing import Any

from ascend_platform.components import RefusedError

WHEELS = ("mooncake-transfer-engine-npu", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
"""Wheels with the same modules; which one to install depends on the machine, so no wheel of ours requires one of them."""

TIMEOUT_VARIABLE = "MC_TRANSFER_TIMEOUT"
"""Seconds after which Mooncake aborts a read; read when an engine is created, default 30, at least 5 (Mooncake,
``mooncake-integration/transfer_engine/transfer_engine_py.cpp``)."""

IPV6_VARIABLE = "MC_USE_IPV6"
PORT_VARIABLES = ("MC_MIN_PRC_PORT", "MC_MAX_PRC_PORT")
"""First and last port of its listeners (sic, "PRC")."""

_starting = threading.Lock()


def check() -> None:
    """Check that Mooncake is installed, without loading it.

    Raises:
        RefusedError: it is not.
    """
    if importlib.util.find_spec("mooncake") is None:
        raise RefusedError(
            f"Mooncake's transfer engine is not installed; fix: pip install {WHEELS[0]} "
            f"(or {WHEELS[1]} if protocol tcp is enough)"
        )


def import_module(name: str) -> Any:
    """Import one of Mooncake's modules.

    Raises:
        RefusedError: Mooncake is not installed, or lacks a library.
    """
    check()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RefusedError(
            f"{name} cannot be loaded ({' '.join(str(error).split())}); install the missing library, on Debian libibverbs1, "
            "libnuma1 and libcurl4"
        ) from None


def start_engine(host: str, protocol: str, timeout: float, ports: range | None = None) -> tuple[Any, str]:
    """A new engine, to which peers connect by host and port, and its session, by which they name it.

    The environment's timeout of reads has precedence over ``timeout``, in seconds. Engines take two ports of ``ports``, those of
    the first engine with any in this process; by default of 15000 to 17000.

    Raises:
        RefusedError: Mooncake is not installed, lacks a library, or does not start.
    """
    name = host
    if ":" in host:
        name = f"[{host}]"
        os.environ.setdefault(IPV6_VARIABLE, "1")
    if ports is not None:
        for variable, port in zip(PORT_VARIABLES, (ports[0], ports[-1]), strict=True):
            os.environ.setdefault(variable, str(port))
    module = import_module("mooncake.engine")  # reads these variables
    with _starting:
        before = os.environ.get(TIMEOUT_VARIABLE)
        os.environ.setdefault(TIMEOUT_VARIABLE, str(max(5, int(timeout))))
        try:
            engine = module.TransferEngine()
        finally:
            if before is None:
                del os.environ[TIMEOUT_VARIABLE]
    if code := engine.initialize(name, "P2PHANDSHAKE", protocol, ""):
        raise RefusedError(
            f"mooncake cannot start with protocol {protocol} on {host} (code {code}); protocol must be tcp, or ascend with "
            f"{WHEELS[0]}"
        )
    return engine, f"{name}:{engine.get_rpc_port()}"
