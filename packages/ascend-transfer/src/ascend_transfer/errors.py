# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Transfer errors: a cause for users, and an error code for metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

Kind = Literal[
    "peer", "transport", "lease", "deadline", "verify", "mismatch", "aborted", "sleep", "internal"
]

KINDS: tuple[Kind, ...] = get_args(Kind)

Settled = Callable[[], bool]
"""Whether a failed read or write can change its target no more. Once True it stays so."""


def at_once() -> bool:
    """Settled: the read or write had not started, or has ended."""
    return True


def never() -> bool:
    """Settled: the engine cannot know when the read or write ends."""
    return False


def printable(text: str) -> str:
    """A peer's or a client's text as one printable line of at most 300 characters, for logs."""
    return "".join(each if each.isprintable() else "?" for each in text[:300])


def one_line(error: Exception) -> str:
    """An error's message in one line."""
    return " ".join((str(error) or type(error).__name__).split())


class TransferError(Exception):
    """A transfer failed.

    ``kind`` is the error code, a label of metrics; ``hint`` is the fix, if it differs from that of
    other errors with this code. ``settled`` is for failed reads and writes: until it is True, the
    target's memory may still change and must not be reused.
    """

    def __init__(self, kind: Kind, cause: str, hint: str = "", settled: Settled = never) -> None:
        super().__init__(cause)
        self.kind: Kind = kind
        self.settled = settled
        self.hint = hint
