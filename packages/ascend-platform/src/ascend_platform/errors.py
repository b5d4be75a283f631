# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Refused configurations, and problems with the command that fixes them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple


class RefusedError(ValueError):
    """Unsupported configuration. vLLM's command ends with the message, which is one line, and
    without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class Problem(NamedTuple):
    """A problem, and the command or change that fixes it ("" if there is none)."""

    found: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.found}; fix: {self.fix}" if self.fix else self.found


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name that is nearest to an unknown one, or "".

    Args:
        cutoff: the least similarity, 0 to 1.
    """
    return next(iter(difflib.get_close_matches(str(name), [*known], n=1, cutoff=cutoff)), "")
