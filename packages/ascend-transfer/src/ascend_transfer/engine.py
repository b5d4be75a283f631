# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Engines that move bytes between registered memory of two processes: Mooncake and HCCL."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from time import sleep
from typing import Any, NamedTuple, Protocol

import torch
from ascend_platform.extension import RefusedError, offered

from ascend_transfer.auth import CurveKeys
from ascend_transfer.errors import Settled

READ_SECONDS = 30.0
"""Timeout of a read by an engine that cannot abort reads one by one."""

SETTLE_POLL_SECONDS = 1.0

_kept: list[Callable[[], object]] = []
"""Never called: what they refer to is kept for the life of the process."""

ENGINES = {"mooncake": "ascend_transfer.mooncake.MooncakeEngine", "hccl": ""}
"""Class by name, whose module has ``check()``; "" is what ascend-communicator offers for the slot
``transfer_engine.NAME``."""


class Runs(NamedTuple):
    """``size[i]`` bytes at the peer's address ``remote[i]``, which belong at ``local[i]``."""

    remote: list[int]
    local: list[int]
    size: list[int]

    @property
    def total(self) -> int:
        return sum(self.size)


class Engine(Protocol):
    """One process's side of an engine.

    Arguments of the constructor are the host, the protocol, the keys if instances share a secret,
    ports to choose from (None for any), and the seconds after which a read is aborted, if the
    engine has to know them before. It raises RefusedError if the engine is not available.

    Attributes:
        name: for messages, such as ``mooncake (tcp)``; must be the same on both sides.
        session: what a peer passes to :meth:`read` to read from this side.
        on_device: whether it reads and writes NPU memory; otherwise buffers are on the host.
        can_write: whether it has :meth:`write`, and both sides can.
        most_runs: runs of a tensor up to which reading them is faster than packing them first.
    """

    name: str
    session: str
    on_device: bool
    most_runs: int
    can_write: bool

    def register(self, buffer: torch.Tensor) -> None:
        """Register a buffer, uint8 ``[bytes]``, for peers to read and for :meth:`read` to write.
        Raises TransferError."""

    def connect(self, session: str, seconds: float) -> None:
        """Connect to a peer, in this time, which the first read from it does otherwise. Raises
        TransferError."""

    def read(self, session: str, runs: Runs, seconds: float) -> None:
        """Copy runs of a peer's registered memory to registered memory here; returns when all have
        arrived.

        ``seconds`` is for engines that can abort a read. Others may return late: the caller does
        not wait for them and discards the bytes.

        Raises:
            TransferError: the memory here is undefined, and may change until the error is
                ``settled``.
        """

    def write(self, session: str, runs: Runs) -> None:
        """Copy runs of registered memory to addresses ``remote`` of a peer; only if ``can_write``.

        Raises:
            TransferError: the memory there is undefined, and may change until the error is
                ``settled``, and for as long as bytes that were sent are in transit.
        """

    def close(self) -> None:
        """Release all resources; no read is in progress any more, or can be waited for.

        Registered memory is kept until failed reads and writes are settled.
        """


def check(name: str, option: str) -> None:
    """Check that an engine exists and its dependencies are installed, without loading it;
    ``option`` is where it was named.

    Raises:
        RefusedError: in one line.
    """
    if name not in ENGINES:
        raise RefusedError(
            f"{option} is {name!r}; supported: {', '.join(ENGINES)}; fix: name one of these"
        )
    module, _ = _class(name)
    if ENGINES[name]:
        module.check()


def make_engine(
    name: str,
    host: str,
    protocol: str,
    keys: CurveKeys | None = None,
    ports: range | None = None,
    timeout: float = READ_SECONDS,
) -> Engine:
    """Create the engine of this name.

    Raises:
        RefusedError: it is not available.
    """
    module, engine = _class(name)
    return getattr(module, engine)(host, protocol, keys, ports, timeout)


def release_when_settled(settled: Settled, release: Callable[[], object]) -> None:
    """Call ``release`` once this is settled, unless the process has ended; what it refers to is
    kept until then."""

    def wait() -> None:
        while not settled():
            sleep(SETTLE_POLL_SECONDS)
        release()

    if settled():
        release()
        return
    try:
        threading.Thread(target=wait, name="transfer-settle", daemon=True).start()
    except RuntimeError:  # too many processes and threads
        _kept.append(release)


def _class(name: str) -> tuple[Any, str]:
    """The module of an engine, and the name of its class there.

    Raises:
        RefusedError: ascend-communicator is not installed, or is filtered out.
    """
    if (path := ENGINES[name] or offered(f"transfer_engine.{name}")) is None:
        raise RefusedError(
            f"{name} needs ascend-communicator, which is not active; fix: pip install"
            " ascend-communicator, and add ascend_communicator to VLLM_PLUGINS if that is set"
        )
    module, _, engine = path.rpartition(".")
    return importlib.import_module(module), engine
