"""Why a transfer fails: a cause for people, one of a few kinds for the metrics, and what to do."""

from __future__ import annotations

from typing import Literal

Kind = Literal["peer", "transport", "lease", "deadline", "verify", "mismatch", "aborted", "internal"]

KINDS: tuple[Kind, ...] = ("peer", "transport", "lease", "deadline", "verify", "mismatch", "aborted", "internal")

HINTS: dict[Kind, str] = {
    "peer": "see whether that instance is alive and its ports can be reached from here",
    "transport": "see that instance's log and the network between the two",
    "lease": "raise lease on the prefill instance, or send the request to a decode instance with less to do",
    "deadline": "raise transfer_timeout, or look for what is slow between the two instances",
    "verify": "what arrived is not what was sent: see the network and the memory of both machines",
    "mismatch": "start both instances with the same model, dtype and connector",
    "aborted": "its client has left, nothing is to be done",
    "internal": "this is a defect of ascend-kv-connector; please report it with this line",
}


QUARANTINE_SECONDS = 60.0
"""Seconds that a buffer is left alone after a read into it failed: a transport may still write there."""


class TransferError(Exception):
    """A transfer cannot go on. ``kind`` is for counting, the message for people; ``rest`` is of a read that has failed, the
    seconds for which its buffer may still change: 0 if it was not begun."""

    def __init__(self, kind: Kind, cause: str, hint: str = "", quarantine: float = QUARANTINE_SECONDS) -> None:
        super().__init__(cause)
        self.kind: Kind = kind
        self.quarantine = quarantine
        self.hint = hint or HINTS[kind]
