# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Interface of a pool of KV cache chunks, implemented for disk and Mooncake's store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

STORED, LOADED = "stored", "loaded"


class PoolError(Exception):
    """The pool does not respond and should be backed off from; the message says which pool and why,
    in one line."""


class Pool(Protocol):
    """Records by name; thread-safe, calls may block.

    ``records[i]`` is uint8 ``[bytes]``, all of one size, a slice of a ``buffer``.

    Raises:
        PoolError: any method except ``close``.
    """

    description: str
    """The pool's name for messages."""

    def buffer(self, size: int) -> memoryview:
        """Page-aligned memory for records."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether each name exists."""

    def put(self, names: Sequence[str], records: Sequence[memoryview]) -> list[str]:
        """Outcome for each: ``stored``, or a word for the reason, such as ``full``, which the
        pool's error code may follow."""

    def get(self, names: Sequence[str], records: Sequence[memoryview]) -> list[str]:
        """Outcome for each: ``loaded``, or a word for the reason, such as ``missing`` or ``cut``,
        as in ``put``."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove these records, which may be corrupt."""

    def close(self) -> None:
        """Close the pool; may be called twice, and while another call is in progress."""
