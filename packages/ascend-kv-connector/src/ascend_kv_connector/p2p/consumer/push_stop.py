# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""End of a push that has failed: the ranks that write are queried until they write no more."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from time import monotonic

from ascend_transfer.errors import TransferError
from ascend_transfer.rpc import ClientPool

from ascend_kv_connector.p2p.protocol import VERSION, Handshake, Refused, Release
from ascend_kv_connector.p2p.transfers import Source

LINGER_SECONDS = 120.0
"""Seconds for which bytes may arrive after their sender has closed the connection, or has died:
Linux gives up such a connection after 8 retransmissions, 102 s (``tcp_orphan_retries`` in
``Documentation/networking/ip-sysctl.rst``)."""

RETRY_SECONDS = 1.0, 30.0
"""First and longest pause between queries to ranks that have not confirmed that they write no more.
"""


class PushStop:
    """The end of a transfer at the ranks that write it. Those in ``left`` have not confirmed that
    they write no more."""

    def __init__(
        self,
        source: Source,
        message: Release,
        ranks: Iterable[tuple[str, int]],
        ask_again: Callable[[PushStop], None],
    ) -> None:
        """``ask_again(stop)`` calls :meth:`ask` in a thread."""
        self.source, self.left = source, list(dict.fromkeys(ranks))
        self._message, self._ask_again = message, ask_again
        self._lock = threading.RLock()  # ask_again may call ended
        self._asking, self._attempts, self._due = True, 0, 0.0
        self._linger, self._last = 0.0, 0.0

    def settled(self) -> bool:
        """Whether no more data can arrive; the remaining ranks are queried again from time to
        time."""
        with self._lock:
            now = monotonic()
            if self.left:
                if not self._asking and now >= self._due:
                    self._asking = True
                    self._ask_again(self)
                return False
            # A pause of this process does not count: what had arrived is read after it.
            self._linger -= min(now - self._last, 1.0)
            self._last = now
            return self._linger <= 0

    def ask(self, clients: ClientPool, seconds: float) -> None:
        """Ask the ranks that are left, for this long."""
        until = monotonic() + seconds
        for address in list(self.left):
            try:
                lingers = self._has_ended(clients, address, until)
            except TransferError:
                # A client that was refused once, also by a paused peer, stays refused.
                clients.close(address)
                continue
            with self._lock:
                self.left.remove(address)
                if lingers:
                    self._linger = LINGER_SECONDS
        self.ended()

    def ended(self) -> None:
        """An attempt has ended."""
        first, longest = RETRY_SECONDS
        with self._lock:
            self._due = monotonic() + min(longest, first * 2 ** min(self._attempts, 9))
            self._attempts += 1
            self._asking, self._last = False, monotonic()

    def _has_ended(self, clients: ClientPool, address: tuple[str, int], until: float) -> bool:
        """Ask a rank, which writes no more on return; whether bytes that it has sent may still
        arrive.

        Raises:
            TransferError: it has not confirmed it.
        """
        try:
            client = clients.get(address)
            reply = client.receive(client.send(Handshake(VERSION, self.source.engine)), until)
            if isinstance(reply, Refused) and reply.kind in ("peer", "mismatch"):
                return True  # another process has the address
            client.call(self._message, until)
        except TransferError as error:
            if error.kind != "transport" and not _refuses_connections(address):
                raise
            return True  # A write has failed, or the process has ended.
        return self._attempts > 0


def _refuses_connections(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, 1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False
