# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The environment variables ``ASCEND_EMULATOR_…``: which there are, and what they allow. A misspelled
one would have no effect, and a test that relies on it would always pass."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

PREFIX = "ASCEND_EMULATOR_"
# Pattern of ASCEND_EMULATOR_NAME by NAME, and a description of what it allows.
SWITCH = ("0|1", "0 and 1")
VALUES = {
    "POISON": SWITCH,
    "LEAKS": SWITCH,
    "RACES": SWITCH,
    "NULL": SWITCH,
    "ADVERSARY": (r"\d+", "a number"),
    "NUMERICS": (
        r"generic|(generic,)?jitter:\d+|jitter:\d+,generic",
        "generic, jitter:SEED, or both separated by a comma",
    ),
    "TIME": ("modelled", "modelled"),
    "HCCL_TRANSPORT": ("tcp", "tcp"),
    "SANITIZE": ("thread|address|undefined|address,undefined", "address,undefined, and thread"),
}
# Variables with names of entry points or rules, which the library checks.
NAMES = ("WITHOUT", "FAULTS", "ALLOW")
OTHERS = ("CACHE", "CALLS", "DRIVER", "HCCL_DELAY", "OPERATORS", "TRACE")
# Set by activation, for the library and npu-smi.
OWN = ("CHIP", "CUSTOM", "LACKS", "LAWS", "MEMORY", "NPUS", "SOC")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean NEAREST?``, or nothing where no known name is near."""
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def problem(name: str, value: str) -> str:
    """The fault of a value of ``ASCEND_EMULATOR_NAME``; empty if nothing is."""
    form, allowed = VALUES[name]
    return "" if re.fullmatch(form, value) else f"{value!r}; supported: {allowed}"


def check(environ: Mapping[str, str]) -> None:
    """Check the names of the emulator's variables, and values that are no names of CANN.

    Raises:
        ValueError: a variable is unknown, or has an unsupported value.
    """
    known = [f"{PREFIX}{name}" for name in (*VALUES, *NAMES, *OTHERS, *OWN)]
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        if variable not in known:
            raise ValueError(
                f"{variable} is no variable of the emulator{did_you_mean(variable, known)};"
                " fix: correct or unset it"
            )
        name = variable.removeprefix(PREFIX)
        if value and name in VALUES and (wrong := problem(name, value)):
            raise ValueError(f"{variable} is {wrong}; fix: correct or unset it")
