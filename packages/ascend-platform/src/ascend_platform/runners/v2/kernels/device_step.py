# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A V2 step whose inputs are computed on the device: with draft tokens the host has upper bounds of
the requests' sequence lengths only.

A request has a logit for its last token, and one for each draft token before it.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from ascend_platform.kernels import ragged
from ascend_platform.runners.v2.kernels.step import PreparedStep, Sampled, States, add_at


class DeviceStep(PreparedStep):
    """A step whose number of tokens and of draft tokens the host knows."""

    def __init__(
        self,
        num_scheduled_tokens: np.ndarray,
        has_prefill: bool,
        counts_output: bool = True,
        num_draft_tokens: np.ndarray | None = None,
        looks_ahead: bool = False,
        is_greedy: bool = False,
        has_seeds: bool = True,
        seeds_set: torch.Tensor | None = None,
    ) -> None:
        """Describe a step; see :class:`Step`.

        Args:
            num_draft_tokens: of each request; None if there are none.
            looks_ahead: whether a drafter reads the prompt's token after the step.
        """
        self.counts_output, self.looks_ahead = counts_output, looks_ahead
        self.is_greedy, self.has_seeds, self.seeds_set = is_greedy, has_seeds, seeds_set
        self.has_drafts, self.has_prefill = num_draft_tokens is not None, has_prefill
        self.num_tokens = int(num_scheduled_tokens.sum())
        self.one_token_each = bool((num_scheduled_tokens == 1).all()) and not self.has_drafts
        self._num_scheduled_tokens, self._num_draft_tokens = num_scheduled_tokens, num_draft_tokens
        self._rows: torch.Tensor | None = None
        self._logit_rows: torch.Tensor | None = None

    @property
    def samples_one_each(self) -> bool:
        """Whether every request is in decode, and so samples one token and rejects none."""
        return self.one_token_each and not self.has_prefill

    def logit_rows(self, device: torch.device) -> torch.Tensor:
        """Request of each logit, the logit's number in its request, and its token's index in the
        step, int64 ``[3, logits]``."""
        if self._logit_rows is None:
            assert self._num_draft_tokens is not None
            counts = self._num_draft_tokens.astype(np.int64) + 1
            requests = np.repeat(np.arange(len(counts)), counts)
            numbers = np.arange(len(requests)) - (counts.cumsum() - counts)[requests]
            first = self._num_scheduled_tokens.cumsum() - counts
            self._logit_rows = async_tensor_h2d(
                np.stack([requests, numbers, first[requests] + numbers]), device=device
            )
        return self._logit_rows

    def per_logit(self, values: tuple[int, ...]) -> tuple[int, ...]:
        if self._num_draft_tokens is None:
            return values
        return tuple(np.repeat(values, self._num_draft_tokens + 1))

    def per_token(self, values: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
        if self.one_token_each:
            return values
        if self._rows is None:
            counts = self._num_scheduled_tokens
            requests = np.repeat(np.arange(len(counts)), counts)
            self._rows = async_tensor_h2d(requests, device=values.device)
        return values.index_select(0, self._rows)

    def positions(self, computed: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
        """Positions of the tokens in their requests, int64 ``[tokens]``; ``computed`` is
        ``num_computed_tokens`` by request."""
        if self.one_token_each:
            return computed.long()
        shift = computed - query_start_loc[: len(computed)]
        tokens = ragged.arange(self.num_tokens, computed.device)
        return tokens + self.per_token(shift, query_start_loc)

    def prepare_prefill_inputs(
        self,
        input_ids: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        all_token_ids: torch.Tensor,
        prefill_len: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        /,
    ) -> None:
        """Write the step's known tokens to ``input_ids``.

        vLLM writes those of requests in prefill only; the last sampled token of others, which is
        known too, is written again by :meth:`combine_sampled_and_draft_tokens`.
        ``next_prefill_tokens`` ``[tokens, requests]``, the prompt's tokens after those of the step,
        is written for drafters only.
        """
        computed = num_computed_tokens.index_select(0, idx_mapping)
        positions = self.positions(computed, query_start_loc)
        requests = self.per_token(idx_mapping, query_start_loc)
        elements = torch.add(positions, requests, alpha=all_token_ids.stride(0))
        torch.index_select(all_token_ids.view(-1), 0, elements, out=input_ids[: self.num_tokens])
        if self.looks_ahead:
            num_reqs, width = len(idx_mapping), all_token_ids.stride(0)
            ends = computed + query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
            following = ends + ragged.arange(len(next_prefill_tokens), ends.device)[:, None]
            tokens = all_token_ids.view(-1)[following.clamp(max=width - 1) + idx_mapping * width]
            known = following < prefill_len.index_select(0, idx_mapping)
            next_prefill_tokens.index_copy_(
                1, idx_mapping, torch.where(known, tokens, 0).to(next_prefill_tokens.dtype)
            )

    def prepare_pos_seq_lens(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        pos: torch.Tensor,
        seq_lens: torch.Tensor,
        /,
    ) -> None:
        num_reqs = len(idx_mapping)
        computed = num_computed_tokens.index_select(0, idx_mapping)
        pos[: self.num_tokens].copy_(self.positions(computed, query_start_loc))
        if self.one_token_each:
            torch.add(computed, 1, out=seq_lens[:num_reqs])
        else:
            query_lens = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
            torch.add(computed, query_lens, out=seq_lens[:num_reqs])
        seq_lens[num_reqs:].zero_()

    def combine_sampled_and_draft_tokens(
        self,
        input_ids: torch.Tensor,
        idx_mapping: torch.Tensor,
        last_sampled_tokens: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        prefill_len: torch.Tensor,
        draft_tokens: torch.Tensor,
        cu_num_logits: torch.Tensor,
        num_logits: int,
        num_new_sampled_tokens: int = 1,
        /,
    ) -> torch.Tensor:
        num_reqs = len(idx_mapping)
        assert num_new_sampled_tokens == 1, "models that sample several tokens"
        sampled = last_sampled_tokens.view(-1).index_select(0, idx_mapping)
        if self.has_drafts:
            return self._combine_drafts(
                input_ids,
                sampled,
                draft_tokens.index_select(0, idx_mapping),
                seq_lens[:num_reqs],
                prefill_len.index_select(0, idx_mapping),
                cu_num_logits[1 : num_reqs + 1] - cu_num_logits[:num_reqs],
            )
        assert num_logits == num_reqs, "draft tokens"
        last = ragged.arange(num_reqs, input_ids.device)
        if not self.one_token_each:
            last = query_start_loc[1 : num_reqs + 1].long() - 1
        if not self.has_prefill:
            assert self.one_token_each, "draft tokens"
            input_ids[:num_reqs].copy_(sampled)
            return last
        in_decode = seq_lens[:num_reqs] > prefill_len.index_select(0, idx_mapping)
        tokens = torch.where(
            in_decode, sampled.to(input_ids.dtype), input_ids.index_select(0, last)
        )
        input_ids.index_put_((last,), tokens)
        return last

    def _combine_drafts(
        self,
        input_ids: torch.Tensor,
        sampled: torch.Tensor,
        draft_tokens: torch.Tensor,
        seq_lens: torch.Tensor,
        prefill_len: torch.Tensor,
        num_logits: torch.Tensor,
    ) -> torch.Tensor:
        """Write the tokens of a step with draft tokens ``[requests, steps]``; all arguments but
        ``input_ids`` are by request."""
        requests, numbers, indices = self.logit_rows(input_ids.device).unbind()
        tokens = torch.cat((sampled[:, None], draft_tokens), 1).view(-1)
        values = tokens.index_select(
            0, torch.add(numbers, requests, alpha=draft_tokens.shape[1] + 1)
        ).to(input_ids.dtype)
        # Drafts after a prompt are placeholders, where the last tokens of the prompt stay.
        if self.has_prefill:
            is_written = torch.stack(
                (seq_lens - num_logits >= prefill_len, seq_lens > prefill_len), 1
            ).view(-1)
            is_written = is_written.index_select(
                0, torch.add(numbers.clamp(max=1), requests, alpha=2)
            )
            values = torch.where(is_written, values, input_ids.index_select(0, indices))
        input_ids.index_put_((indices,), values)
        return indices

    def expand_idx_mapping(
        self,
        idx_mapping: torch.Tensor,
        total_num_logits: int,
        cu_num_logits: torch.Tensor,
        max_expand_len: int,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        requests, numbers, _ = self.logit_rows(idx_mapping.device).unbind()
        return idx_mapping.index_select(0, requests), numbers.int()

    def positions_in_prefill(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        prefill_lens: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        computed = num_computed_tokens.index_select(0, idx_mapping)
        positions = self.positions(computed, query_start_loc)
        if not self.has_prefill:
            return positions, None
        in_prefill = computed < prefill_lens.index_select(0, idx_mapping)
        return positions, self.per_token(in_prefill, query_start_loc)

    def get_num_sampled_and_rejected(
        self, num_sampled: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # vLLM has filled num_sampled with ones.
        if self.samples_one_each:
            return num_sampled, ragged.zeros(len(num_sampled), num_sampled.device)
        return super().get_num_sampled_and_rejected(num_sampled, *others)

    def add_sampled(self, states: States, sampled: Sampled) -> None:
        if not self.samples_one_each or sampled.query_start_loc is None:
            super().add_sampled(states, sampled)
            return
        rows, tokens, width = sampled.rows, sampled.tokens[:, 0], states.token_ids.stride(0)
        table = states.token_ids.view(-1)
        end = states.total.index_select(0, rows).clamp_(max=width - 1)
        states.last_sampled.index_copy_(0, rows, tokens)
        table.index_copy_(0, torch.add(end, rows, alpha=width), tokens.to(table.dtype))
        for counter in (states.total, states.computed):
            counter.scatter_add_(0, rows, sampled.num_sampled)
        if (counts := states.bin_counts) is not None:
            counted = torch.add(tokens, rows, alpha=counts.stride(0))
            add_at(counts.view(-1), counted, sampled.num_sampled)
