# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models on an emulated Ascend950, with fused attention and graphs, and experts of two ranks,
compared with Hugging Face transformers. `tools/check model_types --chip` compares every type of
attention."""

from typing import Any

import pytest
from harness.compare import model_types
from harness.engines import npus
from harness.models import served_types

CHIP = "Ascend950PR_9599"
DENSE, EXPERTS = "qwen3, heads of 128", "gpt-oss, experts with biases"
LATENT, STATES = "deepseek-v3, mla_prolog", "qwen3-next, gated delta net"
BOUNDS = {DENSE: 0.02, EXPERTS: 0.02, LATENT: 0.03, STATES: 0.08}
"""Of the mean difference of log-probabilities in bfloat16 from transformers in float32."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("ascend950")
    graphs = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}}
    experts = graphs | {"enable_expert_parallel": True}
    written = {name: model_types.case(name, directory, 1, "bfloat16", graphs) for name in BOUNDS}
    return written | {EXPERTS: model_types.case(EXPERTS, directory, 2, "bfloat16", experts)}


@pytest.fixture(scope="module")
def results(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return npus.by_name(model_types.run([*cases.values()], ASCEND_EMULATOR_SOC=CHIP))


@pytest.mark.parametrize("name", BOUNDS)
def test_answers_are_those_of_transformers(
    name: str, cases: dict[str, dict[str, Any]], results: dict[str, Any]
) -> None:
    result = results[name]
    attention = served_types.KINDS[name].served_by[0]
    assert (result["kinds"], result["graphs"]) == (attention, "FULL_DECODE_ONLY")
    comparison = model_types.compare(name, cases[name], result["results"])
    print(f"{name}: {comparison}")
    assert comparison.mean_diff < BOUNDS[name]
    assert comparison.max_regret < 2 * comparison.max_diff
