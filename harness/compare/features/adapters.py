# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""LoRA adapters, compared with PEFT."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from harness.compare.features.serving import case, compare, greedy, prompts
from harness.models import small as small_models
from harness.references.log_probabilities import logits, reference


def adapters(directory: Path) -> dict[str, list[Any]]:
    """Arguments of LoRARequest by adapter name."""
    model = small_models.target(directory)
    named = enumerate(small_models.ADAPTERS, 1)
    return {
        name: [name, number, str(small_models.adapter(model, directory, name))]
        for number, name in named
    }


def lora_requests(directory: Path, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Each prompt with every adapter and with none, in one batch."""
    known = adapters(directory)
    asked = [greedy(prompt, 8) for prompt in prompts(3)]
    return asked + [
        greedy(prompt, 8, lora=request)
        for name, request in known.items()
        if name not in without
        for prompt in prompts(3)
    ]


def lora_steps(directory: Path, slots: int) -> list[Any]:
    known = adapters(directory)
    if slots < len(known):  # vLLM's scheduler does not count the slot of a pinned adapter.
        return [["generate", lora_requests(directory)]]
    return [
        ["list"],
        *(["add", *known[name]] for name in ("all", "attention", "wide")),
        ["list"],
        ["pin", known["attention"][1]],
        ["remove", known["all"][1]],
        ["list"],
        ["pin", 99],
        ["generate", lora_requests(directory)],
    ]


LORA_STATES = [[], True, True, True, [1, 2, 3], True, True, [2, 3]]
"""Results of the steps before the last two: listed, added three times, listed, pinned, removed,
listed."""


def lora(
    name: str, directory: Path, ranks: int, dtype: str = "float32", slots: int = 4, **engine: Any
) -> dict[str, Any]:
    options = {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": 4,
        "max_lora_rank": 16,
    } | engine
    return case(
        name, small_models.target(directory), ranks, lora_steps(directory, slots), dtype, **options
    )


def compare_lora(
    directory: Path, result: dict[str, Any], dtype: str = "float32"
) -> tuple[int, int, float]:
    """As :func:`compare`, each answer against PEFT with its adapter."""
    asked = [
        (request, Path(request["lora"][2]) if "lora" in request else None)
        for request in lora_requests(directory)
    ]
    return _compare_adapted(small_models.target(directory), asked, result["steps"][-1], dtype)


def _compare_adapted(
    model: Path, asked: list[tuple[Any, Path | None]], answers: list[Any], dtype: str
) -> tuple[int, int, float]:
    pairs = zip(asked, answers, strict=True)
    comparisons = [
        compare(reference(model, adapter, dtype), [request], [answer])
        for (request, adapter), answer in pairs
    ]
    return (
        sum(tokens for tokens, _, _ in comparisons),
        sum(mismatches for _, mismatches, _ in comparisons),
        max(max_diff for _, _, max_diff in comparisons),
    )


def scored_prompts(directory: Path) -> list[dict[str, Any]]:
    """Prompts whose log-probabilities are requested, in one batch, with an adapter on `lm_head` and
    with none."""
    adapter = {"lora": adapters(directory)["wide"]}
    asked = [greedy(prompt, 2, **more) for prompt in prompts()[1:] for more in ({}, adapter)]
    return [
        request | {"sampling": request["sampling"] | {"prompt_logprobs": 0}} for request in asked
    ]


def compare_scored_prompts(directory: Path, answers: list[Any]) -> tuple[int, float]:
    """Number of the prompts' tokens, and the largest difference of a log-probability
    from PEFT's."""
    import torch

    tokens, max_diff = 0, 0.0
    for request, (answer,) in zip(scored_prompts(directory), answers, strict=True):
        model = reference(
            small_models.target(directory), Path(request["lora"][2]) if "lora" in request else None
        )
        exact = logits(model, request["prompt"][:1], [request["prompt"][1:]])[0].log_softmax(-1)
        exact = exact.gather(1, torch.tensor(request["prompt"][1:])[:, None])[:, 0]
        tokens, max_diff = (
            tokens + len(exact),
            max(max_diff, float((exact - torch.tensor(answer["prompt_logprobs"])).abs().max())),
        )
    return tokens, max_diff


def lora_on_family(
    name: str,
    directory: Path,
    family: str,
    ranks: int,
    dtype: str = "float32",
    model: Path | None = None,
    **engine: Any,
) -> dict[str, Any]:
    """As :func:`lora`, with adapters on the experts of Qwen2Moe, or on the latent attention of
    DeepseekV3; ``model`` replaces the target by another form of it."""
    steps: list[Any] = [
        ["generate", [request for request, _ in family_requests(directory, family)]]
    ]
    if family == "DeepseekV3":
        target = small_models.target(directory, family)
        steps += [
            ["add", each, 9, str(small_models.adapter(target, directory, each))]
            for each in small_models.ABSORBED_ADAPTER
        ]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": max(small_models.EXPERT_RANKS)}
    model = model or small_models.target(directory, family)
    return case(name, model, ranks, steps, dtype, **options | engine)


def family_requests(directory: Path, family: str) -> list[tuple[dict[str, Any], Path | None]]:
    """Each prompt with every adapter of a family and with none, and PEFT's form of the adapter."""
    model = small_models.target(directory, family)
    if family == "Qwen2Moe":
        adapter_paths = [
            small_models.adapter_on_experts(model, directory, rank)
            for rank in small_models.EXPERT_RANKS
        ]
    else:
        adapter_paths = [
            (path, path)
            for path in (
                small_models.adapter(model, directory, name)
                for name in small_models.LATENT_ADAPTERS
            )
        ]
    asked: list[tuple[dict[str, Any], Path | None]] = [
        (greedy(prompt, 8), None) for prompt in prompts(3)
    ]
    for number, (source, path) in enumerate(adapter_paths, 1):
        asked += [
            (greedy(prompt, 8, lora=[path.name, number, str(path)]), source)
            for prompt in prompts(3)
        ]
    return asked


def compare_lora_on_family(
    directory: Path,
    family: str,
    answers: list[Any],
    dtype: str = "float32",
    model: Path | None = None,
) -> tuple[int, int, float]:
    """As :func:`compare_lora`."""
    model = model or small_models.target(directory, family)
    return _compare_adapted(model, family_requests(directory, family), answers, dtype)


def quantized_experts(directory: Path) -> tuple[Path, Path]:
    """The Qwen2Moe target with int8 experts (W8A8_DYNAMIC), and in float with their dequantized
    matrices."""
    import torch
    from harness.models import quantize
    from safetensors.torch import load_file, save_file

    source = small_models.target(directory, "Qwen2Moe")
    path, exact = directory / "int8-experts", directory / "dequantized-experts"
    quantized_weights = quantize.quantize(
        source,
        path,
        "ascend",
        lambda name: quantize.Spec(8, "dynamic") if ".experts." in name else None,
        dtype=torch.float16,
        inputs={},
    )
    shutil.copytree(source, exact)
    weights = load_file(source / "model.safetensors")
    weights |= {
        f"{name}.weight": matrix.numbers().float()
        for name, matrix in quantized_weights.matrices.items()
    }
    save_file(weights, exact / "model.safetensors", {"format": "pt"})
    return path, exact
