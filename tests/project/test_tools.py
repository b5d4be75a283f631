# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Commands of tools/: their index and help, and the progress that they show."""

import json
import subprocess
import sys
import time

import pytest
from harness import checkout
from harness.engines import launcher, npus
from harness.progress import duration, progress, track

COMMANDS = sorted(
    path.name for path in checkout.TOOLS.iterdir() if path.is_file() and not path.suffix
)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=checkout.ROOT, capture_output=True, text=True, check=False
    )


def test_help_lists_every_command_with_a_line() -> None:
    lines = run("tools/help").stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("tools/")] == [
        f"tools/{name}" for name in COMMANDS
    ]
    assert [line for line in lines if len(line) > 140 or not line.endswith(".")] == [""]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_begins_with_its_purpose(name: str) -> None:
    purpose = next(
        line.split(maxsplit=1)[1]
        for line in run("tools/help").stdout.splitlines()
        if line.startswith(f"tools/{name} ")
    )
    for command in ((f"tools/{name}", "-h"), ("tools/help", name)):
        done = run(*command)
        assert done.returncode == 0, done.stderr
        assert purpose in " ".join(done.stdout.split())


def test_progress_without_a_terminal_is_a_line_for_each_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert list(track("models", ["adder", "qwen3"])) == ["adder", "qwen3"]
    assert capsys.readouterr().err.splitlines() == [
        "models 0/2",
        "models 1/2, 0 min 0 s left: adder",
        "models 2/2, 0 min 0 s left: qwen3",
    ]
    assert [duration(59.6), duration(7261)] == ["1 min 0 s", "2 h 1 min"]


def test_progress_counts_the_results_of_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"RESULT {json.dumps({'name': 'TP2'})}"
    with progress("layouts", 1) as steps:
        done = npus.run(1, sys.executable, "-c", f"print({line!r})", progress=steps)
    assert npus.by_name(done) == {"TP2": {"name": "TP2"}}
    assert capsys.readouterr().err.splitlines()[-1].endswith("left: TP2")


def test_program_with_progress_ends_at_its_timeout() -> None:
    code = "import time; print('begun', flush=True); time.sleep(60)"
    with progress("layouts", 1) as steps, pytest.raises(subprocess.TimeoutExpired) as error:
        npus.run(1, sys.executable, "-c", code, progress=steps, timeout=3)
    assert error.value.stdout == b"begun\n"


def test_program_with_a_child_ends_at_its_timeout() -> None:
    child = "import time; time.sleep(40)"
    code = f"""if True:
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", {child!r}])
        print("begun", flush=True)"""
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as error:
        npus.run(1, sys.executable, "-c", code, timeout=8)
    assert error.value.stdout == b"begun\n"
    assert time.monotonic() - began < 30


def test_difference_between_ranks_is_told_with_its_place() -> None:
    record = {"tokens": [5, 7], "logprobs": [-0.5, -0.25]}
    nan = {"tokens": [5, 7], "logprobs": [-0.5, float("nan")]}
    assert launcher.difference([[record], [dict(record)]]) == ""
    expected = "rank 1 has other results than rank 0: [0]['logprobs'][1] -0.25 and nan"
    assert launcher.difference([[record], [nan]]) == expected
    shorter = [{"tokens": [5]}], [{"tokens": [5, 7]}]
    assert launcher.difference([*shorter]).endswith("[0]['tokens'] [5] and [5, 7]")
