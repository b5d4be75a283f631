# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Runs of ``ascend-emulator verify``: cases that fail or hang, ranks, chips, and how it ends."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ascend_emulator.verify import (
    collectives,
    command,
    report,
    timings,
)
from sanitizers import without_sanitizers

WORKER = """
import json, os, signal, subprocess, sys, time
task = json.load(sys.stdin)
pipe = os.fdopen(task["pipe"], "w", buffering=1)
for case in task["cases"]:
    pipe.write(json.dumps({"begin": case}) + "\\n")
    if case[1] == "dot/float32":
        print("x.cpp: bad address 0x7f0011223344", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if case[1] == "dot/float16":
        rank = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        open(os.environ["RANK_FILE"], "w").write(str(rank.pid))
        time.sleep(600)
    record = {"outcome": "observed", "facts": {"npus": 1, "memory_used_percent": 0}}
    pipe.write(json.dumps({"end": case, "record": record}) + "\\n")
"""


@without_sanitizers("they handle SIGSEGV")
def test_cases_that_crash_or_hang_do_not_end_the_run(monkeypatch, tmp_path):
    """With a process instead of the one that uses the NPU, because no case is known to do this."""
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RANK_FILE", str(tmp_path / "rank"))
    monkeypatch.setattr(command, "child", SimpleNamespace(__name__="worker"))
    monkeypatch.setattr(command, "CASE_SECONDS", 5.0)
    options = SimpleNamespace(
        only="operators,limits,collectives", select="[dlt]*o*", quick=False, minutes=30.0, device=0
    )
    run = command.Run(command.selected(options), options)
    run.everything()
    result = {name: record for (_, name), record in run.records.items()}
    assert result.keys() == {name for _, name in run.cases}
    assert result["dot/float32"] == {
        "outcome": "crashed",
        "why": "x.cpp: bad address ADDRESS",
        "signal": 11,
    }
    assert result["dot/float16"] == {"outcome": "hung", "why": "no result in 5 s"}
    assert result["two-npus"] == {"outcome": "skipped", "why": "one NPU"}
    outcomes = [
        record["outcome"]
        for name, record in result.items()
        if name not in ("dot/float32", "dot/float16", "two-npus")
    ]
    assert set(outcomes) == {"observed"}
    assert len(outcomes) > 5
    # A killed process may stay a zombie for a while.
    state = Path("/proc", (tmp_path / "rank").read_text(), "stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_ranks_without_a_result_in_time_are_named(monkeypatch):
    """The case reports it itself: the run's own limit, of which it knows nothing, comes later."""
    assert command._seconds(("collectives", "two-npus")) > collectives.SECONDS
    monkeypatch.setattr(collectives, "SECONDS", 0.5)
    record = collectives.run("two-npus", {})
    message = "rank 0: no result in 0.5 s; rank 1: no result in 0.5 s"
    assert record == {
        "outcome": "failed",
        "error": {"type": "timeout", "codes": [], "message": message},
    }


@pytest.mark.slow
def test_chip_without_bfloat16_refuses_some_parts_and_runs_the_rest(run, tmp_path):
    command = [
        sys.executable,
        "-m",
        "ascend_emulator.cli",
        "verify",
        "--only",
        "timings,collectives",
        "--select",
        "[tm]*[s6]",
    ]
    machine = ("--npus", "2", "--soc", "Ascend310P3", "--memory", "1GiB")
    done = run("run", *machine, "--", *command, "--output", str(tmp_path / "own"))
    assert done.returncode == 0, done.stderr
    cases = report.read(tmp_path / "own.json")["cases"]
    codes = ["161002", "ERR00100"]
    assert cases["timings"]["matmul-bfloat16"]["outcome"] == "refused"
    assert cases["timings"]["matmul-bfloat16"]["error"]["codes"] == codes
    assert cases["timings"]["matmul-float16"]["outcome"] == "observed"
    results = cases["collectives"]["two-npus"]["facts"]["results"]
    assert {name: each["codes"] for name, each in results.items() if "codes" in each} == {
        "refused-bfloat16": codes
    }
    assert [each["right"] for name, each in results.items() if name.startswith("all_reduce-")] == [
        True
    ] * 3


@pytest.mark.parametrize(("always", "times"), [(True, 6), (False, 2)])
def test_ranks_time_a_collective_equally_often(always, times, monkeypatch):
    """A rank that took it for slow left the loop by itself: the other then waited for it."""
    # The event before the call may be recorded late, so the call is 20 times as long as the limit.
    monkeypatch.setattr(timings, "ENOUGH", 0.001)
    calls = []
    timings._seconds(lambda: calls.append(time.sleep(0.2)), always=always)
    assert len(calls) == times


def test_python_3_10_without_tomli_and_pip_is_one_line():
    """As an environment of uv has neither after an install without dependencies; site-packages are
    left out here."""
    script = (
        f"import sys; sys.path.append({str(Path(report.__file__).parents[2])!r}); sys.version_info"
        " = (3, 10)\nfrom ascend_emulator.cli import main"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("fix: install tomli, or use Python 3.11 or later\n")


def test_without_an_npu_one_line_says_so(tmp_path):
    """No torch at all, as on a machine where the command was tried in the wrong environment."""
    source = Path(report.__file__).parents[2]
    script = (
        f"import sys; sys.path.append({str(source)!r}); from ascend_emulator.cli import main\n"
        f"sys.exit(main(['verify', '--quick', '--output', {str(tmp_path / 'r')!r}]))"
    )
    clean = {"PATH": "/usr/bin", "PYTHONPATH": str(source), "PYTHONNOUSERSITE": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=clean,
        check=False,
    )
    assert done.returncode == 2
    assert "no NPU could be used" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
