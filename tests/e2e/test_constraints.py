# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Penalties, logits processors, grammars, thinking budgets, prompts as embeddings and seeds through
vLLM's API, each token computed again from transformers' logits.

`tools/check constraints` and `tools/check seeds` have every drafter.
"""

from pathlib import Path
from typing import Any

import pytest
from harness.compare.features import serving, speculation
from harness.models import small as small_models
from harness.references import constraints, log_probabilities, seeds

CHUNKS = {"max_num_batched_tokens": 64, "enable_prefix_caching": False, "max_num_seqs": 8}
FEW_BLOCKS = {"num_gpu_blocks_override": 20, "block_size": 16, "max_model_len": 256}
DRAFTS = {"n-gram": True, "plain": False}


def with_embeddings(model: Path) -> list[dict[str, Any]]:
    """Prompts as token ids, as embeddings, and as both, more than fit into one step."""
    requests = []
    for prompt in serving.prompts():
        middle = {"first": len(prompt) // 4, "embedded": len(prompt) // 2}
        for given in ({}, {"embedded": len(prompt)}, middle):
            requests.append(serving.greedy(prompt, 8, model=str(model), **given))
    return requests


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("constraints")


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[str, Any]:
    model, config = speculation.methods(directory)["n-gram on the NPU"]
    eagle = {"speculative_config": speculation.methods(directory)["EAGLE"][1]}
    embeds = CHUNKS | {"enable_prompt_embeds": True}

    def steps(drafts: bool) -> list[Any]:
        return [["generate", constraints.requests(model, drafts)], ["generate", seeds.requests()]]

    plain, ngram = steps(False), steps(True)
    plain[1][1].extend(seeds.mates())
    plain.append(["generate", with_embeddings(model)])
    budgets = [["generate", constraints.with_budgets(0)]]
    thinking = CHUNKS | constraints.THINKING
    return serving.serve(
        [
            serving.case("plain", model, 1, plain, **embeds),
            serving.case(
                "n-gram", model, 1, ngram, **embeds, **FEW_BLOCKS, speculative_config=config
            ),
            serving.case("budgets", model, 1, budgets, **thinking),
            serving.case("budgets, EAGLE", model, 1, budgets, **thinking, **eagle),
        ]
    )


@pytest.fixture(scope="module")
def exact(directory: Path) -> Any:
    return log_probabilities.reference(small_models.target(directory))


def test_embeddings_have_the_answers_of_their_tokens(
    results: dict[str, Any], directory: Path, exact: Any
) -> None:
    asked = with_embeddings(small_models.target(directory))
    tokens, mismatches, max_diff = serving.compare(exact, asked, results["plain"]["steps"][2])
    print(f"{tokens} tokens, {mismatches} others, difference max {max_diff:.1e}")
    assert (tokens, mismatches) == (144, 0)
    assert max_diff < 1e-3


@pytest.mark.parametrize("name", DRAFTS)
def test_tokens_meet_their_constraints(
    name: str, results: dict[str, Any], directory: Path, exact: Any
) -> None:
    """With drafts also after preemptions; the rows of a batch keep what ended requests leave."""
    asked = constraints.requests(small_models.target(directory), DRAFTS[name])
    tokens, mismatches, lines = constraints.wrong(exact, asked, results[name]["steps"][0])
    print(
        f"{name}: {tokens} tokens, {mismatches} others, {results[name]['counts']}", *lines, sep="\n"
    )
    assert tokens > 500
    assert mismatches == 0
    if DRAFTS[name]:
        assert speculation.accepted(results[name])[2] > 50
        assert results[name]["counts"]["preemptions"] > 0


@pytest.mark.parametrize("name", DRAFTS)
def test_seeds_and_positions_decide_on_tokens(
    name: str, results: dict[str, Any], exact: Any
) -> None:
    """In chunks of prompts, beside other requests, with drafts, and after preemptions."""
    asked = seeds.requests()
    answers = results[name]["steps"][1][: len(asked)]
    assert seeds.count_mismatches(exact, asked, answers) == (192, 0)


def test_other_seeds_and_positions_are_detected(results: dict[str, Any], exact: Any) -> None:
    asked, answers = seeds.requests(), results["plain"]["steps"][1][:8]
    for request in asked:
        request["sampling"] |= {"seed": request["sampling"].get("seed", 0) + 1}
    assert seeds.count_mismatches(exact, asked, answers)[1] > 72


@pytest.mark.parametrize("name", ["budgets", "budgets, EAGLE"])
def test_thinking_ends_when_its_budget_is_used(
    name: str, results: dict[str, Any], exact: Any
) -> None:
    """Requests without a budget move to the rows of ended ones that had one."""
    asked = constraints.with_budgets(0)
    answers = results[name]["steps"][0]
    tokens, mismatches, forced = constraints.beyond_budgets(exact, asked, answers)
    print(f"{name}: {tokens} tokens, {mismatches} others, {forced} forced")
    assert mismatches == 0
    assert forced >= 10
