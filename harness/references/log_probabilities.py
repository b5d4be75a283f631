# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Log-probabilities of Hugging Face transformers and PEFT in float32 on the CPU, under an engine's
own tokens."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any


def class_of(model: Path) -> Any:
    """The class of transformers that the configuration of a model names, or else
    ``AutoModelForCausalLM``.

    The latter takes vLLM's configuration in a process where vLLM has registered it with
    ``AutoConfig``.
    """
    import transformers

    config = json.loads((model / "config.json").read_text())
    name = (config.get("architectures") or [""])[0]
    kinds = ("ForCausalLM", "ForConditionalGeneration")
    named = getattr(transformers, name, None) if name.endswith(kinds) else None
    return named or transformers.AutoModelForCausalLM


@functools.cache
def reference(model: Path, adapter: Path | None = None, dtype: str = "float32") -> Any:
    """The model with the engine's weights (rounded to dtype), computing in float32, with or without
    an adapter."""
    import torch

    model_with_adapter = (
        class_of(model).from_pretrained(model, dtype=getattr(torch, dtype)).float().eval()
    )
    if adapter:
        import peft

        model_with_adapter = peft.PeftModel.from_pretrained(model_with_adapter, adapter).eval()
    return model_with_adapter


def logits(model: Any, prompt: list[int], answers: list[list[int]]) -> Any:
    """Logits of each token of several equally long answers to a prompt, ``[answers, tokens,
    vocabulary]``."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([prompt + answer for answer in answers])).logits[
            :, len(prompt) - 1 : -1
        ]


def differences(model: Any, prompt: list[int], answer: dict[str, Any]) -> tuple[int, Any]:
    """Tokens of an answer that differ from the model's argmax, and the log-probability difference
    of each token."""
    import torch

    exact = logits(model, prompt, [answer["tokens"]])[0].log_softmax(-1)
    tokens = torch.tensor(answer["tokens"])
    mismatches = int((exact.argmax(-1) != tokens).sum())
    logprobs = exact.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return mismatches, (logprobs - torch.tensor(answer["logprobs"])).abs()


def distance(model: Any, prompt: list[int], answer: dict[str, Any]) -> tuple[int, float]:
    """As :func:`differences`, with the largest of them."""
    mismatches, each = differences(model, prompt, answer)
    return mismatches, float(each.max())
