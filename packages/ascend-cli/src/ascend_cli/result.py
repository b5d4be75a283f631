# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Results of the checks of ``vllm-ascend doctor``."""

from __future__ import annotations

import enum
from typing import NamedTuple

from ascend_platform.extension import installation


class Level(enum.StrEnum):
    """Outcome of a check; values as in the output of ``--json``."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Result(NamedTuple):
    """Outcome of one check. ``fix`` is the command or change that makes it pass, "" if
    it passes."""

    title: str
    state: Level
    found: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.title}: {installation.Problem(self.found, self.fix)}"


def ok(title: str, found: str) -> Result:
    """A check that passes."""
    return Result(title, Level.OK, found)


def expect(title: str, found: str, problem: str, fix: str) -> Result:
    """A check that fails if there is a problem."""
    return fail(title, problem, fix) if problem else ok(title, found)


def warn(title: str, found: str, fix: str) -> Result:
    """A check whose finding may be intended."""
    return Result(title, Level.WARN, found, fix)


def fail(title: str, found: str, fix: str) -> Result:
    """A check that fails: vLLM cannot serve, or not as configured."""
    return Result(title, Level.FAIL, found, fix)
