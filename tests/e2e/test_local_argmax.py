# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Greedy answers whose tokens each rank of tensor parallelism finds in its part of the vocabulary,
compared with transformers, beside requests that read all logits."""

from pathlib import Path
from typing import Any

import pytest
from harness.compare.features import serving
from harness.engines import vllm_runner
from harness.models import small as small_models
from harness.references import log_probabilities

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SAMPLERS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 0},
    "penalties": {"presence_penalty": 0.5},
    "bias": {"logit_bias": {"7": 0.5}},
    "min_tokens": {"min_tokens": 20},
    "bad words": {"bad_words": ["a"]},
    "allowed": {"allowed_token_ids": [*range(2, 97)]},
    "seed": {"temperature": 0.5, "seed": 3},
}
CASES = {"drafts": True, "plain": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("local-argmax")


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[str, Any]:
    model, drafter = small_models.target(directory), small_models.eagle(directory)
    plain = [{"prompt": prompt, "sampling": GREEDY} for prompt in serving.prompts()]
    mixed = [plain[2] | {"sampling": GREEDY | more} for more in SAMPLERS.values()]
    beside = [each for each in mixed if "logit_bias" not in each["sampling"]]  # not with drafts
    counts = [["count", [plain[2]] * 4], *(["count", [one] * 4] for one in mixed)]
    draft = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": 3}
    cases = [
        serving.case(
            name,
            model,
            2,
            [
                ["generate", plain],
                ["generate", plain[:2] + beside],
                *(counts if not drafts else []),
            ],
            additional_config={"ascend": {"platform": {"local_argmax": True}}},
            **({"speculative_config": draft} if drafts else {"async_scheduling": False}),
        )
        for name, drafts in CASES.items()
    ]
    return serving.serve(cases, ASCEND_EMULATOR_TRACE=str(directory / "trace.json"))


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(
    results: dict[str, Any], directory: Path, name: str
) -> None:
    model = log_probabilities.reference(small_models.target(directory))
    for prompt, (answer,) in zip(serving.prompts(), results[name]["steps"][0], strict=True):
        exact = log_probabilities.logits(model, prompt, [answer["tokens"]])[0]
        assert answer["tokens"] == exact.argmax(-1).tolist()


@pytest.mark.parametrize("name", CASES)
def test_requests_that_read_logits_are_served_beside(results: dict[str, Any], name: str) -> None:
    first, second = results[name]["steps"][:2]
    assert [answer["tokens"] for (answer,) in second[:2]] == [
        answer["tokens"] for (answer,) in first[:2]
    ]
    assert "logprobs" in second[2][0]


@pytest.mark.skipif(vllm_runner.IS_V2, reason="counted with the V1 model runner")
def test_all_logits_are_gathered_only_where_they_are_read(results: dict[str, Any]) -> None:
    greedy, *sent = (step["sent"] for step in results["plain"]["steps"][2:])
    print(greedy, sent)
    logits, pairs = 4 * 64 * 4, 4 * 2 * 4  # of four requests in float32
    assert {each - greedy for each in sent} == {logits - pairs}
