# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Grammars with draft tokens of ``ngram_gpu``, whose number is only known after they are
scheduled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np


class TrimmedDraftsMixin:
    """Mixin for GPUModelRunner that gives each logit the bit mask of its position.

    The scheduler makes a mask for each draft token and one more for each request. With
    asynchronous scheduling the runner then trims the draft tokens of ``ngram_gpu`` to those that
    were found, and vLLM reads the masks as if they were trimmed, too.
    """

    _num_scheduled_drafts: Mapping[str, int] = MappingProxyType({})

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self._num_scheduled_drafts = {name: len(tokens) for name, tokens in drafts.items()}
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        if grammar_output is not None and self.execute_model_state is not None:
            drafts = self.execute_model_state.scheduler_output.scheduled_spec_decode_tokens
            grammar_output = trim(grammar_output, self._num_scheduled_drafts, drafts)
        return super().sample_tokens(grammar_output)  # type: ignore[misc]


def trim(grammar_output: Any, scheduled: Mapping[str, int], drafts: Mapping[str, list[int]]) -> Any:
    """Keep the masks of the draft tokens that are left, and of the token after them.

    Args:
        grammar_output: vLLM's GrammarOutput, with masks int32 ``[logits, words]``.
        scheduled: how many draft tokens each request had when the masks were made.
    """
    kept: list[int] = []
    start = 0
    for name in grammar_output.structured_output_request_ids:
        kept.extend(range(start, start + 1 + len(drafts.get(name, ()))))
        start += 1 + scheduled.get(name, 0)
    if len(kept) == start:
        return grammar_output
    masks = np.ascontiguousarray(grammar_output.grammar_bitmask[kept])
    return dataclasses.replace(grammar_output, grammar_bitmask=masks)
