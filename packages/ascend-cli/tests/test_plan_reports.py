# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""`vllm-ascend plan --report` with reports of NPUs, profiles and benchmarks, and reports that it
refuses."""

import json
from pathlib import Path

import pytest
from ascend_cli import figures, main
from ascend_cli.plan import estimate, laws, model, reports


def report(path, soc="Ascend910B3", emulated=False, **timings):
    """A report of `ascend-emulator verify` with these times."""
    facts = {"soc": soc, "emulated": emulated}
    observed = {
        name.replace("_", "-"): {"outcome": "observed", "facts": each}
        for name, each in timings.items()
    }
    cases = {"environment": {"environment": {"facts": facts}}, "timings": observed}
    path.write_text(json.dumps({"schema": 1, "cases": cases}))
    return str(path)


def plan(directory, path):
    """The exit code of the command for one NPU, with this report."""
    options = ["--soc", "Ascend910B3", "--npus", "1", "--report", path]
    return main.main(["plan", directory, *options])


def test_times_of_a_report_replace_published_figures(ten_layers, capsys, tmp_path):
    times = {"one_token_by_a_matrix": {"gb_per_second": 1200.0}}
    path = report(tmp_path / "cann.json", **times)
    assert plan(ten_layers, path) == 0
    assert "modelled device: matmul measured (cann.json); others fitted" in capsys.readouterr().out
    chip, known = reports.measured(figures.FIGURES["Ascend910B3"], Path(path))
    assert chip == figures.FIGURES["Ascend910B3"]  # the report has no collectives
    size = 2 * 4096**2
    result = known.operators["matmul"].seconds(chip, size, size, 1)
    assert result == pytest.approx(size / 1200e9)
    assert known.operators["attention"] == laws.LAWS["attention"]
    sizes, load = model.load(ten_layers), estimate.Load(1, 64, 64)
    slow = report(tmp_path / "b.json", one_token_by_a_matrix={"gb_per_second": 600.0})
    fast, slow = (
        estimate.estimate(sizes, *each[:1], estimate.Layout(1, 1, 1), load, each[1])
        for each in ((chip, known), reports.measured(chip, Path(slow)))
    )
    assert slow.modelled["tuned"].step_ms > 1.5 * fast.modelled["tuned"].step_ms


def test_matmuls_and_collectives_of_a_report(tmp_path):
    """Times of squares set the rate, those of two NPUs the links."""
    chip = figures.FIGURES["Ascend910B3"]
    facts = {
        "matmul_bfloat16": {"by_size": {"8192": 147.5}},
        "two_npus": {"all_reduce": {"1024": {"microseconds": 30.0, "gb_per_second": 20.0}}},
    }
    result, known = reports.measured(chip, Path(report(tmp_path / "cann.json", **facts)))
    assert known.operators["matmul"].rate == pytest.approx(0.5, rel=0.02)
    assert known.operators["matmul"].bandwidth == laws.LAWS["matmul"].bandwidth
    assert result.collective_us == 30
    assert laws.COLLECTIVE.bandwidth * result.link_gbs == pytest.approx(20)


def test_launches_of_a_report_correct_their_laws(tmp_path):
    chip = figures.FIGURES["Ascend910_93"]
    law = laws.LAWS["attention"]
    sizes = [1e6, 1e7, 1e8]
    launches = [["attention", size, 0, 1, 2e6 * law.seconds(chip, size)] for size in sizes]
    path = report(tmp_path / "cann.json", "Ascend910_9391", attention={"launches": launches})
    known = reports.measured(chip, Path(path))[1].operators["attention"]
    assert known.seconds(chip, 1e7) == pytest.approx(2 * law.seconds(chip, 1e7))
    assert known.origin == "cann.json"


def test_a_profile_corrects_matmuls_and_vector_operators(tmp_path):
    chip, law = figures.FIGURES["Ascend910_93"], laws.LAWS["matmul"]
    moved = 2 * (16 * 5120 + 5120 * 3200 + 16 * 3200)
    us = 3e6 * law.seconds(chip, moved, 2 * 16 * 5120 * 3200, 16)
    (tmp_path / "kernel_details.csv").write_text(
        "Name,Type,Duration(us),Input Shapes\n"
        f'matmul,MatMulV2,{us},"""16,5120;3200,5120"""\n'
        f'norm,AddRmsNorm,10,"""16,5120;16,5120;5120"""\n'
        f'cast,Cast,10,""""""\n'
    )
    known = reports.measured(chip, tmp_path / "kernel_details.csv")[1].operators
    assert known["matmul"].start_us == pytest.approx(3 * law.start_us)
    assert known["norm"].seconds(chip, 8 * 16 * 5120, rows=16) == pytest.approx(1e-5)
    assert known["rope"] == laws.LAWS["rope"]


def test_a_served_benchmark_sets_the_typical_host(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"mean_tpot_ms": 31.5, "mean_ttft_ms": 200.0}))
    chip, known = reports.measured(figures.FIGURES["Ascend910_93"], path)
    assert known.hosts["typical"].step_ms == 31.5
    assert known.hosts["tuned"] == laws.HOSTS["tuned"]
    assert "measured (bench.json)" in known.origins(chip)["typical host"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"emulated": True, "launch": {"eager": 5.0}},
            "is a report of the emulator, whose times are those of a CPU; fix:",
        ),
        (
            {"soc": "Ascend910B1"},
            "is a report of Ascend910B1; fix: --soc Ascend910B1, or a report of Ascend910B3",
        ),
        ({}, "has no times; fix: ascend-emulator verify --only timings,collectives"),
    ],
)
def test_other_reports_are_refused_in_one_line(ten_layers, capsys, tmp_path, given, message):
    path = report(tmp_path / "cann.json", **given)
    assert plan(ten_layers, path) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert plan(ten_layers, str(tmp_path / "none.json")) == 2
    assert "`vllm bench serve --save-result`: FileNotFoundError" in capsys.readouterr().err
