# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Kimi-Linear through vLLM's engine, compared with transformers: `tools/check hybrid` has more ways
to serve it."""

from pathlib import Path
from typing import Any

import pytest
from harness.compare import hybrid
from harness.compare.families import EXACT
from harness.engines import npus
from harness.progress import progress

WAYS = ("Kimi-Linear, eager, few blocks", "Kimi-Linear, TP2")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("kimi-linear")
    cases = [hybrid.case(name, folder, "float32") for name in WAYS]
    with progress("ways:", len(cases)) as steps:
        done = hybrid.run(cases, "", 1500, folder, steps)
    served = npus.by_name(done)
    return {
        case["name"]: hybrid.compare(
            Path(case["model"]), case["engine"]["dtype"], served[case["name"]]["ranks"]
        )
        | {"counters": served[case["name"]]["ranks"][0]["counters"]}
        for case in cases
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_answers_in_float32_are_those_of_transformers(name: str, results: dict[str, Any]) -> None:
    result = results[name]
    print(name, result)
    assert result["tokens"] > 400
    assert result["others"] == 0
    assert result["most"] < EXACT


@pytest.mark.slow
def test_requests_are_preempted(results: dict[str, Any]) -> None:
    assert results["Kimi-Linear, eager, few blocks"]["counters"]["preemptions"] > 0
