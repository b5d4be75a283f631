# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A V2 step's inputs, computed on the host and copied once, where the host knows how many tokens of
each request are computed.

That is always so without draft tokens. vLLM's kernels compute them on the device, in PyTorch with
some thirty small operators.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from ascend_platform.kernels.v2.buffers import copy_each, copy_together


class HostInputs:
    """Inputs of a step.

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
        num_sampled: the tensor of how many tokens each request has sampled, once it has been
        written.
    """

    num_sampled: torch.Tensor | None = None

    def __init__(
        self,
        rows: np.ndarray,
        lengths: np.ndarray,
        computed: np.ndarray,
        prefill_len: np.ndarray,
        table: torch.Tensor,
        indices: torch.Tensor | None = None,
    ) -> None:
        """Compute the inputs from what the host knows of each request.

        Args:
            computed: number of tokens that earlier steps have computed.
            prefill_len: tokens of the prompt, and of the answer before a preemption.
            table: the states' tokens on the device, int32 ``[states, max_model_len]``.
            indices: a buffer for the indices of a decode step, int64 ``[2 * states]``.
        """
        self.table, self._indices, self.computed, self.prefill_len = (
            table,
            indices,
            computed.astype(np.int64),
            prefill_len,
        )
        self.rows, self.lengths = rows.astype(np.int64), lengths.astype(np.int64)
        self.seq_lens = self.computed + self.lengths
        self.samples, self.in_prefill = self.seq_lens >= prefill_len, self.computed < prefill_len
        self._all_sample = bool(self.samples.all())
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

    def write_positions(self, positions: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Write positions, and sequence lengths with 0 for padding requests; of a decode step its
        operators' indices too."""
        padded = np.zeros(len(seq_lens), np.int32)
        padded[: len(self.rows)] = self.seq_lens
        copies: list[tuple[np.ndarray, torch.Tensor]] = [
            (self.positions, positions[: len(self.positions)]),
            (padded, seq_lens),
        ]
        if self.one_each and self._all_sample and self._indices is not None:
            count, width = len(self.rows), self.table.shape[1]
            both = (
                np.stack((self.positions, np.minimum(self.seq_lens, width - 1))) + self.rows * width
            )
            indices = self._indices[: 2 * count]
            self._on_device = dict(
                zip(("elements", "positions"), indices.view(2, count).unbind(), strict=True)
            )
            copies.insert(0, (both.reshape(-1), indices))
        copy_each(*copies)

    @property
    def known(self) -> np.ndarray:
        """Number of known tokens of each request before the step."""
        return np.maximum(self.computed + 1, self.prefill_len)

    @functools.cached_property
    def device_positions(self) -> torch.Tensor:
        """The positions on the device, for M-RoPE; int64 ``[tokens]``."""
        return async_tensor_h2d(self.positions, device="npu")

    @functools.cached_property
    def device_requests(self) -> torch.Tensor:
        return async_tensor_h2d(self.requests, device="npu")

    @functools.cached_property
    def device_following(self) -> torch.Tensor:
        """Element of ``table`` with the token after each of the step's, int64 ``[tokens]``; of a
        full row's last one itself."""
        width = self.table.shape[1]
        following = np.minimum(self.positions + 1, width - 1) + self.rows[self.requests] * width
        return async_tensor_h2d(following, device=self.table.device)

    @functools.cached_property
    def device_in_prefill(self) -> torch.Tensor:
        """``in_prefill`` by token."""
        return async_tensor_h2d(self.in_prefill[self.requests], device="npu")

    def write_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Write the step's tokens, of prompts and sampled ones.

        Returns:
            The index of each request's last token in the step. In a step with one token each it is
            a slice: vLLM only indexes with it, and so gathers nothing.
        """
        elements = self._on_device["elements"]
        torch.index_select(self.table.view(-1), 0, elements, out=input_ids[: len(elements)])
        return slice(0, len(self.rows)) if self.one_each else self._on_device["last"]  # type: ignore[return-value]

    def write_sampled_counts(self, num_sampled: torch.Tensor) -> None:
        """Overwrite the number of sampled tokens of each request."""
        if not self._all_sample:
            async_tensor_h2d(self.samples.astype(np.int32), out=num_sampled)
        self.num_sampled = num_sampled

    def write_lengths(self, idx_mapping: torch.Tensor, lengths: torch.Tensor) -> None:
        """Write the requests' numbers of computed and of known tokens before the step,
        ``lengths[:2]`` of ``[4, states]``.

        Of vLLM's own code only a few logits processors read them where the host knows the inputs.
        """
        before = np.stack((self.computed, self.known)).astype(np.int32)
        lengths[:2].index_copy_(1, idx_mapping, async_tensor_h2d(before, device=lengths.device))

    def write_sampled_tokens(
        self,
        idx_mapping: torch.Tensor,
        tokens: torch.Tensor,
        num_sampled: torch.Tensor,
        counts: torch.Tensor | None,
    ) -> None:
        """Add the sampled tokens, ``[requests]``, to the requests' states; see
        ``inputs.post_update``.

        ``last_sampled_tokens`` and the token counts, which vLLM keeps too, are not read if the host
        knows the inputs.
        """
        sent, rows = self._on_device, idx_mapping
        if not self._all_sample:
            if not self.samples.any():
                return
            rows, chosen = sent["chosen"].unbind()
            tokens, num_sampled = (
                tokens.index_select(0, chosen),
                num_sampled.index_select(0, chosen),
            )
        self.table.view(-1).index_copy_(0, sent["positions"], tokens.to(self.table.dtype))
        if counts is not None:
            counts.view(-1).index_add_(
                0, torch.add(tokens, rows, alpha=counts.shape[1]), num_sampled
            )
