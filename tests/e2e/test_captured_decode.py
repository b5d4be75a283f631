# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A decode step in a graph launches nothing on the AI CPU, waits for nothing and masks no single
query tokens; an operator that does is named."""

from typing import Any

import pytest
from harness import launches

FAMILIES = ("dense",)
OF_DENSE: dict[str, dict[str, Any]] = {
    "seeds": {"sampling": {"temperature": 0.8, "seed": 7}},
}
CASES = {
    **{name: launches.CASES[name] for name in FAMILIES},
    **{name: launches.CASES["dense"] | case for name, case in OF_DENSE.items()},
    "draft tokens": launches.CASES["dense, 3 draft tokens"],
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
