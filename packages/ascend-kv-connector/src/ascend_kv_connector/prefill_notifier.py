"""Notifications from a prefill instance to the decode instances that wait for its prompts (layer-by-layer transfers)."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from time import monotonic

from ascend_platform import extension

from ascend_kv_connector.auth import CurveKeys
from ascend_kv_connector.errors import TransferError, printable
from ascend_kv_connector.protocol import PrefillCancelled, PrefillStarted
from ascend_kv_connector.rpc import ClientPool, make_context

THREAD_COUNT = 4
"""Several, so that an unresponsive instance delays few others."""


class PrefillNotifier:
    """Sends messages to all ranks of a decode instance and awaits their replies; failures are logged."""

    def __init__(self, answer_timeout: float, keys: CurveKeys | None = None) -> None:
        self._timeout, self._keys = answer_timeout, keys
        self._context = make_context()
        self._waiting: SimpleQueue[tuple[tuple[tuple[str, int], ...], PrefillStarted | PrefillCancelled] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name="kv-announce", daemon=True) for _ in range(THREAD_COUNT)]
        for thread in self._threads:
            thread.start()

    def notify(self, ranks: tuple[tuple[str, int], ...], message: PrefillStarted | PrefillCancelled) -> None:
        self._waiting.put((ranks, message))

    def close(self) -> None:
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(2)
        if not any(thread.is_alive() for thread in self._threads):
            self._context.destroy(linger=0)

    def _run(self) -> None:
        clients = ClientPool(self._context, self._timeout, self._keys)
        while (item := self._waiting.get()) is not None:
            ranks, message = item
            for rank in ranks:
                try:
                    clients.get(rank).call(message, monotonic() + self._timeout)
                except TransferError as error:
                    extension.logger.warning(
                        "KV transfer of %s: cannot notify the decode instance at %s:%d: %s",
                        printable(message.request),
                        *rank,
                        error,
                    )
                    clients.close(rank)
        clients.close_idle(0.0)
