# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Each method of speculative decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.compare.features.serving import case, greedy, prompts
from harness.models import small as small_models


def methods(directory: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """By name: the model, and vLLM's speculative_config."""
    families = "Llama", "Glm4Moe", "DeepseekV3", "Glm4MoeLite", "GlmMoeDsa"
    llama, glm, deepseek, flash, sparse = (
        small_models.target(directory, family) for family in families
    )
    other = small_models.target(directory, seed=9)
    three = {"num_speculative_tokens": 3}
    return {
        "draft model, the same": (llama, {"method": "draft_model", "model": str(llama)} | three),
        "draft model, another": (llama, {"method": "draft_model", "model": str(other)} | three),
        "n-gram": (
            llama,
            {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3} | three,
        ),
        "n-gram on the NPU": (
            llama,
            {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 3} | three,
        ),
        "suffix": (llama, {"method": "suffix"} | three),
        "EAGLE": (llama, {"method": "eagle", "model": str(small_models.eagle(directory))} | three),
        "EAGLE, wrong": (
            llama,
            {"method": "eagle", "model": str(small_models.eagle(directory, wrong=True))} | three,
        ),
        "EAGLE-3": (
            llama,
            {"method": "eagle3", "model": str(small_models.eagle3(directory))} | three,
        ),
        "Medusa": (
            llama,
            {"method": "medusa", "model": str(small_models.medusa(directory))} | three,
        ),
        "MTP": (glm, {"method": "mtp", "num_speculative_tokens": 2}),
        "MTP, latent attention": (deepseek, {"method": "mtp", "num_speculative_tokens": 3}),
        "MTP, latent attention of GLM-4.7-Flash": (
            flash,
            {"method": "mtp", "num_speculative_tokens": 3},
        ),
        "MTP, sparse latent attention": (sparse, {"method": "mtp", "num_speculative_tokens": 3}),
    }


def speculation(
    directory: Path, names: list[str], ranks: int, dtype: str = "float32", **engine: Any
) -> list[dict[str, Any]]:
    known = methods(directory)
    return [
        case(
            name,
            known[name][0],
            ranks,
            [["generate", [greedy(prompt) for prompt in prompts()]]],
            dtype,
            speculative_config=known[name][1],
            **engine,
        )
        for name in names
    ]


def accepted(served: dict[str, Any]) -> tuple[int, int, int]:
    """Number of drafts, of draft tokens, and of accepted tokens."""
    counts = served["counts"]
    return tuple(
        int(counts.get(name) or 0) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )  # type: ignore[return-value]
