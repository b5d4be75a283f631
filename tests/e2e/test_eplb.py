# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Expert load balancing (EPLB): answers stay those of transformers while experts move between two
NPUs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import checkout
from harness.compare import layouts
from harness.engines import npus

PROGRAM = checkout.PROGRAMS / "serve_eplb.py"
ROUNDS, EXPERTS, REDUNDANT = 3, 8, 2
BALANCED = {"window_size": 60, "step_interval": 60, "num_redundant_experts": REDUNDANT}
# How weights are moved: within the step between its collectives, or by a thread through the CPU,
# which is vLLM's default.
WAYS = {"in the step": {"use_async": False, "communicator": "torch_nccl"}, "in a thread": {}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return layouts.make("qwen3-moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def results(model: Path) -> dict[str, Any]:
    cases = []
    for name, way in WAYS.items():
        engine = {layouts.DP: 2, "enable_eplb": True, "eplb_config": BALANCED | way} | layouts.EP
        cases.append(layouts.case(name, model, engine, dtype="float32") | {"rounds": ROUNDS})
    return npus.by_name(
        npus.run(
            2, sys.executable, str(PROGRAM), json.dumps(cases), VLLM_PLUGINS="", OMP_NUM_THREADS="1"
        )
    )


@pytest.mark.parametrize("way", WAYS)
def test_answers_match_transformers_while_experts_move(
    results: dict[str, Any], model: Path, way: str
) -> None:
    rounds = results[way]["rounds"]
    places = [results["experts"][0] for results in rounds]
    for number, results in enumerate(rounds):
        count, mismatches, max_diff, mean = layouts.compare(model, "float32", results["results"])
        print(
            f"{way}, round {number}: {count} tokens, {mismatches} others, difference max {max_diff:.2e}"
            f" mean {mean:.2e}; {places[number]}"
        )
        assert (count, mismatches) == (33, 0)
        assert max_diff < 1e-4
        assert results["experts"][1] == places[number]  # both ranks have the same map
        assert all(set(layer) == set(range(EXPERTS)) for layer in places[number])
    assert places[0] == [[*range(EXPERTS), *range(REDUNDANT)]] * 2
    assert places[-1] != places[0]
