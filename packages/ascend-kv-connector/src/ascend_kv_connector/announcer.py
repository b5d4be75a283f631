"""Telling decode instances that the prompts they wait for are being computed here."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from time import monotonic

import zmq
from ascend_platform import extension

from ascend_kv_connector.control import Caller
from ascend_kv_connector.errors import TransferError
from ascend_kv_connector.keys import Keys
from ascend_kv_connector.protocol import Announce, Dropped

THREADS = 4
"""So that an instance which does not answer holds up few others."""


class Announcer:
    """Sends what there is to say to all ranks of its instance, and waits for their answers; what fails is a line in the log."""

    def __init__(self, answer_timeout: float, keys: Keys | None = None) -> None:
        self._timeout, self._keys = answer_timeout, keys
        self._context = zmq.Context()
        self._waiting: SimpleQueue[tuple[tuple[tuple[str, int], ...], Announce | Dropped] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name="kv-announce", daemon=True) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def announce(self, places: tuple[tuple[str, int], ...], what: Announce | Dropped) -> None:
        self._waiting.put((places, what))

    def close(self) -> None:
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join(2)
        if not any(thread.is_alive() for thread in self._threads):
            self._context.destroy(linger=0)

    def _run(self) -> None:
        callers: dict[tuple[str, int], Caller] = {}
        while (work := self._waiting.get()) is not None:
            places, what = work
            for place in places:
                try:
                    if place not in callers:
                        callers[place] = Caller(self._context, *place, self._timeout, self._keys)
                    callers[place].ask(what, monotonic() + self._timeout)
                except (TransferError, zmq.ZMQError) as error:
                    said = "KV transfer of %s: the instance at %s:%d, which waits for it, cannot be told: %s"
                    extension.logger.warning(said, what.request, *place, error)
                    if caller := callers.pop(place, None):
                        caller.close()
        for caller in callers.values():
            caller.close()
