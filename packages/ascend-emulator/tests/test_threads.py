# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Several threads use streams, events, graphs and memory at a time. Run threads.py by itself for
the thread sanitizer."""

import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("threads.py"))


@pytest.mark.parametrize("options", [[], ["--adversary", "3"]], ids=["plain", "adversary"])
def test_threads_do_not_disturb_each_other(run, options):
    done = run("run", "--npus", "2", *options, "--", sys.executable, PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("5 threads")
