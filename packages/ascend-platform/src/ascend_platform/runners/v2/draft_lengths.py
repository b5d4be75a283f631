# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sequence lengths on the host while draft tokens are in flight, as in the V1 runner.

With asynchronous scheduling, the scheduler's numbers of computed tokens count each draft token of
the last step as accepted. The number of rejected ones is copied to the host right after the
rejection sampler, or where a stage of a pipeline receives it from the last one, and the host waits
for it where the request's next step first needs a length.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from ascend_platform.attention import length_bounds


class DraftLengths:
    """Exact numbers of computed tokens on the host, by request state."""

    def __init__(self, max_num_reqs: int) -> None:
        self._computed = np.zeros(max_num_reqs, np.int64)
        self._rejected: Rejections | None = None
        """Of the last step, not yet subtracted."""

    def add(self, request: int, num_computed_tokens: int) -> None:
        """Set the number of a request that is new in this row."""
        self._computed[request] = num_computed_tokens
        if self._rejected is not None:
            self._rejected.is_current[self._rejected.rows == request] = False

    def advance(self, rows: np.ndarray, num_scheduled_tokens: np.ndarray) -> None:
        """Count a step's tokens, as if none was rejected."""
        self._computed[rows] += num_scheduled_tokens

    def reject(self, rejected: Rejections | None) -> None:
        """Subtract the draft tokens of a step that are rejected, once their number is needed."""
        self._settle()
        self._rejected = rejected

    def before(
        self, rows: np.ndarray, num_computed_tokens: np.ndarray
    ) -> length_bounds.Rejected | None:
        """The draft tokens that the scheduler's numbers for the next step's requests count and that
        are rejected."""
        # With a pipeline the scheduler has not seen the outcome of several steps.
        if self._rejected is None and (num_computed_tokens == self._computed[rows]).all():
            return None

        counted, pending = self._computed.copy(), self._rejected

        @functools.cache
        def count() -> list[int]:
            # A drafter may be the first that needs it, when this step's tokens are counted too.
            if pending is not None:
                counted[pending.rows] -= pending.of_current()
            if pending is self._rejected:
                self._settle()
            return (num_computed_tokens - counted[rows]).tolist()

        return length_bounds.Rejected(count)

    def _settle(self) -> None:
        if self._rejected is not None:
            self._computed[self._rejected.rows] -= self._rejected.of_current()
            self._rejected = None


class Rejections:
    """Numbers of a step's rejected draft tokens, on their way to the host."""

    def __init__(self, rows: np.ndarray, num_rejected: torch.Tensor) -> None:
        self.rows, self.is_current = rows, np.ones(len(rows), bool)
        self._on_host = torch.empty_like(num_rejected, device="cpu", pin_memory=True)
        self._on_host.copy_(num_rejected, non_blocking=True)
        self._event = torch.npu.Event()
        self._event.record()

    def of_current(self) -> np.ndarray:
        """The numbers of requests whose rows have no other request yet, of the others 0."""
        return np.where(self.is_current, self.count(), 0)

    @functools.cache  # An object lives for two steps.  # noqa: B019
    def count(self) -> list[int]:
        self._event.synchronize()
        return self._on_host.tolist()


class DraftLengthsMixin:
    """Mixin for vLLM's V2 GPUModelRunner that excludes rejected draft tokens from attention's host
    sequence lengths."""

    _lengths: DraftLengths | None = None
    _before: length_bounds.Rejected | None = None
    _in_step: length_bounds.Rejected | None = None

    def load_model(self: Any, *arguments: Any, **named: Any) -> None:
        super().load_model(*arguments, **named)  # type: ignore[misc]
        if self.num_speculative_steps and self.scheduler_config.async_scheduling:
            self._lengths = DraftLengths(self.max_num_reqs)
        if isinstance(self.speculator, DraftModelSpeculator):
            self._build_draft_metadata = self.speculator._build_attn_metadata
            make_manager = self.speculator.init_cudagraph_manager
            vars(self.speculator).update(
                _build_attn_metadata=self._build_with_lengths,
                # The sequence lengths change with each pass.
                init_cudagraph_manager=lambda mode: make_manager(CUDAGraphMode.NONE),
            )

    def add_requests(self: Any, scheduler_output: Any) -> None:
        super().add_requests(scheduler_output)  # type: ignore[misc]
        if self._lengths is not None:
            rows = self.req_states.req_id_to_index
            for request in scheduler_output.scheduled_new_reqs:
                self._lengths.add(rows[request.req_id], request.num_computed_tokens)

    def prepare_inputs(self: Any, scheduler_output: Any, batch: Any, *arguments: Any) -> Any:
        prepared = super().prepare_inputs(scheduler_output, batch, *arguments)  # type: ignore[misc]
        if self._lengths is not None:
            computed = prepared.num_computed_tokens_np
            self._before = self._lengths.before(prepared.idx_mapping_np, computed)
        return prepared

    def prepare_dummy_attn(self: Any, *arguments: Any, **named: Any) -> Any:
        self._before = None
        return super().prepare_dummy_attn(*arguments, **named)  # type: ignore[misc]

    def sample(self: Any, hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
        sampled = super().sample(hidden_states, batch, grammar_output)  # type: ignore[misc]
        rejected = Rejections(batch.idx_mapping_np, sampled[2]) if batch.num_draft_tokens else None
        if self._lengths is not None:
            self._lengths.reject(rejected)
            self._lengths.advance(batch.idx_mapping_np, batch.num_scheduled_tokens)
        self._in_step = rejected and length_bounds.Rejected(
            rejected.count, batch.num_draft_tokens_per_req.tolist()
        )
        return sampled

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        state = self.execute_model_state
        try:
            with length_bounds.subtract_rejected(self._before):
                output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        finally:
            self._in_step = None
        if state is not None and not self.is_last_pp_rank and self._lengths is not None:
            batch = state.input_batch
            self._lengths.advance(batch.idx_mapping_np, batch.num_scheduled_tokens)
            self._copy_received(self.pp_handler.queue[-1])
        return output

    def _copy_received(self: Any, received: Any) -> None:
        """Copy the numbers of rejected tokens that the last stage sends for this step, without a
        wait for the other work of this stage."""
        if received is not None and received.sampled_tokens.shape[1] > 1:
            with torch.npu.stream(self.pp_handler.broadcast_stream):
                received.rejections = Rejections(received.idx_mapping_np, received.num_rejected)

    def update_pp_decode_requests(self: Any) -> None:
        """Like the base method; also subtract the rejected tokens of the step whose requests may be
        scheduled again, except those of requests that have ended."""
        handler = self.pp_handler
        if self._lengths is not None and handler is not None and handler.queue:
            received = handler.queue[0]
            if rejected := getattr(received, "rejections", None):
                indices = received.idx_mapping_np
                is_same = handler.req_idx_gen_np[indices] == received.gen_at_receive_np
                rejected.is_current = is_same & received.need_sampled_mask
                self._lengths.reject(rejected)
        super().update_pp_decode_requests()  # type: ignore[misc]

    def _build_with_lengths(self: Any, *arguments: Any, step: int, **named: Any) -> Any:
        """Metadata of a drafter's pass; a draft model's first, which still has the rejected tokens,
        has one token more."""
        step_of_host = step + ("slot_mappings" in named)
        with length_bounds.subtract_rejected(self._in_step if step else None):
            return self._build_draft_metadata(*arguments, step=step_of_host, **named)
