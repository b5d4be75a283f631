"""Transfer errors: a cause for users, and a kind for metrics."""

from __future__ import annotations

from typing import Literal

Kind = Literal["peer", "transport", "lease", "deadline", "verify", "mismatch", "aborted", "sleep", "internal"]

KINDS: tuple[Kind, ...] = ("peer", "transport", "lease", "deadline", "verify", "mismatch", "aborted", "sleep", "internal")

QUARANTINE_SECONDS = 60.0
"""Seconds for which a buffer is not reused after a failed read: the engine may still write to it."""


def printable(text: str) -> str:
    """A peer's or a client's text as one printable line of at most 300 characters, for logs."""
    return "".join(each if each.isprintable() else "?" for each in text[:300])


def one_line(error: Exception) -> str:
    """An error's message in one line."""
    return " ".join((str(error) or type(error).__name__).split())


class TransferError(Exception):
    """A transfer failed.

    ``kind`` is a label of metrics; ``hint`` says what to do, if that is not the same for all errors of the kind. ``quarantine``
    is for failed reads: the seconds for which the target buffer may still change; 0 if the read had not started.
    """

    def __init__(self, kind: Kind, cause: str, hint: str = "", quarantine: float = QUARANTINE_SECONDS) -> None:
        super().__init__(cause)
        self.kind: Kind = kind
        self.quarantine = quarantine
        self.hint = hint
