# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Token ids of prompts that are given as embeddings, which are not known.

vLLM keeps the rows of ended requests in ``InputBatch.token_ids_cpu``, and writes no ids for
embeddings. What reads a row would find the tokens of an earlier request, or -1, the placeholder of
asynchronous scheduling, which is no index.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

_add_request = InputBatch.add_request
_get_token_id = CachedRequestState.get_token_id
_make_prompt_token_ids = InputBatch._make_prompt_token_ids_cpu_tensor


def add_request(self: Any, request: Any) -> int:
    """Like vLLM's method, but write token 0 for embeddings; drafters of n-grams read it."""
    row = _add_request(self, request)
    if request.prompt_embeds is not None:
        count = self.num_prompt_tokens[row]
        self.token_ids_cpu[row, :count][~self.is_token_ids[row, :count]] = 0
    return row


def make_prompt_token_ids(self: Any) -> torch.Tensor:
    """Like vLLM's method, but use the padding ``vocab_size`` for embeddings, which penalties do not
    count."""
    token_ids = _make_prompt_token_ids(self)
    rows, columns = token_ids.shape
    token_ids.numpy()[~self.is_token_ids[:rows, :columns]] = self.vocab_size
    return token_ids


def get_token_id(self: Any, idx: int) -> int:
    """Like vLLM's method, but return token 0 for an embedding; a drafter asks for the token after a
    part of a prompt."""
    if idx < self.num_prompt_tokens and self.prompt_token_ids is None:
        return 0
    return _get_token_id(self, idx)


class EmbeddedPromptsMixin:
    """Mixin for GPUModelRunner that embeds all tokens after a prompt.

    vLLM marks them where its host has added them to the batch, which with draft tokens and
    asynchronous scheduling is at other positions than those of the step.
    """

    def _prepare_input_ids(
        self: Any, scheduler_output: Any, num_reqs: int, total: int, cu_num_tokens: np.ndarray
    ) -> None:
        if self.enable_prompt_embeds:
            batch, rows = self.input_batch, self.req_indices.np[:total]
            positions = batch.num_computed_tokens_cpu[rows] + self.query_pos.np[:total]
            self.is_token_ids.np[:total] |= positions >= batch.num_prompt_tokens[rows]
        super()._prepare_input_ids(scheduler_output, num_reqs, total, cu_num_tokens)  # type: ignore[misc]
