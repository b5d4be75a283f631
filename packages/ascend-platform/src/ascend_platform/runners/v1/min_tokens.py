# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The minimum of tokens of the V1 runner, by the position of each logit.

vLLM's processor counts the tokens of a request's list on the host. With asynchronous scheduling the
list has placeholders of draft tokens that may be rejected, and after a preemption of a token that
was discarded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from ascend_platform.runners.v1 import sampling_step


def _new_state(params: Any, *_: object) -> tuple[int, tuple[int, ...], set[int], bool] | None:
    """A request's entry in vLLM's ``min_toks``; its list of tokens is not used."""
    if not params.min_tokens or not params.all_stop_token_ids:
        return None
    is_structured = params.structured_outputs is not None
    return params.min_tokens, (), params.all_stop_token_ids, is_structured


def update_state(self: Any, batch_update: Any) -> None:
    """Replacement of ``MinTokensLogitsProcessor.update_state``: a request keeps its entry until it
    ends."""
    process_dict_updates(self.min_toks, batch_update, _new_state)


def apply(self: Any, logits: torch.Tensor) -> torch.Tensor:
    """Mask the stop tokens of requests with fewer tokens than their minimum; logits are
    ``[requests, vocab_size]``."""
    step = sampling_step.current()
    if not self.min_toks or step is None:
        return logits
    return _mask(logits, self.min_toks, step, step.positions, {row: [row] for row in self.min_toks})


def apply_with_spec_decode(
    self: Any, logits: torch.Tensor, num_draft_tokens: list[int]
) -> torch.Tensor:
    """Like :func:`apply`, but logits are ``[draft tokens, vocab_size]``."""
    step = sampling_step.current()
    if not self.min_toks or step is None or not len(logits):
        return logits
    ends = np.cumsum(num_draft_tokens)
    rows = {each: range(ends[each] - num_draft_tokens[each], ends[each]) for each in self.min_toks}
    return _mask(logits, self.min_toks, step, step.draft_positions, rows)


def _mask(
    logits: torch.Tensor,
    entries: dict[int, tuple[int, Any, set[int], bool]],
    step: sampling_step.SamplingStep,
    positions: torch.Tensor,
    rows: Any,
) -> torch.Tensor:
    """Mask stop tokens in ``rows`` of each request; a grammar that allows nothing else keeps
    them."""
    stride, pairs = logits.stride(0), []
    for request, (minimum, _, stop_token_ids, is_structured) in entries.items():
        limit = int(step.num_prompt_tokens[request]) + minimum - 1
        for row in rows[request]:
            pairs += [(row, row * stride + token, limit, is_structured) for token in stop_token_ids]
    if not pairs:
        return logits
    table = async_tensor_h2d(np.array(pairs, np.int64).T.copy(), device=logits.device)
    row_of, element, limit_of, has_grammar = table.unbind()
    # Logits without the padding of the vocabulary are not contiguous.
    flat = logits.as_strided(((len(logits) - 1) * stride + logits.shape[1],), (1,))
    given = flat.index_select(0, element)
    is_short = positions.index_select(0, row_of) < limit_of
    masked = given.masked_fill(is_short, -torch.inf)
    flat.index_copy_(0, element, masked)
    if any(structured for *_, structured in pairs):
        is_empty = logits.amax(-1).isneginf().index_select(0, row_of)
        kept = torch.where(is_empty & (has_grammar > 0), given, masked)
        flat.index_copy_(0, element, kept)
    return logits
