# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Watermarked answers of vLLM's V2 model runner: tokens recomputed from transformers' logits, and
vLLM's detector."""

from pathlib import Path
from typing import Any

import pytest
from harness.compare.features import serving, speculation
from harness.engines import vllm_runner
from harness.models import small as small_models
from harness.references import log_probabilities

if not vllm_runner.IS_V2:
    pytest.skip("only vLLM's V2 model runner has watermarking", allow_module_level=True)

import torch
from vllm.config.watermarking import derive_watermark_key
from vllm.v1.watermarking.gumbel import DualKeyGumbelWatermarkDetector, GumbelWatermarkDetector
from vllm.v1.watermarking.prfs import PhiloxPRF

KEY, TOKENS = 0x1234_5678_9ABC_DEF0, 100
TWO, DRAFTS = "two keys, prompts searched", {"draft tokens": False, "rejected draft tokens": True}
SAMPLED = {"temperature": 0.7, "max_tokens": TOKENS, "ignore_eos": True}
CONFIGS = {
    "gumbel": {"key": KEY},
    TWO: {
        "key": KEY,
        "algorithm": "dual_key_gumbel",
        "alpha": 0.4,
        "context_width": 1,
        "deduplicate_contexts": "all",
        "deduplicate_contexts_max_history": 30,
    },
    "contexts used again": {"key": KEY, "context_width": 2, "deduplicate_contexts": "none"},
}


def requests() -> list[dict[str, Any]]:
    """Watermarked answers, one without, a greedy one, and one of top-k and top-p, in a batch."""
    variants: list[dict[str, Any]] = [
        {"watermarking": False},
        {"temperature": 0},
        {"top_k": 20, "top_p": 0.9, "seed": 5},
    ]
    return [
        {"prompt": prompt, "sampling": SAMPLED | more}
        for prompt, more in zip(serving.prompts(), [{}, {}, {}, *variants], strict=True)
    ]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watermarking")


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[str, Any]:
    model, steps = small_models.target(directory), [["generate", requests()]]
    cases = [
        serving.case(name, model, 1, steps, watermark_config=given)
        for name, given in CONFIGS.items()
    ]
    for name, is_wrong in DRAFTS.items():
        drafter = small_models.eagle(directory, is_wrong)
        draft = {
            "method": "eagle",
            "model": str(drafter),
            "num_speculative_tokens": 3,
            "draft_sample_method": "probabilistic",
        }
        # Draft tokens use the first key, the target's tokens the second.
        given = CONFIGS[TWO] | {"alpha": 0.1}
        cases.append(
            serving.case(name, model, 1, steps, watermark_config=given, speculative_config=draft)
        )
    return serving.serve(cases)


def is_marked(request: dict[str, Any]) -> bool:
    sampling = request["sampling"]
    return sampling.get("watermarking") is not False and sampling["temperature"] > 0


def repeats(prompt: list[int], tokens: list[int], config: dict[str, Any]) -> list[bool]:
    """Whether each token's context was there before, by vLLM's documentation of WatermarkConfig."""
    width, scope = config.get("context_width", 4), config.get("deduplicate_contexts", "single_turn")
    if scope == "none":
        return [False] * len(tokens)
    text = prompt + tokens if scope == "all" else tokens
    first, max_history = (
        len(text) - len(tokens),
        config.get("deduplicate_contexts_max_history", 8192),
    )
    padded = [-1] * width + text
    repeated = []
    for place in range(first, len(text)):
        context = padded[place : place + width]
        before = (padded[each : each + width] for each in range(max(0, place - max_history), place))
        repeated.append(context in before or (scope == "all" and place - first < width))
    return repeated


@pytest.mark.parametrize("name", [*CONFIGS, *DRAFTS])
def test_tokens_are_those_of_the_key(name: str, results: dict[str, Any], directory: Path) -> None:
    """With draft tokens only those that a drafter or a residual distribution chooses as the target
    model would."""
    config, model = (
        CONFIGS.get(name, CONFIGS[TWO]),
        log_probabilities.reference(small_models.target(directory)),
    )
    has_two, width = "algorithm" in config, config.get("context_width", 4)
    keys = (
        [derive_watermark_key(KEY, domain) for domain in (b"key_a", b"key_b")] if has_two else [KEY]
    )
    counts = {"marked": 0, "others": 0, "repeated": 0, "of the last key": 0}
    for request, (answer,) in zip(requests(), results[name]["steps"][0], strict=True):
        sampling, tokens = request["sampling"], answer["tokens"]
        if not is_marked(request) or "top_k" in sampling:
            continue
        scores = (
            log_probabilities.logits(model, request["prompt"], [tokens])[0]
            / sampling["temperature"]
        )
        padded = [-1] * width + tokens
        contexts = torch.tensor([padded[place : place + width] for place in range(len(tokens))])
        noise = [
            -(-PhiloxPRF(key).uniform(contexts, torch.arange(scores.shape[1])).log()).log()
            for key in keys
        ]
        best = [(scores + each).argmax(-1).tolist() for each in noise]
        for place, is_repeated in enumerate(repeats(request["prompt"], tokens, config)):
            candidates = [each[place] for each in best]
            if is_repeated:
                counts["repeated"] += 1
            else:
                counts["marked" if tokens[place] in candidates else "others"] += 1
                counts["of the last key"] += tokens[place] == candidates[-1] != candidates[0]
    print(name, counts)
    assert counts["marked"] > 100
    assert (counts["repeated"] > 50) == (config.get("deduplicate_contexts") == "all")
    if name in DRAFTS:
        drafts, drafted, accepted = speculation.accepted(results[name])
        print(f"{drafts} drafts of {drafted} tokens, {accepted} accepted")
        assert (accepted > 0.2 * drafted) != DRAFTS[name]
        assert counts["others"] < counts["marked"] / 1.5
    else:
        assert counts["others"] == 0
    if name == TWO:  # alpha of those whose candidates differ
        assert 0.2 < counts["of the last key"] / counts["marked"] < 0.6


@pytest.mark.parametrize("name", ["gumbel", TWO, *DRAFTS])
def test_detector_finds_only_watermarked_answers(name: str, results: dict[str, Any]) -> None:
    config = CONFIGS.get(name, CONFIGS[TWO])
    make = DualKeyGumbelWatermarkDetector if "algorithm" in config else GumbelWatermarkDetector
    given = {"alpha": 0.5 if name in DRAFTS else config["alpha"]} if "algorithm" in config else {}
    detector, other = (make(key, config.get("context_width", 4), **given) for key in (KEY, KEY + 1))
    for request, (answer,) in zip(requests(), results[name]["steps"][0], strict=True):
        result, wrong = (each.detect(answer["tokens"]).p_value for each in (detector, other))
        print(f"{name}: {result:.1e}, with another key {wrong:.1e}")
        assert (result < 1e-4) == is_marked(request)
        assert wrong > 1e-4


def test_greedy_answer_in_the_batch_has_transformers_tokens(
    results: dict[str, Any], directory: Path
) -> None:
    model = log_probabilities.reference(small_models.target(directory))
    for name in (*CONFIGS, *DRAFTS):
        request, (answer,) = requests()[4], results[name]["steps"][0][4]
        assert (
            log_probabilities.logits(model, request["prompt"], [answer["tokens"]])[0]
            .argmax(-1)
            .tolist()
            == answer["tokens"]
        )
