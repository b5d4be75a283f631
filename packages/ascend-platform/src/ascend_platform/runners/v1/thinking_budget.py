# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Thinking budgets of the V1 runner, by the tokens before each logit, as in vLLM's V2 runner.

vLLM's V1 runner follows a request's thinking from step to step, and counts the row of a forced
token from the request's first row, without regard to how many rows the request has. A request
without a budget that moves to the row of one that has ended gets the budget of that one.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

FORCED = 1.0e9
"""vLLM's logit of a token that is forced."""


_sync_batch = ThinkingBudgetStateHolder.sync_batch


def sync_batch(self: Any, batch_update: BatchUpdate | None) -> None:
    """Like vLLM's method, but a row has the budget of the request that moves there, or none."""
    if batch_update is None:
        return
    _sync_batch(self, dataclasses.replace(batch_update, moved=()))
    for source, target, direction in batch_update.moved:
        moved, replaced = self._state.pop(source, None), self._state.pop(target, None)
        if moved is not None:
            self._state[target] = moved
        if replaced is not None and direction == MoveDirectionality.SWAP:
            self._state[source] = replaced


class Thoughts:
    """Tokens of a request, and where its thinking has begun and ended.

    Attributes:
        start, end: positions of the last markers; -1 if there is none.
    """

    def __init__(self, prompt: list[int], start_marker: list[int], end_marker: list[int]) -> None:
        self.prompt, self.markers = prompt, (start_marker, end_marker)
        self.tokens: list[int] = []
        self.start = self.end = -1
        self._extend(prompt)

    def update(self, output: list[int]) -> None:
        """Take all tokens after the prompt; those after the known ones are new."""
        known = len(self.tokens) - len(self.prompt)
        if known > len(output) or (known and self.tokens[-1] != output[known - 1]):
            # Tokens have been discarded, after a failed load of the KV cache.
            self.tokens, self.start, self.end, known = [], -1, -1, 0
            self._extend(self.prompt)
        self._extend(output[known:])

    def forced(self, drafts: list[int], budget: int) -> list[int]:
        """The token that is forced after the known tokens, and after each draft token; -1 where
        none is."""
        length, start, end = len(self.tokens), self.start, self.end
        found = [self._forced(budget)]
        for token in drafts:
            self._extend([token])
            found.append(self._forced(budget))
        del self.tokens[length:]
        self.start, self.end = start, end
        return found

    def _extend(self, tokens: list[int]) -> None:
        start, end = self.markers
        for token in tokens:
            self.tokens.append(token)
            if self.tokens[-len(start) :] == start:
                self.start = len(self.tokens) - len(start)
            if self.tokens[-len(end) :] == end:
                self.end = len(self.tokens) - len(end)

    def _forced(self, budget: int) -> int:
        start, end = self.markers
        if self.start <= self.end or len(self.tokens) - self.start - len(start) < budget:
            return -1
        matched = (n for n in range(len(end) - 1, 0, -1) if self.tokens[-n:] == end[:n])
        return end[next(matched, 0)]


def force(
    self: Any, logits: torch.Tensor, predict_bonus_token: bool, spec_token_ids: list[list[int]]
) -> torch.Tensor:
    """Replacement of ``ThinkingBudgetStateHolder._apply_forcing_to_logits``: force the end marker
    of requests that have thought for as many tokens as their budget.

    Args:
        logits: float32 ``[rows, vocab_size]``, written; one row for each request, or for each draft
            token.
        predict_bonus_token: whether the rows are those after all draft tokens.
        spec_token_ids: draft tokens of each request.
    """
    markers = self.think_start_token_ids, self.think_end_token_ids
    if not all(markers) or not len(logits):
        return logits
    firsts = [0, *accumulate(map(len, spec_token_ids))]
    has_row_per_draft = not predict_bonus_token and firsts[-1] == len(logits)
    forced = [-1] * len(logits)
    for index, state in self._state.items():
        if (thoughts := state.get("thoughts")) is None:
            thoughts = state["thoughts"] = Thoughts(state["prompt_tok_ids"] or [], *markers)
        thoughts.update(state["output_tok_ids"])
        drafts = spec_token_ids[index] if index < len(spec_token_ids) else []
        tokens = thoughts.forced(drafts, state["thinking_token_budget"])
        if has_row_per_draft:
            forced[firsts[index] : firsts[index] + len(drafts)] = tokens[: len(drafts)]
        else:
            forced[index] = tokens[-1 if predict_bonus_token else 0]
    if max(forced) < 0:
        return logits
    token_ids = async_tensor_h2d(forced, dtype=torch.int64, device=logits.device)[:, None]
    columns = token_ids.clamp(min=0)
    kept = logits.gather(1, columns)
    return logits.scatter_(1, columns, kept.masked_fill(token_ids >= 0, FORCED))
