# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sparse latent attention with int8 latents in the KV cache, compared with transformers and with
latents in the model's dtype."""

from pathlib import Path
from typing import Any

import pytest
from harness.compare.features import serving
from harness.engines import npus
from harness.models import small as small_models
from harness.references import log_probabilities

A3 = "Ascend910_93"
# Mean differences of log-probabilities. Keys of the indexer in int8 besides select other tokens.
BOUNDS = {"auto": 0.02, "int8": 0.05, "index": 0.1}
OPERATORS = {"auto": "aclnnSparseFlashAttention", "int8": "aclnnKvQuantSparseFlashAttention"}
ASKED = [serving.greedy(prompt) for prompt in serving.prompts()]
CHUNKS = {"max_num_batched_tokens": 64}
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
GRAPHS = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 6, 64]}
CASES: dict[str, dict[str, Any]] = {
    "auto": {},
    "graphs": CHUNKS | {"compilation_config": GRAPHS},
    "eager": CHUNKS | {"enforce_eager": True},
    "index": {},
    "drafts": DRAFTS,
    "ranks": {"tensor_parallel_size": 2},
}


TIERED = "auto", "eager"
"""Cases that share a directory of vLLM's file tier."""


def tiers(directory: Path) -> dict[str, Any]:
    tier = {"type": "fs", "root_dir": str(directory / "tiers")}
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64 << 20}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra | {"secondary_tiers": [tier]},
    }


def case(name: str, directory: Path, family: str = "GlmMoeDsa") -> dict[str, Any]:
    caches = {"latent_cache": "auto" if name == "auto" else "int8"}
    if name == "index":
        caches["index_cache"] = "int8"
    more: dict[str, Any] = CASES[name] | {"additional_config": {"ascend": {"platform": caches}}}
    if name in TIERED:
        more["kv_transfer_config"] = tiers(directory)
    steps = [["generate", ASKED], ["generate", ASKED], ["count", [ASKED[2]] * 4]]
    model, ranks = small_models.target(directory, family), more.get("tensor_parallel_size", 1)
    return serving.case(name, model, ranks, steps, "float16", **more)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latents")


@pytest.fixture(scope="module")
def results(directory: Path) -> dict[str, Any]:
    cases = [case(name, directory) for name in CASES]
    trace = str(directory / "trace.json")
    return serving.serve(cases, ASCEND_EMULATOR_SOC=A3, ASCEND_EMULATOR_TRACE=trace)


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(
    results: dict[str, Any], directory: Path, name: str
) -> None:
    cache = "auto" if name == "auto" else "int8"
    model = log_probabilities.reference(
        small_models.target(directory, "GlmMoeDsa"), dtype="float16"
    )
    for answers in results[name]["steps"][:2]:  # The second reads latents of the prefix cache.
        tokens, mismatches, mean = serving.mean_difference(model, ASKED, answers)
        print(f"{name}: {tokens} tokens, {mismatches} others; mean difference {mean:.1e}")
        assert mean < BOUNDS.get(name, BOUNDS[cache])
    launched = results[name]["steps"][2]["names"]
    assert [each for each in OPERATORS.values() if each in launched] == [OPERATORS[cache]]


def test_file_tiers_do_not_share_other_formats(results: dict[str, Any], directory: Path) -> None:
    pools = sorted((directory / "tiers").glob("*/config.json"))
    assert len(pools) == len(TIERED)
    assert all(any(path.parent.parent.glob(f"{path.parent.name}_r0/*/*/*.bin")) for path in pools)


@pytest.mark.parametrize("name", ["latent_cache", "index_cache"])
def test_models_without_sparse_latent_attention_are_refused(directory: Path, name: str) -> None:
    refused = case("eager", directory, "Llama")
    refused["engine"]["additional_config"] = {"ascend": {"platform": {name: "int8"}}}
    with pytest.raises(AssertionError, match=rf"{name} is int8 for a model without sparse .*"):
        npus.by_name(serving.serve([refused]))
