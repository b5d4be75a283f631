# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A V2 step whose inputs are computed on the host and copied once, as the host knows how many
tokens of each request are computed.

That is so without draft tokens. vLLM's kernels compute them on the device, in PyTorch with some
thirty small operators.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from ascend_platform.kernels import ragged
from ascend_platform.runners.v2.kernels.buffers import (
    KnownTensor,
    SentInputs,
    copy_each,
    copy_together,
)
from ascend_platform.runners.v2.kernels.step import PreparedStep, Sampled, States, add_at


class HostStep(PreparedStep):
    """A step whose inputs the host knows; see :class:`PreparedStep`.

    Attributes:
        rows: state of each request, int64 ``[requests]``.
        lengths: tokens of each request in the step.
        requests: request of each token, int64 ``[tokens]``.
        positions: of the tokens in their requests, int64 ``[tokens]``.
        seq_lens: tokens of each request with those of the step.
        samples: whether a request samples a token, which one whose prompt has further chunks does
            not.
        in_prefill: whether a request's tokens in the step are of its prompt, or of its answer
            before a preemption.
        one_each: whether each request has one token in the step.
        has_prefill: whether a request is in prefill.
    """

    def __init__(
        self,
        rows: np.ndarray,
        lengths: np.ndarray,
        computed: np.ndarray,
        prefill_len: np.ndarray,
        table: torch.Tensor,
        indices: torch.Tensor | None = None,
        counts_output: bool = True,
        sent: SentInputs | None = None,
    ) -> None:
        """Compute the inputs from what the host knows of each request.

        Args:
            computed: number of tokens that earlier steps have computed.
            prefill_len: tokens of the prompt, and of the answer before a preemption.
            table: the states' tokens on the device, int32 ``[states, max_model_len]``.
            indices: a buffer for the indices of a decode step, int64 ``[2 * states]``.
            sent: what the runner's last step has copied.
        """
        self.counts_output, self._sent = counts_output, sent
        self.table = table
        self._indices = indices
        self.computed = computed.astype(np.int64)
        self.prefill_len = prefill_len
        self.rows, self.lengths = rows.astype(np.int64), lengths.astype(np.int64)
        self.seq_lens = self.computed + self.lengths
        self.samples, self.in_prefill = self.seq_lens >= prefill_len, self.computed < prefill_len
        self._all_sample, self.has_prefill = bool(self.samples.all()), bool(self.in_prefill.any())
        self.one_each = bool((self.lengths == 1).all())
        if self.one_each:
            self.requests, self.positions = np.arange(len(rows)), self.computed
            return
        self.ends = self.lengths.cumsum()
        self.requests = np.repeat(np.arange(len(rows)), self.lengths)
        self.positions = (
            np.arange(len(self.requests))
            + (self.computed - self.ends + self.lengths)[self.requests]
        )

    @functools.cached_property
    def _on_device(self) -> dict[str, torch.Tensor]:
        """Indices that the step's operators take, after one copy of them all."""
        width = self.table.shape[1]
        chosen = self.samples.nonzero()[0]
        arrays = {
            "elements": self.positions + self.rows[self.requests] * width,
            "positions": np.minimum(self.seq_lens[chosen], width - 1) + self.rows[chosen] * width,
        }
        if not self.one_each:
            arrays["last"] = self.ends - 1
        if len(chosen) < len(self.rows):
            arrays["chosen"] = np.stack([self.rows[chosen], chosen])
        return dict(zip(arrays, copy_together([*arrays.values()], self.table.device), strict=True))

    @property
    def known(self) -> np.ndarray:
        """Number of known tokens of each request before the step."""
        return np.maximum(self.computed + 1, self.prefill_len)

    def num_known_tokens(self, limit: int) -> int:
        return int(self.known.max())

    def copy_input(
        self, data: Any, device: Any = None, dtype: torch.dtype | None = None, out: Any = None
    ) -> torch.Tensor:
        """Like the base method; arrays of ``prepare_inputs`` that are those of the last step are
        not copied again."""
        if self.are_constants_shared and self._sent is not None:
            return self._sent.copy(data, device, dtype, out)
        return super().copy_input(data, device, dtype, out)

    def prepare_prefill_inputs(self, *_: torch.Tensor) -> None:
        """No-op: :meth:`combine_sampled_and_draft_tokens` writes all tokens."""

    def prepare_pos_seq_lens(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        pos: torch.Tensor,
        seq_lens: torch.Tensor,
        /,
    ) -> None:
        """Write positions, and sequence lengths with 0 for padding requests; of a decode step its
        operators' indices too."""
        padded = np.zeros(len(seq_lens), np.int32)
        padded[: len(self.rows)] = self.seq_lens
        copies: list[tuple[np.ndarray, torch.Tensor]] = [
            (self.positions, pos[: len(self.positions)]),
            (padded, seq_lens),
        ]
        if self.one_each and self._all_sample and self._indices is not None:
            count, width = len(self.rows), self.table.shape[1]
            following = np.minimum(self.seq_lens, width - 1)
            both = np.stack((self.positions, following)) + self.rows * width
            indices = self._indices[: 2 * count]
            self._on_device = dict(
                zip(("elements", "positions"), indices.view(2, count).unbind(), strict=True)
            )
            copies.insert(0, (both.reshape(-1), indices))
        copy_each(*copies)

    def combine_sampled_and_draft_tokens(
        self, input_ids: torch.Tensor, /, *_: Any
    ) -> torch.Tensor | slice:
        """Write the step's tokens, of prompts and sampled ones, to ``input_ids``.

        Returns:
            The index of each request's last token in the step. In a step with one token each it is
            a slice: vLLM only indexes with it, and so gathers nothing.
        """
        elements = self._on_device["elements"]
        torch.index_select(self.table.view(-1), 0, elements, out=input_ids[: len(elements)])
        return slice(0, len(self.rows)) if self.one_each else self._on_device["last"]

    def expand_idx_mapping(
        self, idx_mapping: torch.Tensor, /, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One logit per request: there are no draft tokens."""
        return idx_mapping, ragged.zeros(len(idx_mapping), idx_mapping.device)

    def per_token(self, values: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
        return values if self.one_each else values.index_select(0, self._device_requests)

    @functools.cached_property
    def _device_requests(self) -> torch.Tensor:
        return async_tensor_h2d(self.requests, device=self.table.device)

    def positions_in_prefill(self, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        positions = async_tensor_h2d(self.positions, device=self.table.device)
        if not self.has_prefill:
            return positions, None
        in_prefill = self.in_prefill[self.requests]
        return positions, async_tensor_h2d(in_prefill, device=self.table.device)

    def get_prompt_logprobs_token_ids(self, *arguments: Any) -> torch.Tensor:
        all_token_ids = arguments[-1]
        return all_token_ids.view(-1).index_select(0, self._device_following).long()

    @functools.cached_property
    def _device_following(self) -> torch.Tensor:
        """Element of ``table`` with the token after each token of the step, int64 ``[tokens]``; for
        the last one of a full row, itself."""
        width = self.table.shape[1]
        following = np.minimum(self.positions + 1, width - 1) + self.rows[self.requests] * width
        return async_tensor_h2d(following, device=self.table.device)

    def get_num_sampled_and_rejected(
        self, num_sampled: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # vLLM has filled num_sampled with ones.
        counts = self.samples.astype(np.int32)
        if not self._all_sample:
            async_tensor_h2d(counts, out=num_sampled)
        num_rejected = ragged.zeros(len(self.rows), num_sampled.device)
        return KnownTensor.of(num_sampled, counts), num_rejected

    def add_sampled(self, states: States, sampled: Sampled) -> None:
        """Add the sampled tokens to the requests' states.

        ``last_sampled`` and the token counts, which vLLM keeps too, are not read where the host knows
        the inputs.
        """
        sent, rows, tokens = self._on_device, sampled.rows, sampled.tokens[:, 0]
        num_sampled, counts = sampled.num_sampled, states.bin_counts
        if not self._all_sample:
            if not self.samples.any():
                return
            rows, chosen = sent["chosen"].unbind()
            tokens = tokens.index_select(0, chosen)
            num_sampled = num_sampled.index_select(0, chosen)
        self.table.view(-1).index_copy_(0, sent["positions"], tokens.to(self.table.dtype))
        if counts is not None:
            counted = torch.add(tokens, rows, alpha=counts.shape[1])
            add_at(counts.view(-1), counted, num_sampled)

    def num_null_blocks(
        self, idx_mapping: torch.Tensor, num_computed_tokens: torch.Tensor, reach: int, size: int
    ) -> torch.Tensor | None:
        num_null = (self.computed - reach).clip(min=0) // size
        return async_tensor_h2d(num_null, device=self.table.device) if num_null.any() else None

    def requests_in_tables(self, num_reqs_padded: int) -> tuple[bytes, int] | None:
        return self.rows.tobytes(), num_reqs_padded

    def compute_slot_mappings(
        self, tables: Any, *arguments: Any, num_tokens: int, out: Any = None
    ) -> torch.Tensor:
        num_tokens_padded = arguments[-1]
        return tables.copy_slot_mappings(
            self.rows[self.requests], self.positions, num_tokens_padded, out
        )

    def write_lengths(self, idx_mapping: torch.Tensor, lengths: torch.Tensor) -> None:
        """Write the requests' numbers of computed and of known tokens before the step,
        ``lengths[:2]`` of ``[4, states]``.

        Of vLLM's own code only a few logits processors read them where the host knows the inputs.
        """
        before = np.stack((self.computed, self.known)).astype(np.int32)
        lengths[:2].index_copy_(1, idx_mapping, async_tensor_h2d(before, device=lengths.device))
