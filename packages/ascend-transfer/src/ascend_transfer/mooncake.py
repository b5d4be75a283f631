# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Mooncake's transfer engine (``mooncake.engine.TransferEngine``). A process creates one for each
host and protocol."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import secrets
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from time import monotonic, sleep
from typing import Any

import torch
from ascend_platform.extension import RefusedError, logger
from packaging.version import Version

from ascend_transfer.auth import CurveKeys
from ascend_transfer.engine import READ_SECONDS, Runs, release_when_settled
from ascend_transfer.errors import Settled, TransferError, at_once, never

WHEELS = (
    "mooncake-transfer-engine-npu",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
)
"""Wheels with the same modules; which one to install depends on the machine, so no wheel of ours
requires one of them."""

TESTED = "0.3.13"
"""Version of them whose behaviour at failures, closed connections and restarts this module was
tested with."""

TIMEOUT_VARIABLE = "MC_TRANSFER_TIMEOUT"
"""Seconds after which Mooncake aborts a read; read when an engine is created, default 30, at least
5 (Mooncake, ``mooncake-integration/transfer_engine/transfer_engine_py.cpp``)."""

PAUSES = 0.0001, 0.001
"""First and longest pause in seconds between looks at a transfer's state: a chunk of 16 MiB at 25
GB/s takes 0.0007 s."""

MOST_QUEUED = 16
"""Runs of a read or write in Mooncake's queue for a peer, which all threads share: it takes 1024 by
default (``MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER``), and then fails transfers."""

READ_ATTEMPTS = 5
"""Attempts of a read over ``tcp`` that fails at once: Mooncake keeps four connections to a peer
(``MC_TCP_LANES_PER_PEER``), and notices only by using them that a peer which was restarted has
closed them. A write is not repeated: what was sent may arrive."""

RETRY_SECONDS = 1.0
"""Seconds in which a read has to fail, and its runs to end, for another attempt."""

PORTS_OF_RANK = 20
"""Ports a rank with which an instance can be restarted at once: Mooncake tries random ones, and
takes none in TIME_WAIT."""

FAILED_BATCHES = 0, 2**64 - 1
"""Mooncake's return value for a batch that it could not submit."""

DONE, FAILED = 1, -1
"""States in which a batch has ended, and which free it when they are returned: it may not be looked
at again. In others, also in -2 for slices that are late, its bytes may still arrive."""

ACKNOWLEDGED_SINCE = 0, 3, 12
"""Version from which a write over ``tcp`` is done when its bytes are in the peer's memory; before,
and with the variable, it is when they have been sent
(https://github.com/kvcache-ai/Mooncake/pull/2850)."""

PROTOCOL_VARIABLE = "MC_TCP_PROTO"

IPV6_VARIABLE = "MC_USE_IPV6"
PORT_VARIABLES = ("MC_MIN_PRC_PORT", "MC_MAX_PRC_PORT")
"""First and last port of its listeners (sic, "PRC")."""


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
    _note_version()


@functools.cache
def _note_version() -> None:
    for wheel in WHEELS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            if not (found := metadata.version(wheel)).startswith(TESTED):
                text = "%s %s was not tested with this version; fix: pip install %s==%s.*"
                logger.warning(text, wheel, found, wheel, TESTED)


def acknowledges_writes() -> bool:
    """Whether a write over ``tcp`` is done when its bytes are in the peer's memory, if the peer's
    Mooncake can do that too."""
    versions = []
    for wheel in WHEELS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(Version(metadata.version(wheel)).release)
    return (
        max(versions, default=(0,)) >= ACKNOWLEDGED_SINCE
        and os.environ.get(PROTOCOL_VARIABLE) != "1"
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
            f"{name} cannot be loaded ({' '.join(str(error).split())}); fix: install the"
            " missing library, on Debian libibverbs1, libnuma1 and libcurl4"
        ) from None


class SharedEngine:
    """A TransferEngine, to which peers connect by host and port, without a metadata server
    (``P2PHANDSHAKE``).

    Mooncake refuses memory that is registered already: ``registered`` counts the users of each
    (address, bytes).
    """

    def __init__(self, host: str, protocol: str, timeout: int, ports: range | None) -> None:
        name = host
        if ":" in host:
            name = f"[{host}]"
            os.environ.setdefault(IPV6_VARIABLE, "1")
        if ports is not None:
            for variable, port in zip(PORT_VARIABLES, (ports[0], ports[-1]), strict=True):
                os.environ.setdefault(variable, str(port))
        module = import_module("mooncake.engine")  # reads these variables
        before = os.environ.get(TIMEOUT_VARIABLE)
        os.environ.setdefault(TIMEOUT_VARIABLE, str(timeout))
        given = os.environ[TIMEOUT_VARIABLE]
        self.timeout = max(5, int(given)) if given.isdecimal() else timeout
        try:
            self.engine = module.TransferEngine()
        finally:
            if before is None:
                del os.environ[TIMEOUT_VARIABLE]
        if code := self.engine.initialize(name, "P2PHANDSHAKE", protocol, ""):
            raise RefusedError(
                f"mooncake cannot start with protocol {protocol} on {host} (code {code}); fix:"
                f" {_fix(protocol, ports)}"
            )
        self.session = f"{name}:{self.engine.get_rpc_port()}/{secrets.token_hex(4)}"
        self._names: dict[str, str] = {}
        self._known: Counter[str] = Counter()
        self.registered: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()

    def peer_name(self, session: str) -> str:
        """The name for Mooncake of a peer: host and port, the latter behind as many zeros as
        processes were known by them before.

        Mooncake remembers by name where a peer's memory is and by which port it is read, for as
        long as this process lives (kvcache-ai/Mooncake#3072): what it knows of an instance that was
        restarted at the same port may now be another process. A session has a random part behind a
        slash, which distinguishes them.
        """
        with self._lock:
            if session not in self._names:
                address = session.partition("/")[0]
                host, _, port = address.rpartition(":")
                self._names[session] = f"{host}:{'0' * self._known[address]}{port}"
                self._known[address] += 1
            return self._names[session]

    def run(self, submit: Callable[..., int], session: str, runs: Runs) -> tuple[int, Settled]:
        """Submit runs and wait until all are done; returns 0, or a negative code and whether all
        that were submitted have ended.

        Mooncake's synchronous calls read the state without a pause, so that each takes a processor,
        and fail if they submit more runs than the peer's queue takes; this waits asleep, with few
        in the queue. Mooncake reports only the state of the first run of a batch, so each run
        is a batch. The timeout is that of the synchronous calls
        (``mooncake-integration/transfer_engine/transfer_engine_py.cpp``, ``batchTransferSync``,
        ``transferCheckStatus``).
        """
        until = monotonic() + self.timeout + runs.total / 1e9
        queued: deque[int] = deque()
        given = deque(zip(runs.local, runs.remote, runs.size, strict=True))
        while given or queued:
            if given and len(queued) < MOST_QUEUED:
                local, remote, size = given.popleft()
                if (batch := submit(session, [local], [remote], [size])) in FAILED_BATCHES:
                    return -1, Batches(self.engine, queued).have_ended
                queued.append(batch)
            else:
                state = self._wait(queued[0], until)
                if state in (DONE, FAILED):
                    queued.popleft()
                if state != DONE:
                    return state or -1, Batches(self.engine, queued).have_ended
        return 0, at_once

    def _wait(self, batch: int, until: float) -> int:
        """The state of a batch when it has ended, or is late."""
        pause, longest = PAUSES
        while not (state := self.engine.transfer_check_status(batch)) and monotonic() < until:
            sleep(pause)
            pause = min(2 * pause, longest)
        return int(state)

    def register(self, address: int, size: int) -> None:
        """Register memory, unless it is. Raises TransferError."""
        with self._lock:
            is_new = not self.registered[address, size]
            if is_new and (code := self.engine.register_memory(address, size)):
                cause = f"mooncake cannot register {size} bytes (code {code})"
                raise TransferError("transport", cause, settled=at_once)
            self.registered[address, size] += 1

    def unregister(self, address: int, size: int) -> None:
        """End a registration once its last user does."""
        with self._lock:
            self.registered[address, size] -= 1
            if not self.registered[address, size]:
                del self.registered[address, size]
                self.engine.unregister_memory(address)


def _fix(protocol: str, ports: range | None) -> str:
    if protocol not in ("tcp", "ascend") or ports is None:
        return f"protocol must be tcp, or ascend with {WHEELS[0]}"
    return (
        f"give option ports at least {PORTS_OF_RANK} ports a rank, it has {len(ports)} in all:"
        " Mooncake takes random ones, and those of an instance that has ended are in use for a"
        f" minute; protocol ascend needs {WHEELS[0]}"
    )


class Batches:
    """Batches of a failed read or write, which Mooncake goes on with: for as long as a peer is
    paused, or cut off."""

    def __init__(self, engine: Any, batches: Iterable[int]) -> None:
        self._engine, self._batches = engine, list(batches)
        self._lock = threading.Lock()

    def have_ended(self) -> bool:
        """Whether all have ended; those that have are freed."""
        with self._lock:
            state = self._engine.transfer_check_status
            self._batches = [each for each in self._batches if state(each) not in (DONE, FAILED)]
            return not self._batches


class _Engines:
    """This process's engines, each started once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[tuple[str, str, int, range | None], SharedEngine] = {}

    def get(self, host: str, protocol: str, timeout: int, ports: range | None) -> SharedEngine:
        key = host, protocol, timeout, ports
        with self._lock:
            if key not in self._engines:
                self._engines[key] = SharedEngine(*key)
            return self._engines[key]


_engines = _Engines()


def shared_engine(
    host: str, protocol: str, timeout: float, ports: range | None = None
) -> SharedEngine:
    """This process's engine for a host, a protocol, a timeout of reads in seconds, and ports to
    choose from.

    The environment's timeout has precedence. Engines take two ports of ``ports``, those of the
    first engine with any in this process; by default of 15000 to 17000.

    Raises:
        RefusedError: Mooncake is not installed, lacks a library, or does not start.
    """
    return _engines.get(host, protocol, max(5, int(timeout)), ports)


class MooncakeEngine:
    """See :class:`~ascend_transfer.engine.Engine`; it uses this process's engine. The keys
    are not used."""

    most_runs = sys.maxsize

    def __init__(
        self,
        host: str,
        protocol: str,
        keys: CurveKeys | None = None,
        ports: range | None = None,
        timeout: float = READ_SECONDS,
    ) -> None:
        self._shared = shared_engine(host, protocol, timeout, ports)
        self.session = self._shared.session
        self.name = f"mooncake ({protocol})"
        self.on_device = protocol == "ascend"
        self.can_write = self.on_device or acknowledges_writes()
        # Their memory must not be reused while it is registered.
        self._buffers: list[torch.Tensor] = []
        self._running = 0
        self._unsettled: list[Settled] = []
        self._lock = threading.Lock()
        self._unregister_all = weakref.finalize(self, _unregister_all, self._shared, self._buffers)

    def register(self, buffer: torch.Tensor) -> None:
        self._shared.register(buffer.data_ptr(), buffer.numel())
        self._buffers.append(buffer)

    def connect(self, session: str, seconds: float) -> None:
        """Reads connect."""

    def read(self, session: str, runs: Runs, seconds: float) -> None:
        with self._in_progress():
            self._run("read", session, runs)

    def write(self, session: str, runs: Runs) -> None:
        with self._in_progress():
            self._run("write", session, runs)

    @contextlib.contextmanager
    def _in_progress(self) -> Iterator[None]:
        with self._lock:
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def _run(self, direction: str, session: str, runs: Runs) -> None:
        name, settled = self._shared.peer_name(session), at_once
        code = 0
        for _ in range(READ_ATTEMPTS if direction == "read" and not self.on_device else 1):
            until = monotonic() + RETRY_SECONDS
            code, settled = self._attempt(direction, name, runs)
            if not code:
                return
            while not settled() and monotonic() < until:
                sleep(PAUSES[1])
            if monotonic() >= until:
                break
        with self._lock:
            self._unsettled = [each for each in self._unsettled if not each()] + [settled]
        cause = f"mooncake failed to {direction} {runs.total} bytes (code {code})"
        raise TransferError("transport", cause, settled=settled)

    def _attempt(self, direction: str, name: str, runs: Runs) -> tuple[int, Settled]:
        """0, or Mooncake's code, and when nothing is read or written any more."""
        engine, began = self._shared.engine, monotonic()
        if self.on_device:  # There, one batch is one call of CANN.
            transfer = getattr(engine, f"batch_transfer_sync_{direction}")
            code: int = transfer(name, runs.local, runs.remote, runs.size)
            # Before its timeout it returns only once CANN's call has ended and the link is closed
            # (ascend_direct_transport).
            return code, at_once if monotonic() - began < self._shared.timeout else never
        return self._shared.run(getattr(engine, f"batch_transfer_async_{direction}"), name, runs)

    def close(self) -> None:
        release_when_settled(
            lambda: not self._running and all(each() for each in self._unsettled),
            self._unregister_all,
        )


def _unregister_all(shared: SharedEngine, buffers: list[torch.Tensor]) -> None:
    while buffers:
        buffer = buffers.pop()
        shared.unregister(buffer.data_ptr(), buffer.numel())
