# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Command ``ascend-emulator verify``: its tables, the emulator's own report, and the comparison of
two reports."""

import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ascend_emulator import chips, cli, laws, limits, rules
from ascend_emulator.verify import (
    command,
    diff,
    environment,
    errors,
    inputs,
    markdown,
    report,
    tables,
)

REPORTS = Path(__file__).parents[3] / "reports"
OWN_REPORT = REPORTS / "Ascend910B1" / "emulated-torch_npu-2.13.0.json"


PAGE = Path(__file__).parents[3] / "docs" / "verify.md"


def test_page_has_the_numbers_of_cases():
    options = SimpleNamespace(only=",".join(report.SECTIONS), select="*", quick=False)
    counts = Counter(section for section, _ in command.selected(options))
    rows = dict(re.findall(r"^\| (\w+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE))
    assert {section: int(count) for section, count in rows.items()} == {
        name: counts[name] for name in report.SECTIONS[1:]
    }
    assert min(counts["operators"] - 300, counts["refusals"] - 60) > 0


@pytest.mark.parametrize("section", ["operators", "refusals"])
def test_inputs_of_all_cases_can_be_made(section):
    """Expressions are compiled too: a mistake in a table is found without an NPU."""
    cases = tables.cases(section).values()
    for case in cases:
        compile(case.call, case.name, "eval")
        compile(case.before, case.name, "exec")
    for text in {text for case in cases for text in case.inputs.values()}:
        tensor = inputs.make(text, 3)
        assert str(tensor.dtype) == f"torch.{text.split()[0]}"


def test_cases_that_break_rules_have_processes_of_their_own():
    """Whether they compute is in test_report_of_the_emulator_is_complete_and_right."""
    result = {rule for case in tables.cases("operators").values() for rule in case.allows}
    assert {"dequant_swiglu_quant.columns", "fused_infer_large_heads.pages"} <= result
    assert result <= rules.rules().keys()
    name = "npu_scatter_pa_kv_cache-padded"
    batches = list(command._batches([("operators", "npu_swiglu/float32"), ("operators", name)]))
    variables = [command._environment(batch).get("ASCEND_EMULATOR_ALLOW", "") for batch in batches]
    assert ["scatter_pa_kv_cache.slots" in each.split(",") for each in variables] == [False, True]


def test_inputs_are_the_same_bits_on_every_machine():
    """Hashes of this version: a report of another machine can be compared only if it computed with
    the same inputs."""
    tensors = [
        inputs.make(text, 7)
        for text in (
            "float32 4096 -3..3",
            "bfloat16 100 normal",
            "int64 50 0..9",
            "int32 20 permutation",
        )
    ]
    assert [inputs.digest(each)[:8] for each in tensors] == [
        "b46b7f8e",
        "1b638de2",
        "e8e11c23",
        "93e79a34",
    ]
    assert -3 <= tensors[0].min() < -2.9 < 2.9 < tensors[0].max() < 3
    assert abs(tensors[0].mean().item()) < 0.1
    assert 0.8 < tensors[1].float().var() < 1.2
    assert set(tensors[2].tolist()) == set(range(10))
    assert sorted(tensors[3].tolist()) == list(range(20))


def test_nan_has_one_hash_and_zeros_have_two():
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert inputs.digest(bits[:1]) == inputs.digest(bits[1:])
    assert inputs.digest(torch.tensor(0.0)) != inputs.digest(torch.tensor(-0.0))


@pytest.mark.parametrize(
    ("shown", "kept"),
    [
        ("cannot read /home/someone/models/x.bin", "cannot read PATH"),
        ("bound to 192.168.7.12:29500 by PID 4711", "bound to ADDRESS by PROCESS"),
        ("address 0x7f12deadbeef of fe80::1ff:fe23:4567:890a", "address ADDRESS of ADDRESS"),
        (
            "error code is 161002, EZ1001 at 2026-01-02 03:04:05.678",
            "error code is 161002, EZ1001 at TIME",
        ),
    ],
)
def test_nothing_private_is_in_an_error(shown, kept, monkeypatch):
    assert errors.scrubbed(shown) == kept
    monkeypatch.setattr(errors, "private_words", lambda: ["buildhost7"])
    assert errors.scrubbed("on buildhost7:") == "on NAME:"


def test_error_has_the_codes_and_the_words_of_cann():
    error = RuntimeError(
        "dot:../third_party/op-plugin/Dot.cpp:66 NPU function error: call aclnnDot failed, error"
        " code is 161002\n[ERROR] 2026-01-01-00:00:00 (PID:77, Device:0, RankID:-1) ERR00100 PTA"
        " call acl api failed.\nEZ1001: [PID: 77] 2026-01-01-00:00:00.123.456 self dtype DT_DOUBLE"
        " not implemented."
    )
    result = errors.described(error)
    assert result["codes"] == ["161002", "ERR00100", "EZ1001"]
    assert result["message"] == "EZ1001: [PROCESS] TIME self dtype DT_DOUBLE not implemented."


@pytest.fixture(scope="module")
def own_report(tmp_path_factory):
    """A report of the emulator, of the small selection."""
    place = tmp_path_factory.mktemp("verify") / "own"
    command = [
        sys.executable,
        "-m",
        "ascend_emulator.cli",
        "verify",
        "--quick",
        "--minutes",
        "30",
        "--output",
        str(place),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    assert "no host names" in done.stdout
    return report.read(place.with_suffix(".json"))


def test_report_of_the_emulator_is_complete_and_right(own_report):
    assert report.problems(own_report) == []
    assert own_report["complete"]
    assert {record["outcome"] for record in own_report["cases"]["operators"].values()} == {
        "computed"
    }
    assert [
        name
        for name, record in own_report["cases"]["operators"].items()
        if record.get("within") is False
    ] == []
    assert own_report["cases"]["refusals"]["float64/dot(x, x)"]["error"]["codes"] == [
        "161002",
        "ERR00100",
    ]
    assert own_report["cases"]["runtime"]["graphs-replay-with-new-inputs"]["facts"] == {
        "first": 262144.0,
        "second": 1048576.0,
    }
    page = markdown.text(own_report)
    assert "| `float64/dot(x, x)` | refused | 161002 ERR00100 |" in page


def test_report_names_the_vector_unit():
    """Sums of two reports differ in their order if they are of different units."""
    facts = environment.PROGRAMS["environment"]({})["facts"]
    assert facts["vector_unit"] == limits.vector_unit(os.environ)


def test_emulator_agrees_with_its_report_in_the_repository(own_report):
    """A change of what the emulator computes or refuses needs a new report: docs/verify.md has the
    command."""
    comparison = diff.compare(own_report, report.read(OWN_REPORT))
    assert comparison.disagreements == {}
    assert comparison.agreements > 100


ALTERATIONS = {
    "an error": (
        ("operators", "matmul/float16/33x65 65x17", "outputs", 0, "ulps"),
        99.0,
        "the same bits, but ulps",
    ),
    "a code": (
        ("refusals", "acl/set-device-99", "error", "codes"),
        ["507899"],
        "refused 107001 | refused 507899",
    ),
    "an outcome": (
        ("refusals", "npu_swiglu-odd", "outcome"),
        "accepted",
        "refused 161002 ERR00100 | accepted",
    ),
    "a fact": (
        ("runtime", "memory-granularity", "facts", "bytes_of_1"),
        32,
        "bytes_of_1: 512 | 32",
    ),
    "a result": (("operators", "integer/add/int32", "outputs", 0, "most"), 3, "most 0 and 3"),
    "a special value": (("operators", "special/exp", "values", 0, 10), "0.0", "inf"),
}


@pytest.mark.parametrize("what", ALTERATIONS)
def test_one_altered_number_is_shown(own_report, what):
    (section, name, *path), value, shown = ALTERATIONS[what]
    altered = copy.deepcopy(own_report)
    place = altered["cases"][section][name]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if what == "a special value":
        altered["cases"][section][name]["outputs"][0]["hash"] = "0" * 16
        altered["cases"][section][name]["outputs"][0].pop("within")
    comparison = diff.compare(own_report, altered)
    assert list(comparison.disagreements) == [f"{section} {name}"]
    assert shown in comparison.disagreements[f"{section} {name}"]
    text = diff.text(own_report, altered, comparison)
    assert "B was altered after it was written." in text
    assert "A was altered" not in text
    assert report.problems(altered) == [
        "the checksum does not match: the report was altered after it was written"
    ]


def test_rounding_is_not_a_disagreement_and_a_worse_error_is(own_report):
    other = copy.deepcopy(own_report)
    output = other["cases"]["operators"]["softmax/softmax/float32"]["outputs"][0]
    output |= {"hash": "0" * 16, "ulps": 1.0}
    assert list(diff.compare(own_report, other).rounding) == ["operators softmax/softmax/float32"]
    output["ulps"] = 12.0
    assert list(diff.compare(own_report, other).disagreements) == [
        "operators softmax/softmax/float32"
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda each: each.update(schema=2), "schema is 2; supported: 1"),
        (lambda each: each.pop("tables"), "missing: tables"),
        (lambda each: each["cases"].update(extra={}), "unknown section 'extra'"),
        (lambda each: each["cases"]["refusals"].update(x={"outcome": "fine"}), "outcome is 'fine'"),
        (
            lambda each: each["cases"]["refusals"].update(
                x={"outcome": "refused", "hostname": "x"}
            ),
            "unknown field 'hostname'",
        ),
        (
            lambda each: each["cases"]["refusals"].update(
                x={"outcome": "failed", "why": "in /home/me/x"}
            ),
            "it contains a path",
        ),
        (
            lambda each: each["cases"]["refusals"].update(
                x={"outcome": "failed", "why": "10.1.2.3"}
            ),
            "it contains an address",
        ),
    ],
)
def test_form_is_checked(own_report, change, problem):
    altered = copy.deepcopy(own_report)
    change(altered)
    assert any(problem in each for each in report.problems(altered))


def measured_on(figures, soc="Ascend910B1", emulated=False):
    """The emulator's report with another machine's name and times."""
    other = copy.deepcopy(figures)
    report.environment(other).update(soc=soc, emulated=emulated)
    facts = {
        "copy-on-the-device": {"best": 1234.0},
        "launch": {"eager": 7.5, "graph": 2.5},
        "matmul-float16": {"best": 290.0, "by_size": {"4096": 290.0, "8192": 290.0}},
    }
    other["cases"]["timings"] = {
        name: {"outcome": "observed", "facts": each} for name, each in facts.items()
    }
    return other


def test_times_of_a_report_replace_published_figures(own_report, run, tmp_path):
    chip = chips.chip("Ascend910B1")
    result, records = chips.measured(chip, measured_on(own_report))
    assert result.launch == pytest.approx(7.5e-6)
    assert result == dataclasses.replace(chip, launch=result.launch)
    known = laws.measured(result, records)
    size, length, work = 256 << 20, 8192, 2 * 8192**3
    assert known["elementwise"].seconds(chip, size) == pytest.approx(size / 1234e9, rel=1e-3)
    seconds = known["matmul"].seconds(chip, 6 * length**2, work, length)
    assert seconds == pytest.approx(work / 290e12, rel=0.05)
    changed = {name for name, law in known.items() if law != laws.laws()[name]}
    assert changed == {"matmul", "elementwise"}
    path = tmp_path / "npu.json"
    path.write_text(report.text(measured_on(own_report)))
    script = "import os; print(os.environ['ASCEND_EMULATOR_CHIP'].split('launch=')[-1][:3] in ('7.5', '7.4'))"
    time, command_ = ("--time", f"modelled={path}"), (sys.executable, "-S", "-c", script)
    done = run("run", *time, "--memory", "1GiB", "--", *command_)
    assert (done.returncode, done.stdout) == (0, "True\n")
    version = report.environment(own_report)["torch_npu"]
    assert done.stderr.endswith(
        f" are modelled by times measured on Ascend910B1, CANN 9.1.0, torch_npu {version}\n"
    )


def test_times_of_another_chip_are_refused(own_report):
    chip = chips.chip("Ascend910B1")
    with pytest.raises(ValueError, match="its times are those of a CPU"):
        chips.measured(chip, own_report)
    with pytest.raises(ValueError, match="the report is of Ascend910B4; give --soc Ascend910B4"):
        chips.measured(chip, measured_on(own_report, "Ascend910B4"))
    with pytest.raises(ValueError, match="the report has no times"):
        chips.measured(
            chip,
            measured_on(own_report)
            | {
                "cases": {
                    **own_report["cases"],
                    "environment": measured_on(own_report)["cases"]["environment"],
                }
            },
        )


def test_reports_of_the_repository_have_the_right_form():
    paths = sorted(REPORTS.rglob("*.json"))
    assert OWN_REPORT in paths
    for path in paths:
        result = json.loads(path.read_text())
        assert report.problems(result) == []
        assert report.environment(result)["soc"] == path.parent.name


def test_ctrl_c_leaves_a_partial_report(own_report, monkeypatch, tmp_path, capsys):
    def interrupted(run):
        run.records["environment", "environment"] = own_report["cases"]["environment"][
            "environment"
        ]
        raise KeyboardInterrupt

    monkeypatch.setattr(command.Run, "everything", interrupted)
    assert cli.main(["verify", "--only", "timings", "--output", str(tmp_path / "part")]) == 0
    run_report = report.read(tmp_path / "part.json")
    assert report.problems(run_report) == []
    assert not run_report["complete"]
    assert run_report["cases"]["timings"]["launch"] == {
        "outcome": "skipped",
        "why": "stopped by ctrl-C",
    }
    assert "The report is not complete" in capsys.readouterr().out
