"""What a tier asks of a pool: disk, Mooncake's store, or another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

STORED, LOADED = "stored", "loaded"


class PoolError(Exception):
    """The pool as a whole does not answer, and is to be left alone for a while; the text says which one and why, in one line."""


class Pool(Protocol):
    """Records by name; each call may be made by several threads at once, and may block.

    ``records[i]`` is uint8 ``[bytes]``, all of one size, and a part of one of ``buffer``.

    Raises:
        PoolError: each of them but ``close``.
    """

    description: str
    """For people: which pool it is."""

    def buffer(self, size: int) -> memoryview:
        """Memory for records, at a multiple of a page."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which of them there are."""

    def put(self, names: Sequence[str], records: Sequence[memoryview]) -> list[str]:
        """What came of each: ``stored``, or in a word why not, such as ``full``."""

    def get(self, names: Sequence[str], records: Sequence[memoryview]) -> list[str]:
        """What came of each: ``loaded``, or in a word why not, such as ``missing`` or ``cut``."""

    def remove(self, names: Sequence[str]) -> None:
        """Forget these, of which some are broken."""

    def close(self) -> None:
        """It may come twice, and while a call has not returned."""
