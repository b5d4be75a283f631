# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""`ascend-emulator verify --timings`: its list in short, the form of its times, and their mark."""

import argparse
import copy
import sys

import pytest
from ascend_emulator import cli
from ascend_emulator.verify import command, launches, report


def test_times_of_launches_are_an_option():
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    options = parser.parse_args([])
    assert "launches" not in {section for section, _ in command.selected(options)}
    options.only += ",launches"
    assert {name for section, name in command.selected(options) if section == "launches"} == set(
        launches.PROGRAMS
    )


@pytest.fixture(scope="module")
def timed(run, tmp_path_factory):
    """A report of the list in short, and what the command printed."""
    directory = tmp_path_factory.mktemp("timings")
    verify = [sys.executable, "-m", "ascend_emulator.cli", "verify", "--timings", "--quick"]
    verify += ["--only", "timings", "--output", str(directory / "own")]
    machine = ["--npus", "2", "--memory", "2GiB", "--"]
    done = run("run", *machine, *verify)
    assert done.returncode == 0, done.stderr
    return directory


def test_emulated_times_are_marked_in_file_and_name(timed):
    assert sorted(path.name for path in timed.iterdir()) == ["own-emulated.json", "own-emulated.md"]
    run_report = report.read(timed / "own-emulated.json")
    assert report.environment(run_report)["times"] == "emulated"
    records = run_report["cases"]["launches"]
    assert {name: each["outcome"] for name, each in records.items()} == dict.fromkeys(
        launches.PROGRAMS, "observed"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda facts, rows: facts.pop("times"), "times are None; supported here: emulated"),
        (lambda facts, rows: facts.update(times="measured"), "times are 'measured'; supported"),
        (lambda facts, rows: rows.append(["matmul", 1, "x"]), "is not a name and numbers"),
        (lambda facts, rows: rows.append([5, 1]), "is not a name and numbers"),
    ],
)
def test_form_of_times_is_checked(timed, change, problem):
    run_report = copy.deepcopy(report.read(timed / "own-emulated.json"))
    rows = run_report["cases"]["launches"]["matmul-by-rows"]["facts"]["launches"]
    change(report.environment(run_report), rows)
    assert problem in report.problems(run_report)[0]


def test_times_without_their_mark_are_not_written(timed, monkeypatch, tmp_path, capsys):
    records = report.read(timed / "own-emulated.json")["cases"]
    del records["environment"]["environment"]["facts"]["times"]

    def everything(run):
        run.records = {
            (part, name): each for part in records for name, each in records[part].items()
        }

    monkeypatch.setattr(command.Run, "everything", everything)
    options = ["--timings", "--quick", "--only", "timings", "--output", str(tmp_path / "own")]
    assert cli.main(["verify", *options]) == 2
    assert "times are None; supported here: emulated, modelled; fix:" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
