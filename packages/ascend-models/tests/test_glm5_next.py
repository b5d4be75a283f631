# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""GLM-5-next: the KV cache layer against its definition, and the model through vLLM's engine,
compared with transformers in float32. `tools/check hybrid` has more ways to serve it.

The tiny random model selects 4 of up to 34 groups of 16 tokens.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
from ascend_models.glm5_next import cache
from harness import checkout
from harness.compare import families
from harness.compare.families import EXACT
from harness.models import glm5_next

PROGRAM = checkout.PROGRAMS / "serve_glm5_next.py"
MUTATIONS = (
    "group",
    "tail",
    "top-k",
    "selection",
    "gates of keys",
    "bias of positions",
    "decay",
    "convolution",
    "Sinkhorn steps",
    "expansion",
    "limit of SwiGLU",
)


prompts = functools.partial(families.prompts, (3, 512))


LONG = tuple(prompts(300)[0])
CHUNKED = {"max_num_batched_tokens": 90, "language_model_only": True}
EVERY: dict[str, dict[str, Any]] = {
    "chunks that end inside groups, prefix hits, preemption": {
        "engine": CHUNKED | {"dtype": "float32", "enable_prefix_caching": True},
        "batches": [[[*LONG, 3], *prompts(7, 135, 61, 530)], prompts(9, 150, start=LONG)],
        "length": 10,
        "mutations": MUTATIONS,
        "preempted_at": 12,  # This is in each batch, after answers have begun.
    },
    "TP2, decodes in graphs": {
        "ranks": 2,
        "engine": CHUNKED
        | {
            "dtype": "float32",
            "enforce_eager": False,
            "compilation_config": {"cudagraph_capture_sizes": [4]},
        },
        "batches": [prompts(124, 61, 290)],  # The graph of 4 requests is padded.
        "length": 20,
    },
    "DP2 EP2, decodes in graphs": {
        "whole": True,
        "ranks": 2,
        "layout": {"data_parallel_size": 2, "enable_expert_parallel": True},
        "engine": CHUNKED
        | {
            "dtype": "float32",
            "enforce_eager": False,
            "compilation_config": {"cudagraph_capture_sizes": [4]},
        },
        "batches": [prompts(150, 290, 61)],  # One engine has none at the end.
        "length": 6,
    },
    "bfloat16": {
        "engine": CHUNKED | {"dtype": "bfloat16", "enable_sleep_mode": True},
        "batches": [prompts(300, 7, 135)],
        "length": 10,
        "sleeps": True,
    },
}
CASES = families.cases(EVERY)


@pytest.mark.parametrize(
    "page",
    [cache.Page(128, 512, 128, 16), cache.Page(256, 64, 32, 16), cache.Page(384, 96, 64, 4)],
    ids=str,
)
def test_parts_of_a_page_do_not_overlap(page: cache.Page) -> None:
    ends_of_latents = page.tokens * page.latent
    starts = page.keys * page.key, page.states * page.state
    assert starts[0] >= ends_of_latents
    assert starts[1] >= starts[0] + page.tokens // page.group * page.key
    assert page.size >= starts[1] + page.group * page.state
    assert page.size % page.latent == page.size % page.key == page.size % page.state == 0


def test_tails_are_the_tokens_after_the_last_whole_group() -> None:
    # Steps of 5, 3, 40 and 1 tokens of requests that have 37, 66, 40 and 32 after them.
    starts, lengths = [0, 5, 8, 48, 49], [37, 66, 40, 32]
    expected = [0, 1, 2, 3, 4, 6, 7, *range(40, 48)]
    assert cache.group_tails(starts, lengths, 16).tolist() == expected


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("glm5-next")
    glm5_next.write(folder)
    cases = [{"name": name, "model": str(folder), **case} for name, case in CASES.items()]
    return families.serve(PROGRAM, folder, cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "bfloat16"])
def test_answers_in_float32_are_those_of_transformers(name: str, results: dict[str, Any]) -> None:
    result = results[name]
    print(name, {key: value for key, value in result.items() if key != "mutations"})
    assert result["tokens"] == CASES[name]["length"] * sum(map(len, CASES[name]["batches"]))
    assert result["others"] == 0
    assert result["most"] < EXACT


@pytest.mark.slow
def test_answers_in_bfloat16_are_near_those_of_transformers(results: dict[str, Any]) -> None:
    result = results["bfloat16"]
    print(result)
    assert result["mean"] < 2 * result["own mean"]


@pytest.mark.slow
def test_prefixes_are_hit_and_requests_preempted(results: dict[str, Any]) -> None:
    result = results["chunks that end inside groups, prefix hits, preemption"]
    assert result["cached"] >= 2 * 256
    assert result["preemptions"] > 1


@pytest.mark.slow
def test_answers_after_sleep_are_the_same(results: dict[str, Any]) -> None:
    assert results["bfloat16"]["same after sleep"] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_each_part_is_found(name: str, results: dict[str, Any]) -> None:
    cases = results["chunks that end inside groups, prefix hits, preemption"]["mutations"]
    print(name, cases[name])
    assert cases[name]["most"] > 20 * EXACT
