# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Timing report of a load: seconds, bytes and GB/s of each phase, logged as one table."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Phase:
    name: str
    seconds: float = 0.0
    bytes: int = 0


class Report:
    """Phases of one load in order, including those of strategies that failed."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Time a phase; the caller sets its ``bytes``."""
        phase = Phase(name)
        begin = time.perf_counter()
        try:
            yield phase
        except BaseException:
            phase.name += " (failed)"
            raise
        finally:
            phase.seconds = time.perf_counter() - begin
            self.phases.append(phase)

    def table(self) -> str:
        """The table as text, with a header line."""
        rows = [("phase", "seconds", "bytes", "GB/s")]
        for each in self.phases:
            rate = f"{each.bytes / each.seconds / 1e9:.2f}" if each.bytes and each.seconds else ""
            rows.append(
                (each.name, f"{each.seconds:.3f}", f"{each.bytes:,}" if each.bytes else "", rate)
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ]
        return "\n".join(lines)
