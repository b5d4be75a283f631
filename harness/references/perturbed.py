# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Effects of roundings to bfloat16 or float16 on a reference's log-probabilities.

Experts are chosen by comparison: where two scores nearly tie, a rounding changes the choice, and
with it the log-probabilities of this token and later ones by much more than the rounding itself. A
bound on the difference to a float32 reference is then too strict for some tokens, or too loose for
the others. Here the reference is computed many times with other roundings instead, and an answer is
right if some of them explain it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

HALF_STEPS = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Relative: the most that rounding changes a number."""

TIES = {"bfloat16": 2.0**-6, "float16": 2.0**-9}
"""A step between numbers from 2 to 4, as the largest logits are."""


class Range(NamedTuple):
    """For each token of an answer the lowest and highest log-probability, and whether no token is
    better in some reference."""

    low: Any
    high: Any
    preferred: Any


def ranges(
    model: Any, prompt: list[int], tokens: list[int], dtype: str = "bfloat16", references: int = 24
) -> Range:
    """The log-probabilities of an answer's tokens by references in which each module's output is
    off by up to half a step."""
    import torch

    draw = torch.Generator().manual_seed(0)

    def disturb(module: Any, given: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        noise = torch.rand(output.shape, generator=draw, dtype=output.dtype) * 2 - 1
        noise[0] = 0  # the first reference is exact
        return output * (1 + HALF_STEPS[dtype] * noise)

    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [module.register_forward_hook(disturb) for module in leaves]
    try:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens] * references)).logits[
                :, len(prompt) - 1 : -1
            ]
    finally:
        for hook in hooks:
            hook.remove()
    chosen = torch.tensor(tokens)
    logprobs = (
        logits.log_softmax(-1).gather(2, chosen.view(1, -1, 1).expand(references, -1, 1)).squeeze(2)
    )
    behind = logits.amax(-1) - logits.gather(
        2, chosen.view(1, -1, 1).expand(references, -1, 1)
    ).squeeze(2)
    return Range(logprobs.amin(0), logprobs.amax(0), (behind < TIES[dtype]).any(0))


def unexplained(
    model: Any, asked: list[dict[str, Any]], answers: list[Any], dtype: str = "bfloat16"
) -> tuple[int, float]:
    """Tokens of the answers that are no reference's best, and how far a log-probability is outside
    of the references' at most."""
    import torch

    mismatches, max_diff = 0, 0.0
    for request, (answer, *_) in zip(asked, answers, strict=True):
        bounds, logprobs = (
            ranges(model, request["prompt"], answer["tokens"], dtype),
            torch.tensor(answer["logprobs"]),
        )
        mismatches += int((~bounds.preferred).sum())
        max_diff = max(
            max_diff, float(torch.maximum(bounds.low - logprobs, logprobs - bounds.high).max())
        )
    return mismatches, max_diff
