# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Cases of tests that take minutes and that another test covers in part: served by `tools/check`,
left out by the suite."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from harness import checkout

VARIABLE = "EVERY_CASE"


def is_wanted() -> bool:
    """Whether this run has the cases that the suite leaves out."""
    return VARIABLE in os.environ


def run(tests: str) -> NoReturn:
    """Run tests with every case, instead of this process.

    Args:
        tests: a path from the root of the checkout; arguments of the command line go to pytest.
    """
    command = [sys.executable, "-m", "pytest", str(checkout.ROOT / tests), *sys.argv[1:]]
    os.execve(sys.executable, command, os.environ | {VARIABLE: "1"})
