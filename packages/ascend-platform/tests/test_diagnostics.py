# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The slot for diagnostics, with entry points in a directory on PYTHONPATH, in separate processes:
without one, with one, filtered out, and with an error."""

import os
import subprocess
import sys

import pytest
from harness.project.distributions import write_metadata

MODULE = """
def start_command(): print("start_command")
def watch(): print("watch")
def read_reports(): 1 / 0
"""
CALLS = """
import importlib.metadata, sys
from ascend_platform.process import diagnostics
if sys.argv[1:]:  # No other wheel's entry point.
    points = importlib.metadata.entry_points(group=diagnostics.GROUP)
    diagnostics._entry_point = lambda: min(
        (point for point in points if point.name in sys.argv[1:]), key=lambda point: point.name, default=None
    )
diagnostics.start_command(); diagnostics.watch(); diagnostics.watch(); diagnostics.read_reports()
print({"torch", "vllm"} & {*sys.modules})
"""


def calls(path, *names, **variables):
    """Lines that the calls of the slot print, and what they log."""
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(path), environ.get("PYTHONPATH", "")])
    )
    done = subprocess.run(
        [sys.executable, "-c", CALLS, *names],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.fixture
def wheel(tmp_path):
    """A wheel with diagnostics, whose name is the first of all."""
    points = "[vllm_ascend.diagnostics]\na_first = diagnosis\nb_second = no_such_module\n"
    write_metadata(tmp_path, "some-diagnostics", entry_points=points)
    (tmp_path / "diagnosis.py").write_text(MODULE)
    return tmp_path


def test_the_first_entry_point_by_name_is_called(wheel):
    lines, logged = calls(wheel)
    assert lines == ["start_command", "watch", "watch", "set()"]
    assert logged == ["vllm_ascend.diagnostics failed: ZeroDivisionError: division by zero"]


def test_the_filter_does_not_apply_to_the_start_of_a_command(wheel):
    assert calls(wheel, VLLM_PLUGINS="ascend") == (["start_command", "set()"], [])
    assert calls(wheel, VLLM_PLUGINS="ascend,a_first")[0][:2] == ["start_command", "watch"]


def test_without_diagnostics_nothing_is_called(wheel):
    assert calls(wheel, "no such name") == (["set()"], [])


def test_diagnostics_that_cannot_be_imported_are_logged(wheel):
    lines, logged = calls(wheel, "b_second")
    assert lines == ["set()"]
    assert "vllm_ascend.diagnostics failed: ModuleNotFoundError: " in logged[0]
