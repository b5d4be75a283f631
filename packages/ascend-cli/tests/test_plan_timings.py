# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""`vllm-ascend plan --report` with a report of `ascend-emulator verify --timings` whose times are
known."""

import json
import sys
from pathlib import Path

import pytest
from ascend_cli import figures, main
from ascend_cli.plan import estimate, laws, model, reports
from harness.engines import npus

CHIP = figures.FIGURES["Ascend910B3"]
TIMED = ("matmul", "attention", "norm", "activation", "sampling")


def report(directory: Path, collectives: list, **facts: object) -> Path:
    """A report of an NPU with these times."""
    observed = {name.replace("_", "-"): {"facts": each} for name, each in facts.items()}
    observed["collectives-by-size"] = {"facts": {"collectives": collectives}}
    environment = {"soc": "Ascend910B3", "emulated": False, "times": "measured"}
    cases = {"environment": {"environment": {"facts": environment}}, "launches": observed}
    path = directory / "own.json"
    path.write_text(json.dumps({"schema": 1, "cases": cases}))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """All launches take three times their law's time and collectives five times."""
    launches = [
        [name, size, 0, 1, 3e6 * laws.LAWS[name].seconds(CHIP, size)]
        for name in TIMED
        for size in (1e4, 1e6, 1e8)
    ]
    collectives = [
        ["all_reduce", 2, sent, 5e6 * laws.COLLECTIVE.seconds(CHIP, sent, 2)]
        for sent in (1e3, 1e4, 1e5, 1e8, 2e8)
    ]
    layers = {"layers": 40, "graph_host": 8000.0, "eager_host": 200000.0}
    return report(tmp_path, collectives, steps={"launches": launches}, forty_layers=layers)


def test_times_of_a_report_move_the_plan_as_computed_by_hand(path: Path, ten_layers: str) -> None:
    chip, known = reports.measured(CHIP, path)
    # Matmul by the fitted law: 6.8 us and 8.7 us for 256 rows more, 80 % of the bandwidth.
    assert known.operators["matmul"].seconds(chip, 1.28e9) == pytest.approx(
        3 * ((6.8 + 8.7 / 256) * 1e-6 + 1.28e9 / 1280e9)
    )
    # Attention of 1,000 tokens with 8 heads of 128 in 10 layers: 10 us each, 48.7 %.
    layout, load = estimate.Layout(2, 1, 1), estimate.Load(1, 1000, 1)
    before, after = (
        estimate._Calculation(model.load(ten_layers), *each, layout, load, laws_of).step(1, 1000)
        for *each, laws_of in ((CHIP, laws.FITTED), (chip, known))
    )
    cached = 1000 * 2 * 2 * 4 * 128 * 10  # bytes of one of two NPUs
    assert after["attention"] == pytest.approx(3 * (10 * 10e-6 + cached / (0.487 * 1600e9)))
    assert after["matmuls"] == pytest.approx(3 * before["matmuls"])
    assert after["sampling"] == pytest.approx(3 * before["sampling"])
    # Two all-reduces a layer, of one row: their start of 20 us.
    assert after["links"] == pytest.approx(20 * 5 * (20e-6 + 8192 / (0.904 * 28e9)), rel=1e-3)
    unmeasured = {"rope", "scatter", "routing", "elementwise"}
    vectors = model.load(ten_layers).vectors(False)
    assert unmeasured | {"norm", "activation"} == set(vectors)
    assert before["vector operators"] < after["vector operators"] < 3 * before["vector operators"]


def test_times_of_layers_are_the_least_of_the_host(path: Path) -> None:
    """A replay of 40 layers takes 8 ms of the host, and their launches 200 ms."""
    known = reports.measured(CHIP, path)[1].hosts
    assert known["tuned"].graph(10) == pytest.approx(4e-3 + 10 * 0.2e-3)
    assert known["typical"].graph(10) == pytest.approx(55e-3)
    assert known["tuned"].eager(10) == pytest.approx(10 * 5e-3)


def test_the_plan_says_which_constants_are_measured(path: Path, ten_layers: str, capsys) -> None:
    command = ["plan", ten_layers, "--soc", "Ascend910B3", "--npus", "2", "--report", str(path)]
    assert main.main(command) == 0
    shown = capsys.readouterr().out
    names = "matmul, attention, norm, activation, sampling, collectives"
    assert f"modelled device: {names} measured (own.json); others fitted" in shown
    assert "200 us a layer in a graph and 5 ms without, measured (own.json)" in shown


def test_timings_of_verify_are_read(tmp_path: Path) -> None:
    """The list in short, on the emulator, whose times are refused as they are."""
    command = [sys.executable, "-m", "ascend_emulator.cli", "verify", "--timings", "--quick"]
    command += ["--only", "timings", "--output", str(tmp_path / "emulated")]
    done = npus.run(2, *command, memory="2GiB")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "emulated.json"
    result = json.loads(path.read_text())
    facts = result["cases"]["environment"]["environment"]["facts"]
    chip = figures.figures_of(facts["soc"])
    assert chip
    with pytest.raises(ValueError, match="is a report of the emulator"):
        reports.measured(chip, path)
    facts.update(emulated=False, times="measured")
    path.write_text(json.dumps(result))
    known = reports.measured(chip, path)[1]
    fitted = {"static quantize", "rope", "scatter", "transpose", "routing", "elementwise"}
    fitted |= {"sort", "argmax", "softmax", "top-k"}
    assert {name for name, law in known.operators.items() if not law.origin} == fitted
    assert known.collective.origin == known.hosts["tuned"].layers_origin == "emulated.json"
