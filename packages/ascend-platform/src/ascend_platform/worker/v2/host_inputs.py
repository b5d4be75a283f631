"""A V2 step's inputs, computed on the host and copied once, where the host knows how many tokens of each request are computed.

That is always so without draft tokens. vLLM's kernels compute them on the device, in PyTorch with some thirty small operators.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d


class HostInputs:
    """Inputs of a step.

    Attributes:
        rows: state of each request, int64 ``[requests]``.
        lengths: tokens of each request in the step.
        requests: request of each token, int64 ``[tokens]``.
        positions: of the tokens in their requests, int64 ``[tokens]``.
        seq_lens: tokens of each request with those of the step.
        decodes: whether a request's last token is one that it has sampled.
        samples: whether a request samples a token, which one whose prompt has further chunks does not.
    """

    def __init__(
        self,
        rows: np.ndarray,
        lengths: np.ndarray,
        computed: np.ndarray,
        prefill_len: np.ndarray,
        counters: torch.Tensor | None = None,
    ) -> None:
        """Compute the inputs from what the host knows of each request.

        Args:
            computed: number of tokens that earlier steps have computed.
            prefill_len: tokens of the prompt, and of the answer before a preemption.
            counters: the states' numbers of computed and of known tokens as one tensor on the device, ``[2, states]``.
        """
        self.counters = counters
        self.rows, self.lengths = rows.astype(np.int64), lengths.astype(np.int64)
        self.ends = self.lengths.cumsum()
        self.requests = np.repeat(np.arange(len(rows)), self.lengths)
        starts = self.ends - self.lengths
        self.positions = np.arange(len(self.requests)) + (computed - starts)[self.requests]
        self.seq_lens = computed + self.lengths
        self.decodes, self.samples = self.seq_lens > prefill_len, self.seq_lens >= prefill_len

    def write_positions(self, positions: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Write positions, and sequence lengths with 0 for padding requests."""
        async_tensor_h2d(self.positions, out=positions[: len(self.positions)])
        padded = np.zeros(len(seq_lens), np.int32)
        padded[: len(self.rows)] = self.seq_lens
        async_tensor_h2d(padded, out=seq_lens)

    @functools.cached_property
    def device_positions(self) -> torch.Tensor:
        """For positions of several dimensions."""
        return async_tensor_h2d(self.positions, device="npu")

    @functools.cached_property
    def device_requests(self) -> torch.Tensor:
        return async_tensor_h2d(self.requests, device="npu")

    def write_prompts(self, input_ids: torch.Tensor, all_token_ids: torch.Tensor) -> None:
        """Write the step's known tokens; see ``inputs.prepare_prefill_inputs``."""
        elements = self.positions + self.rows[self.requests] * all_token_ids.stride(0)
        places = async_tensor_h2d(elements, device=input_ids.device)
        torch.index_select(all_token_ids.view(-1), 0, places, out=input_ids[: len(elements)])

    def write_sampled(self, input_ids: torch.Tensor, last_sampled: torch.Tensor, idx_mapping: torch.Tensor) -> torch.Tensor:
        """Write the last sampled tokens, ``[states]``, of requests in decode.

        Returns:
            The index of each request's last token in the step. In a step with one token each, which every request's is, it is a
            slice: vLLM only indexes with it, and so gathers nothing.
        """
        count, one_each = len(self.rows), bool((self.lengths == 1).all())
        if one_each and self.decodes.all():
            input_ids[:count].copy_(last_sampled.index_select(0, idx_mapping))
        elif self.decodes.any():
            chosen = self.decodes.nonzero()[0]
            rows, places = async_tensor_h2d(np.stack([self.rows[chosen], self.ends[chosen] - 1]), device=input_ids.device)
            input_ids.index_copy_(0, places, last_sampled.index_select(0, rows).to(input_ids.dtype))
        if one_each:
            return slice(0, count)  # type: ignore[return-value]
        return async_tensor_h2d(self.ends - 1, device=input_ids.device)

    def write_sampled_counts(self, num_sampled: torch.Tensor) -> None:
        """Write how many tokens each request has sampled, in place of the ones that are there."""
        if not self.samples.all():
            async_tensor_h2d(self.samples.astype(np.int32), out=num_sampled)

    def write_states(
        self,
        idx_mapping: torch.Tensor,
        tokens: torch.Tensor,
        num_sampled: torch.Tensor,
        last_sampled: torch.Tensor,
        total_len: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        all_token_ids: torch.Tensor,
        counts: torch.Tensor | None,
    ) -> None:
        """Update the requests' states by the sampled tokens, ``[requests]``; see ``inputs.post_update``."""
        if (self.lengths == 1).all() and self.samples.all() and self.counters is not None:
            self.counters.index_add_(1, idx_mapping, num_sampled.expand(2, -1))
        else:
            lengths = async_tensor_h2d(self.lengths.astype(np.int32), device=idx_mapping.device)
            num_computed_tokens.index_add_(0, idx_mapping, lengths)
            total_len.index_add_(0, idx_mapping, num_sampled)
        if not self.samples.any():
            return
        chosen, width = self.samples.nonzero()[0], all_token_ids.shape[1]
        elements = np.minimum(self.seq_lens[chosen], width - 1) + self.rows[chosen] * width
        rows = idx_mapping
        if len(chosen) < len(self.rows):
            rows, chosen_on_device, places = async_tensor_h2d(
                np.stack([self.rows[chosen], chosen, elements]), device=idx_mapping.device
            )
            tokens, num_sampled = tokens.index_select(0, chosen_on_device), num_sampled.index_select(0, chosen_on_device)
        else:
            places = async_tensor_h2d(elements, device=idx_mapping.device)
        last_sampled.index_copy_(0, rows, tokens)
        all_token_ids.view(-1).index_copy_(0, places, tokens.to(all_token_ids.dtype))
        if counts is not None:
            counts.view(-1).index_add_(0, torch.add(tokens, rows, alpha=counts.shape[1]), num_sampled)
