"""Transfer errors: a cause for users, a kind for the metrics, and a hint."""

from __future__ import annotations

from typing import Literal

Kind = Literal["peer", "transport", "lease", "deadline", "verify", "mismatch", "aborted", "sleep", "internal"]

KINDS: tuple[Kind, ...] = ("peer", "transport", "lease", "deadline", "verify", "mismatch", "aborted", "sleep", "internal")

HINTS: dict[Kind, str] = {
    "peer": "check that the instance is alive and its ports are reachable from here",
    "transport": "check the peer's log and the network between the two",
    "lease": "raise lease on the prefill instance, or route the request to a less loaded decode instance",
    "deadline": "raise transfer_timeout, or find what is slow between the two instances",
    "verify": "data was corrupted in transit: check the network and the memory of both machines",
    "mismatch": "start both instances with the same model, dtype and connector",
    "aborted": "the client disconnected; nothing to do",
    "sleep": "transfers end before an instance sleeps: route no requests to it, and wait until it has none",
    "internal": "this is a bug in ascend-kv-connector; please report it with this line",
}


QUARANTINE_SECONDS = 60.0
"""Seconds for which a buffer is not reused after a failed read: the transport may still write to it."""


def printable(text: str) -> str:
    """A peer's or a client's text as one printable line of at most 300 characters, for logs."""
    return "".join(each if each.isprintable() else "?" for each in text[:300])


class TransferError(Exception):
    """A transfer failed.

    ``kind`` is a label of the metrics. ``quarantine`` is for failed reads: the seconds for which the target buffer may still
    change; 0 if the read had not started.
    """

    def __init__(self, kind: Kind, cause: str, hint: str = "", quarantine: float = QUARANTINE_SECONDS) -> None:
        super().__init__(cause)
        self.kind: Kind = kind
        self.quarantine = quarantine
        self.hint = hint or HINTS[kind]
