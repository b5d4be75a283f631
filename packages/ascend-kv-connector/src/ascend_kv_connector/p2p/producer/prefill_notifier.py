# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Notifications from a prefill instance to the decode instances that wait for its prompts
(layer-by-layer transfers)."""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

from ascend_platform import extension
from ascend_transfer.auth import CurveKeys
from ascend_transfer.errors import TransferError, printable
from ascend_transfer.rpc import ClientPool, make_context

from ascend_kv_connector.p2p.peers import PeerQueues
from ascend_kv_connector.p2p.protocol import CODEC, PrefillCancelled, PrefillStarted

ATTEMPTS = 3
"""Attempts to notify a rank; each is as long as the answer timeout."""

Ranks = tuple[tuple[str, int], ...]


class Notification(NamedTuple):
    """A message for all ranks of a decode instance."""

    ranks: Ranks
    message: PrefillStarted | PrefillCancelled


class PrefillNotifier:
    """Sends messages to decode instances and awaits their replies; an instance that does not reply
    delays no other one."""

    def __init__(self, answer_timeout: float, keys: CurveKeys | None = None) -> None:
        self.timeout, self.keys = answer_timeout, keys
        self.context = make_context()
        self._queues: PeerQueues[Notification] = PeerQueues(
            "kv-announce", lambda: NotificationSender(self)
        )

    def notify(self, ranks: Ranks, message: PrefillStarted | PrefillCancelled) -> None:
        try:
            self._queues.put(ranks, Notification(ranks, message), threads=1)
        except TransferError as error:
            extension.logger.warning(
                "KV transfer of %s: cannot notify the decode instance: %s",
                printable(message.request),
                error,
            )

    def close(self) -> None:
        if self._queues.close(2.0):
            self.context.destroy(linger=0)


class NotificationSender:
    """One thread's connections to the ranks of a decode instance."""

    def __init__(self, notifier: PrefillNotifier) -> None:
        self._timeout = notifier.timeout
        self._clients = ClientPool(CODEC, notifier.context, notifier.timeout, notifier.keys)

    def run(self, work: Notification) -> None:
        """Notify all ranks at once; those that did not reply are notified again. Failures are
        logged."""
        left = dict.fromkeys(work.ranks, "")
        for _ in range(ATTEMPTS):
            left = self._notify(left, work.message)
        for (host, port), cause in left.items():
            name = printable(work.message.request)
            extension.logger.warning(
                "KV transfer of %s: cannot notify the decode instance at %s:%d: %s",
                name,
                printable(host),
                port,
                cause,
            )

    def close(self) -> None:
        self._clients.close_idle(0.0)

    def _notify(
        self, ranks: dict[tuple[str, int], str], message: PrefillStarted | PrefillCancelled
    ) -> dict[tuple[str, int], str]:
        """The ranks that did not reply, with the cause."""
        sent, failed, deadline = {}, {}, monotonic() + self._timeout
        for rank in ranks:
            try:
                sent[rank] = self._clients.get(rank).send(message)
            except TransferError as error:
                failed[rank] = str(error)
        for rank, number in sent.items():
            try:
                self._clients.get(rank).await_reply(number, message, deadline)
            except TransferError as error:
                failed[rank] = str(error)
        for rank in failed:
            self._clients.close(rank)
        return failed
