# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sequence lengths on the host while draft tokens are in flight.

CANN's attention takes sequence lengths from the host. With draft tokens, vLLM's
``seq_lens_cpu_upper_bound`` counts each of the last step as accepted, and only ``seq_lens`` on
the device is exact. The number of accepted tokens is copied to the host right after the rejection
sampler, while the device goes on with the drafter. The host waits for this copy, once per step,
where the next step first needs a length: with a full graph after its launch.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ascend_platform.attention import length_bounds
from ascend_platform.runners.v1.kernels import drafter

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner
else:
    Runner = object  # A mixin: the runner class that uses it names vLLM's base class.


class DraftLengthsMixin(Runner):
    """Mixin for vLLM's GPUModelRunner that subtracts rejected draft tokens from attention's host
    sequence lengths."""

    _valid_counts: list[int] | None = None
    """Valid sampled tokens of each request of the last step, once the host knows them."""
    _num_counts = 0
    _rejected_before: length_bounds.Rejected | None = None
    """The last step's rejected draft tokens of this step's requests."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM has these with asynchronous scheduling
        if self.num_spec_tokens and self.valid_sampled_token_count_event is None:
            self.valid_sampled_token_count_event = torch.npu.Event()
            self.valid_sampled_token_count_copy_stream = torch.npu.Stream()
            self.valid_sampled_token_count_cpu = torch.empty(
                self.max_num_reqs, dtype=torch.int32, pin_memory=True
            )

    def _build_attention_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_dummy = kwargs.get("num_scheduled_tokens") is None
        self._rejected_before = None if is_dummy else self._rejected_in_last_step()
        with length_bounds.subtract_rejected(self._rejected_before):
            return super()._build_attention_metadata(*args, **kwargs)

    def _rejected_in_last_step(self: Any) -> length_bounds.Rejected | None:
        if not self.use_async_spec_decode or not self.input_batch.prev_req_id_to_index:
            return None
        # Rows of the requests in the last step; -1 for new ones.
        rows = self.prev_positions.np[: self.input_batch.num_reqs].copy()
        drafts = np.where(rows < 0, 0, self.prev_num_draft_tokens.np[rows])
        return length_bounds.Rejected(self._count_rejected(drafts, rows)) if drafts.any() else None

    def _count_rejected(self: Any, drafts: np.ndarray, rows: np.ndarray) -> Callable[[], list[int]]:
        """A function that waits for the counts of sampled tokens, and returns how many draft tokens
        were rejected.

        Args:
            drafts: number of draft tokens of each request.
            rows: row of each request in the counts.
        """

        @functools.cache
        def rejected() -> list[int]:
            counts = np.array(self._get_valid_sampled_token_count())
            return np.where(drafts > 0, drafts + 1 - counts[rows], 0).tolist()

        return rejected

    def propose_draft_token_ids(
        self: Any,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        *args: Any,
    ) -> Any:
        rejected = None
        if spec_decode_metadata is not None and isinstance(sampled_token_ids, torch.Tensor):
            drafts = np.array(spec_decode_metadata.num_draft_tokens)
            rejected = length_bounds.Rejected(
                self._count_rejected(drafts, np.arange(len(drafts))), drafts.tolist()
            )
        reset = drafter.rejected_in_step.set(rejected)
        try:
            with length_bounds.subtract_rejected(self._rejected_before):
                return super().propose_draft_token_ids(
                    scheduler_output,
                    sampled_token_ids,
                    sampling_metadata,
                    hidden_states,
                    sample_hidden_states,
                    aux_hidden_states,
                    spec_decode_metadata,
                    *args,
                )
        finally:
            drafter.rejected_in_step.reset(reset)

    def _copy_valid_sampled_token_count(
        self: Any, next_token_ids: torch.Tensor, valid_sampled_tokens_count: torch.Tensor
    ) -> None:
        self._valid_counts, self._num_counts = None, len(valid_sampled_tokens_count)
        super()._copy_valid_sampled_token_count(next_token_ids, valid_sampled_tokens_count)
        if not self.use_async_scheduling:
            # The next step's input has these tokens on the host.
            self.input_batch.prev_sampled_token_ids = None

    def _get_valid_sampled_token_count(self: Any) -> list[int]:
        if self._valid_counts is None:
            self.valid_sampled_token_count_event.synchronize()
            self._valid_counts = self.valid_sampled_token_count_cpu[: self._num_counts].tolist()
        return self._valid_counts
