# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Prompts that are given as embeddings, and thinking budgets, through vLLM's API, compared with
transformers."""

from pathlib import Path
from typing import Any

import pytest
from harness import references
from harness.features import serving, speculation
from harness.models import small as small_models

BUDGETS = [None, 0, 1, 5, 40]
START, END = "<", "so>"
TOKENS = 30
CHUNKS = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}


def asked_with_embeddings(model: Path) -> list[dict[str, Any]]:
    """Prompts as token ids, as embeddings, and as both, more than fit into one step."""
    requests = []
    for prompt in serving.prompts():
        middle = {"first": len(prompt) // 4, "embedded": len(prompt) // 2}
        for given in ({}, {"embedded": len(prompt)}, middle):
            requests.append(serving.greedy(prompt, 8, model=str(model), **given))
    return requests


def ids(text: str) -> list[int]:
    return list(map(small_models.CHARACTERS.index, text))


def with_budgets(drafts: bool) -> list[dict[str, Any]]:
    """Prompts in which thinking has not begun, has begun, or has ended, with each budget."""
    long = [*ids(END), *range(20, 60), *ids(START)]
    requests = []
    for prompt in ([5, 9, 40], [5, *ids(START), 9, 40], ids(f"a{START}b{END}c"), long):
        for budget in BUDGETS:
            request = serving.greedy(prompt, TOKENS)
            request["sampling"]["thinking_token_budget"] = budget
            requests.append(request)
    return requests[:: 2 if drafts else 1]


def last(tokens: list[int], marker: list[int]) -> int:
    starts = range(len(tokens) - len(marker) + 1)
    return max((at for at in starts if tokens[at : at + len(marker)] == marker), default=-1)


def count_forced(model: Any, prompt: list[int], answer: list[int], budget: int | None) -> int:
    """Tokens of a greedy answer that the budget forces; the others must be the model's."""
    best = references.logits(model, prompt, [answer])[0].argmax(-1).tolist()
    start, end, tokens, forced = ids(START), ids(END), list(prompt), 0
    for found, chosen in zip(answer, best, strict=True):
        begin, wanted = last(tokens, start), chosen
        thought = len(tokens) - begin - len(start)
        if budget is not None and begin > last(tokens, end) and thought >= budget:
            wanted = end[max(n for n in range(len(end)) if tokens[len(tokens) - n :] == end[:n])]
            forced += wanted != chosen
        assert found == wanted, (prompt, budget, answer)
        tokens.append(found)
    return forced


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embeddings_and_budgets")


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[str, Any]:
    model, glm = small_models.target(directory), small_models.target(directory, "Glm4Moe")
    thinking = {"reasoning_config": {"reasoning_start_str": START, "reasoning_end_str": END}}
    mtp = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
    embeddings = ["generate", asked_with_embeddings(model)]
    return serving.serve(
        [
            serving.case("embeddings", model, 1, [embeddings], enable_prompt_embeds=True, **CHUNKS),
            serving.case("budgets", model, 1, [["generate", with_budgets(False)]], **thinking),
            serving.case(
                "with drafts",
                glm,
                1,
                [["generate", with_budgets(True)]],
                "float16",
                **thinking | mtp,
            ),
        ]
    )


def test_prompts_given_as_embeddings_have_the_same_answers(
    results: dict[str, Any], directory: Path
) -> None:
    model = small_models.target(directory)
    asked, answers = asked_with_embeddings(model), results["embeddings"]["steps"][0]
    tokens, others, far = serving.compare(references.reference(model), asked, answers)
    print(f"{tokens} tokens, {others} others, difference max {far:.1e}")
    assert (tokens, others) == (144, 0)
    assert far < 1e-3


@pytest.mark.parametrize("name", ["budgets", "with drafts"])
def test_thinking_ends_when_its_budget_is_used(
    name: str, results: dict[str, Any], directory: Path
) -> None:
    drafts = name == "with drafts"
    family = "Glm4Moe" if drafts else "Llama"
    model = references.reference(small_models.target(directory, family))
    forced = [
        count_forced(
            model,
            request["prompt"],
            answers[0]["tokens"],
            request["sampling"]["thinking_token_budget"],
        )
        for request, answers in zip(with_budgets(drafts), results[name]["steps"][0], strict=True)
    ]
    print(f"{name}: {len(forced)} answers, {sum(forced)} forced tokens")
    assert sum(map(bool, forced)) >= 4
    assert not drafts or speculation.accepted(results[name])[2] > 0
