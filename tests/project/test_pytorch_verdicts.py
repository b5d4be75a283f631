# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""PyTorch's own tests as a judge: names, verdicts, noise and the choice of cases
(tools/upstream_tests/pytorch_verdicts.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import checkout

# Pure functions of a command; everything else of tools/ is tested as a process.
pytorch_report = checkout.import_tool("upstream_tests.pytorch_report")
pytorch_verdicts = checkout.import_tool("upstream_tests.pytorch_verdicts")
run = checkout.import_tool("upstream_tests.run")
META = "test_meta.py"
OWNER = "TestMetaPRIVATEUSE1"


def lists(tmp_path: Path) -> Any:
    """Lists in the form of Ascend/pytorch."""
    meta = f"test/{META}::TestMetaDevicePRIVATEUSE1::"
    contents = {
        "disabled_testcases.json": {
            "test/test_ops.py::TestCommonPRIVATEUSE1::test_out_eye_npu": {"reason": "eye"}
        },
        "skip_list.json": {
            "skip_nodeids": [
                f"{meta}{variant}_dot_npu_float64" for variant in pytorch_verdicts.VARIANTS
            ]
        },
        "running_skiped_testcases.json": {
            f"{meta}test_meta_outplace_rand_npu_float32": {"reason": "random"}
        },
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content))
    entries = [{"_meta": {}}, {"nodeid": f"{meta}test_meta_outplace_add_npu_int16"}]
    (tmp_path / "pr_skip_list.jsonl").write_text(
        "".join(f"{json.dumps(entry)}\n" for entry in entries)
    )
    (tmp_path / "test_whitelist.yml").write_text(f"whitelist:\n  - test/{META}\n")
    return pytorch_verdicts.read([tmp_path])


@pytest.mark.parametrize(
    "owner", ["TestMetaPRIVATEUSE1", "TestMetaDevicePRIVATEUSE1", "TestMetaNPU", "TestMetaCPU"]
)
def test_releases_share_the_name_of_a_case(owner: str) -> None:
    assert pytorch_verdicts.key(META, f"{owner}::test_x_npu") == (META, "TestMeta", "test_x_npu")


def test_name_of_the_control() -> None:
    assert (
        pytorch_verdicts.on_cpu(f"{OWNER}::test_x_npu_float32") == "TestMetaCPU::test_x_cpu_float32"
    )


@pytest.mark.parametrize(
    ("file", "case", "verdict"),
    [
        ("test_ops.py", "TestCommonNPU::test_out_eye_npu", "fails"),
        # A file that was not run completely.
        ("test_ops.py", "TestCommonNPU::test_out_dot_npu", None),
        (META, f"{OWNER}::test_meta_outplace_dot_npu_float64", "fails"),
        (META, f"{OWNER}::test_meta_outplace_add_npu_int16", "fails"),
        (META, f"{OWNER}::test_meta_outplace_dot_npu_float32", "passes"),
        (META, f"{OWNER}::test_meta_outplace_rand_npu_float32", None),
    ],
)
def test_verdict(tmp_path: Path, file: str, case: str, verdict: str | None) -> None:
    assert lists(tmp_path).of(pytorch_verdicts.key(file, case)) == verdict


@pytest.mark.parametrize(
    ("pair", "verdict"),
    [("dot_npu_float64", "fails"), ("dot_npu_float32", "passes"), ("add_npu_int16", None)],
)
def test_verdict_of_a_pair_needs_all_variants(
    tmp_path: Path, pair: str, verdict: str | None
) -> None:
    case = pytorch_verdicts.key(META, f"{OWNER}::test_dispatch_meta_outplace_{pair}")
    assert lists(tmp_path).of_pair(case) == verdict


def test_noise_is_matched_by_name_unless_the_list_has_a_reason() -> None:
    rules = [{"cases": ["*linalg_inv_*"], "hardware": ["fails"], "reason": "no\nLAPACK"}]
    case = f"{META}::{OWNER}::test_meta_outplace_linalg_inv_npu_float32"
    assert pytorch_verdicts.noise(case, "fails", "", rules) == "no LAPACK"
    assert pytorch_verdicts.noise(case, "fails", "not implemented for DT_DOUBLE", rules) is None
    assert pytorch_verdicts.noise(case, "passes", "", rules) is None
    assert pytorch_verdicts.noise(case.replace("_inv", "_svd"), "fails", "", rules) is None


def test_choice_is_stratified_and_repeatable(tmp_path: Path) -> None:
    names = [f"{OWNER}::test_meta_outplace_op{n}_npu_float32" for n in range(50)]
    names += [f"{OWNER}::{variant}_dot_npu_float64" for variant in pytorch_verdicts.VARIANTS]
    settings = {
        "noise": [],
        "limits": {"default": {"passes": 10, "fails": 2, "reason": 1, "noise": 1}},
    }

    def choose(seed: int, share: float) -> dict[str, str]:
        return pytorch_verdicts.choose(META, names, lists(tmp_path), settings, seed, share)

    everything = choose(1, 1)
    sample = {name for name, what in everything.items() if what != "pair"}
    assert (len(sample), sum("float64" in name for name in sample)) == (12, 2)
    # each operator with each dtype, once
    assert sum(what != "sample" for what in everything.values()) == 51
    assert everything == choose(1, 1) != choose(2, 1)
    assert len(choose(1, 0.1)) < 10


@pytest.mark.parametrize(
    ("text", "outcome", "message", "how"),
    [
        ("passes", "passed", "", "agrees"),
        ("fails", "refused", "", "agrees"),
        ("fails", "passed", "", "too kind"),
        ("passes", "crashed", "", "too strict"),
        ("passes", "failed", "AssertionError: RuntimeError not raised", "too strict"),
        ("passes", "failed", "AssertionError: Tensor-likes are not close!", "wrong numbers"),
        ("fails", "skipped", "", "skipped"),
    ],
)
def test_agreement(text: str, outcome: str, message: str, how: str) -> None:
    assert pytorch_verdicts.agreement(text, outcome, message) == how


def test_what_fails_on_the_cpu_too_is_set_apart(tmp_path: Path) -> None:
    record = {"outcome": "failed", "message": "AttributeError", "for": "sample"}
    ran = {
        META: {
            "cases": {
                f"{OWNER}::test_meta_outplace_{name}_npu_float32": record for name in ("sin", "cos")
            }
        }
    }
    control = {
        META: {"cases": {"TestMetaCPU::test_meta_outplace_sin_cpu_float32": {"outcome": "failed"}}}
    }
    settings = {"noise": [], "explanations": [{"cases": ["too strict/*cos*"], "reason": "known"}]}
    sin, cos = pytorch_report.judge(ran, control, lists(tmp_path), settings, "sample")
    assert (sin.apart, sin.differs) == (pytorch_report.ON_CPU, False)
    assert (cos.apart, cos.why, cos.differs) == (None, "known", True)


@pytest.mark.parametrize(
    "message",
    [
        f"{run.EXPECTED}: RuntimeError: aclnnSin",
        run.IDLE,
        'AssertionError: "a.cpp:1\\ NPU\\ function\\ error" does not match "b.cpp:2 NPU function error"',
    ],
)
def test_what_says_nothing_about_an_npu_is_set_apart(tmp_path: Path, message: str) -> None:
    case = f"{OWNER}::test_meta_outplace_sin_npu_float32"
    record = {"outcome": "passed", "message": message, "for": "sample"}
    (judged,) = pytorch_report.judge(
        {META: {"cases": {case: record}}},
        {},
        lists(tmp_path),
        {"noise": [], "explanations": []},
        "sample",
    )
    assert judged.apart
    assert not judged.differs
