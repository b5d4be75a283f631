# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Progress of commands that take minutes, on standard error: a bar on a terminal, a line for each
step otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


class Progress:
    """How many of ``total`` steps are done, and how long the others will take."""

    def __init__(self, what: str, total: int, bars: Any = None) -> None:
        self.what, self.total, self.done, self.began = what, total, 0, time.monotonic()
        self.bars, self.bar = bars, bars.add_task(what, total=total) if bars else None
        self.show("")

    def advance(self, step: object = "") -> None:
        """A step was completed."""
        self.done += 1
        self.show(str(step))

    def show(self, step: str) -> None:
        if self.bars:
            self.bars.update(self.bar, completed=self.done, description=f"{self.what} {step}")
            return
        seconds = (time.monotonic() - self.began) / max(self.done, 1) * (self.total - self.done)
        left = f", {duration(seconds)} left" if self.done else ""
        line = f"{self.what} {self.done}/{self.total}{left}: {step}".removesuffix(": ")
        print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: int) -> Iterator[Progress]:
    if not sys.stderr.isatty():
        yield Progress(what, total)
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.MofNCompleteColumn(), rich.BarColumn(), rich.TimeRemainingColumn())
    with rich.Progress(
        *columns,
        rich.TextColumn("{task.description}"),
        console=Console(stderr=True),
        redirect_stdout=sys.stdout.isatty(),  # Output to a file or to a pipe stays there.
    ) as bars:
        yield Progress(what, total, bars)


def track(what: str, items: Collection[T]) -> Iterator[T]:
    """Iterate over items, and show the progress."""
    with progress(what, len(items)) as steps:
        for item in items:
            yield item
            steps.advance(item)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return (
        f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {seconds} s"
    )
