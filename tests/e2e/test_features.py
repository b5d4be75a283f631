# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""LoRA, speculative decoding, sampling and structured output through vLLM's API, compared with
references.

Here is one engine with sampling and grammars, one with adapters and drafts too, and tensor
parallelism, one with adapters on experts, and three with MTP, n-grams or EAGLE, fused attention and
graphs. `tools/check features` runs every method and layout.
"""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness.compare import outputs
from harness.compare.features import adapters, grammars, sampling, serving, speculation
from harness.engines import vllm_runner
from harness.models import small as small_models
from harness.references import log_probabilities

ANSWERS = 150
V2 = vllm_runner.IS_V2
"""Whether the cases are served with vLLM's V2 model runner, as tools/compat does too."""
PLAIN = {"sampling": {"temperature": 0, "max_tokens": 12, "ignore_eos": True}}
DRAWN = {
    "sampling": {"temperature": 1, "top_k": 5, "top_p": 0.9, "max_tokens": 12, "ignore_eos": True}
}
ONLY = {"sampling": PLAIN["sampling"] | {"extra_args": {"only": 42}}}
GRAMMAR = {
    "sampling": {"temperature": 0, "max_tokens": 12},
    "structured": grammars.GRAMMARS["json"],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[str, Any]:
    prompt = {"prompt": serving.prompts()[2]}
    adapter = {"lora": adapters.adapters(directory)["wide"]}
    one = adapters.lora(
        "one",
        directory,
        1,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
        async_scheduling=False,
        **({"logits_processors": ["harness.engines.logits_processor:OnlyToken"]} if V2 else {}),
    )
    one["steps"] = [
        *(["count", [prompt | each] * 4] for each in (PLAIN, DRAWN, GRAMMAR, PLAIN | adapter)),
        ["generate", sampling.sampled(ANSWERS)],
        ["generate", grammars.structured(1)],
        *([["generate", [prompt | PLAIN, prompt | ONLY]]] if V2 else []),
    ]
    draft = {
        "method": "eagle",
        "model": str(small_models.eagle(directory)),
        "num_speculative_tokens": 3,
    }
    two = adapters.lora("two", directory, 2, fully_sharded_loras=True, speculative_config=draft)
    two["steps"] += [
        ["generate", [serving.greedy(prompt) for prompt in serving.prompts()]],
        ["generate", sampling.sampled(ANSWERS // 2, 4, drafts=True)[1:3]],
        ["generate", grammars.structured(1)],
        ["generate", adapters.scored_prompts(directory)],
    ]
    glm = small_models.target(directory, "Glm4Moe")
    mtp = serving.case(
        "mtp",
        glm,
        1,
        [
            ["generate", [serving.greedy(prompt) for prompt in serving.prompts()]],
            ["tools", grammars.tool_calls()],
            ["count", [prompt | PLAIN | {"sampling": PLAIN["sampling"] | {"max_tokens": 24}}] * 4],
        ],
        "float16",
        speculative_config={"method": "mtp", "num_speculative_tokens": 3},
        structured_outputs_config={"backend": "xgrammar"},
    )
    (ngram,) = speculation.speculation(directory, ["n-gram on the NPU"], 1, "float16")
    experts = [
        adapters.lora_on_family("experts", directory, "Qwen2Moe", 2),
        adapters.lora_on_family(
            "experts, EP", directory, "Qwen2Moe", 2, enable_expert_parallel=True
        ),
        adapters.lora_on_family(
            "int8 experts, EP",
            directory,
            "Qwen2Moe",
            2,
            "float16",
            adapters.quantized_experts(directory)[0],
            enable_expert_parallel=True,
        ),
    ]
    eagle = outputs.case(directory, "EAGLE", "FULL_AND_PIECEWISE") | {"name": "eagle"}
    cases = [one, two, *experts, mtp, ngram, eagle]
    return serving.serve(cases, ASCEND_EMULATOR_TRACE=str(directory / "trace.json"))


def test_lora_log_probabilities_match_peft(results: dict[str, Any], directory: Path) -> None:
    steps = results["two"]["steps"]
    assert steps[:8] == adapters.LORA_STATES
    assert "99" in steps[8]  # An adapter that is not loaded cannot be pinned.
    answers = {"steps": [steps[9]]}
    tokens, mismatches, max_diff = adapters.compare_lora(directory, answers)
    print(f"{tokens} tokens, {mismatches} others; log-probability difference max {max_diff:.1e}")
    assert tokens == 120
    assert mismatches == 0
    assert max_diff < 1e-3
    shuffled = {"steps": [steps[9][3:] + steps[9][:3]]}
    # Each adapter has its own answers.
    assert adapters.compare_lora(directory, shuffled)[1:] > (20, 0.5)


def test_log_probabilities_of_prompts_match_peft(results: dict[str, Any], directory: Path) -> None:
    """With an adapter on lm_head, in a batch with the same prompts without it."""
    answers = results["two"]["steps"][-1]
    tokens, max_diff = adapters.compare_scored_prompts(directory, answers)
    print(f"{tokens} tokens of prompts; log-probability difference max {max_diff:.1e}")
    assert tokens > 100
    assert max_diff < 1e-3
    swapped = [answers[number ^ 1] for number in range(len(answers))]
    assert adapters.compare_scored_prompts(directory, swapped)[1] > 0.5


@pytest.mark.parametrize("name", ["experts", "experts, EP"])
def test_lora_on_experts_matches_peft(results: dict[str, Any], directory: Path, name: str) -> None:
    answers = results[name]["steps"][0]
    tokens, mismatches, max_diff = adapters.compare_lora_on_family(directory, "Qwen2Moe", answers)
    print(f"{tokens} tokens, {mismatches} others; log-probability difference max {max_diff:.1e}")
    assert (tokens, mismatches) == (72, 0)
    assert max_diff < 1e-3
    assert adapters.compare_lora_on_family(directory, "Qwen2Moe", answers[3:] + answers[:3])[1:] > (
        20,
        0.5,
    )


def test_lora_on_int8_experts_matches_peft(results: dict[str, Any], directory: Path) -> None:
    """PEFT has the dequantized weights; the inputs of the experts' matrices are rounded to int8 here,
    those of the adapters are not."""
    answers = results["int8 experts, EP"]["steps"][0]
    exact = directory / "dequantized-experts"
    compare = partial(adapters.compare_lora_on_family, directory, "Qwen2Moe", model=exact)
    tokens, mismatches, max_diff = compare(answers, dtype="float16")
    print(f"{tokens} tokens, {mismatches} others; log-probability difference max {max_diff:.1e}")
    assert tokens == 72
    assert mismatches <= 3
    assert max_diff < 0.2
    assert compare(answers[3:] + answers[:3], dtype="float16")[1:] > (20, 0.5)


def test_speculative_decoding_keeps_the_tokens(results: dict[str, Any], directory: Path) -> None:
    asked = [serving.greedy(prompt) for prompt in serving.prompts()]
    tokens, mismatches, max_diff = serving.compare(
        log_probabilities.reference(small_models.target(directory)),
        asked,
        results["two"]["steps"][10],
    )
    drafts, drafted, accepted = speculation.accepted(results["two"])
    print(
        f"{tokens} tokens, {mismatches} others, difference max {max_diff:.1e}; {drafts} drafts of {drafted}"
        f" tokens, {accepted} accepted"
    )
    assert (tokens, mismatches) == (144, 0)
    assert max_diff < 1e-3
    assert 0 < accepted < drafted


def test_prompt_logprobs_use_the_hidden_states_of_the_target(
    results: dict[str, Any], directory: Path
) -> None:
    """vLLM computes them after the drafter's piecewise graphs have been replayed."""
    model = log_probabilities.reference(small_models.target(directory), None, "float16")
    result = outputs.compare(model, outputs.asked(), results["eagle"]["steps"][0])
    assert result == {"prompt": 616, "prompt_wrong": 0, "tokens": 192, "others": 0, "wrong": 0}
    assert speculation.accepted(results["eagle"])[2] > 0


def test_mtp_keeps_the_tokens(results: dict[str, Any], directory: Path) -> None:
    """With asynchronous scheduling, fused attention and full graphs."""
    asked, result = [serving.greedy(prompt) for prompt in serving.prompts()], results["mtp"]
    model = log_probabilities.reference(small_models.target(directory, "Glm4Moe"))
    tokens, mismatches, max_diff = serving.compare(model, asked, result["steps"][0])
    drafts, drafted, accepted = speculation.accepted(result)
    print(
        f"{tokens} tokens, {mismatches} others, difference max {max_diff:.1e}; {drafts} drafts of {drafted}"
        f" tokens, {accepted} accepted"
    )
    assert result["async"]
    assert (tokens, mismatches) == (144, 0)
    assert max_diff < 1e-2
    assert drafted / 2 < accepted < drafted


def test_ngram_on_the_npu_keeps_the_tokens(results: dict[str, Any], directory: Path) -> None:
    asked, result = (
        [serving.greedy(prompt) for prompt in serving.prompts()],
        results["n-gram on the NPU"],
    )
    tokens, mismatches, max_diff = serving.compare(
        log_probabilities.reference(small_models.target(directory)), asked, result["steps"][0]
    )
    assert (tokens, mismatches) == (144, 0)
    assert max_diff < 1e-2
    assert speculation.accepted(result)[2] > 0


def test_asynchronous_scheduling_stays_on_with_drafts(results: dict[str, Any]) -> None:
    names = "one", "two", "mtp", "n-gram on the NPU"
    assert [results[name]["async"] for name in names] == [False, True, True, True]


def test_host_waits_only_for_the_accepted_tokens(results: dict[str, Any]) -> None:
    """With three draft tokens: for the number accepted in the last step, for its tokens, and for
    V1's reused input buffers.

    Without draft tokens vLLM's asynchronous scheduling has the latter two. None is in the drafter.
    """
    assert results["mtp"]["steps"][2]["synchronizations"] == (2 if V2 else 3)


def test_tool_calls_with_mtp(results: dict[str, Any], directory: Path) -> None:
    """Each token is the best that the grammar allows, and the parser reads the same calls from
    chunks of several tokens."""
    glm = small_models.target(directory, "Glm4Moe")
    model, asked = log_probabilities.reference(glm), grammars.tool_calls()
    for request, result in zip(asked, results["mtp"]["steps"][1], strict=True):
        print(result["text"], result["largest"])
        assert grammars.others_with_grammar(model, glm, request, result["tokens"]) == 0
        assert 1 < result["largest"] <= 4
        if "structured" not in request:
            continue
        assert re.fullmatch(request["structured"]["regex"], result["text"])
        assert [name for name, _ in result["whole"]] == [name for name, _ in result["streamed"]]
        whole, streamed = (
            [json.loads(arguments) for _, arguments in result[key]] for key in ("whole", "streamed")
        )
        assert whole == streamed
        assert [sorted(arguments) for arguments in whole] == [["size", "text"]] * 2


def test_sampled_tokens_have_their_distribution(results: dict[str, Any], directory: Path) -> None:
    model = log_probabilities.reference(small_models.target(directory))
    result = sampling.check_sampling(model, sampling.sampled(ANSWERS), results["one"]["steps"][4])
    for name, (tokens, impossible, first, spread) in result.items():
        print(
            f"{name}: {tokens} tokens, {impossible} impossible, chi-square {first:.3f} and"
            f" {spread:.3f}"
        )
        assert tokens == 2 * ANSWERS
        assert impossible == 0
        assert min(first, spread) > sampling.FALSE_ALARM


def test_sampled_tokens_have_their_distribution_with_drafts(
    results: dict[str, Any], directory: Path
) -> None:
    model, kinds = (
        log_probabilities.reference(small_models.target(directory)),
        list(sampling.SAMPLING)[1:3],
    )
    asked = sampling.sampled(ANSWERS // 2, 4, drafts=True)[1:3]
    result = sampling.check_sampling(model, asked, results["two"]["steps"][11], kinds)
    for name, (tokens, impossible, first, spread) in result.items():
        print(
            f"{name}: {tokens} tokens, {impossible} impossible, chi-square {first:.3f} and"
            f" {spread:.3f}"
        )
        assert impossible == 0
        assert min(first, spread) > sampling.FALSE_ALARM


def test_wrong_distribution_is_detected(results: dict[str, Any], directory: Path) -> None:
    model, answers = (
        log_probabilities.reference(small_models.target(directory)),
        results["one"]["steps"][4],
    )
    hotter = [
        {
            **each,
            "sampling": each["sampling"] | {"temperature": each["sampling"]["temperature"] * 1.6},
        }
        for each in sampling.sampled(ANSWERS)
    ]
    checked = sampling.check_sampling(model, hotter, answers)
    assert (
        sum(
            impossible > 0 or min(first, spread) < sampling.FALSE_ALARM
            for _, impossible, first, spread in checked.values()
        )
        >= 4
    )


@pytest.mark.parametrize(("name", "step"), [("one", 5), ("two", 12)])
def test_answers_match_their_grammar(results: dict[str, Any], name: str, step: int) -> None:
    assert grammars.count_matches(results[name]["steps"][step], 1) == (3, 3)


@pytest.mark.skipif(not V2, reason="the V1 model runner has another interface for them")
def test_custom_logits_processor_is_applied_to_its_requests(results: dict[str, Any]) -> None:
    plain, only = (answers[0]["tokens"] for answers in results["one"]["steps"][6])
    assert only == [42] * 12
    assert plain != only


def test_host_does_not_wait_for_the_npu(results: dict[str, Any]) -> None:
    """With LoRA adapters, sampling or a grammar; the grammar's bitmask is one more copy to the
    device."""
    plain, drawn, grammar, adapter = results["one"]["steps"][:4]
    assert [each["waits"] for each in (plain, drawn, grammar, adapter)] == [0, 0, 0, 0]
    copies = [each["names"].get("aclrtMemcpyAsync", 0) for each in (plain, drawn, grammar)]
    assert copies[1] == copies[0]
    assert copies[2] == copies[0] + 1
    assert drawn["names"]["aclnnTopKTopPSampleV2"] == 1
    assert "aclnnSort" not in drawn["names"]
    layers = 2
    # and the embedding, and the head
    assert adapter["names"]["aclnnMul"] - plain["names"].get("aclnnMul", 0) == 4 * layers + 2
    assert adapter["names"]["aclnnInplaceAddmm"] == 7 * layers + 2
    assert adapter["names"]["aclnnMatmul"] - plain["names"]["aclnnMatmul"] == 4 * layers + 1
