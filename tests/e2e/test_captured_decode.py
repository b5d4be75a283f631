# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A decode step in a graph launches nothing on the AI CPU, waits for nothing and masks no single
query tokens; an operator that does is named."""

from typing import Any

import pytest
from harness.compare import launches
from harness.engines import vllm_runner

DRAFTS = "dense, 3 draft tokens"
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeds": {"temperature": 0.8, "seed": 7},
    "penalties": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
    },
}
CASES = {
    f"{name}, {sampling}": launches.CASES[name] | {"sampling": parameters}
    for name in ("dense", DRAFTS)
    for sampling, parameters in SAMPLING.items()
}
CASES["gated delta net, experts"] = launches.CASES["gated delta net, experts"]
if vllm_runner.IS_V2:
    CASES["watermarks"] = launches.CASES["dense"] | {
        "engine": {"watermark_config": {"key": 7}},
        "sampling": {"temperature": 0.8},
    }


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launches.captured(CASES, tmp_path_factory.mktemp("trace"))


@pytest.mark.parametrize("name", CASES)
def test_captured_decode_step_has_no_ai_cpu_task_wait_or_mask(
    steps: dict[str, Any], name: str
) -> None:
    step = steps[name]
    assert step["masked"] == 0
    assert step["ai_cpu"] == {}
    assert step["waits"] == 0
    assert step["compilations"] == 0
    assert step["modelled"]
