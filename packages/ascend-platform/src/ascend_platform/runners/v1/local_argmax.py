# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Greedy steps of the V1 runner, sampled from each rank's part of the vocabulary."""

from functools import partial
from typing import Any

from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinTokensLogitsProcessor

from ascend_platform.sampling.local_argmax import LocalArgmax


class LocalArgmaxMixin:
    """Mixin for GPUModelRunner that gathers the best token of each rank where sampling reads no
    more."""

    _local_argmax: LocalArgmax | None = None

    def load_model(self: Any, *arguments: Any, **named: Any) -> None:
        super().load_model(*arguments, **named)  # type: ignore[misc]
        if not (self.is_pooling_model or self.broadcast_pp_output):
            self._local_argmax = LocalArgmax.of(self.get_model(), self.vllm_config)
        if self._local_argmax:
            vars(self.sampler).update(greedy_sample=self._local_argmax.argmax)

    def execute_model(self: Any, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        execute = partial(super().execute_model, scheduler_output, *arguments, **named)  # type: ignore[misc]
        if self._local_argmax is None:
            return execute()
        with self._local_argmax.step(lambda: self._reads_argmax(scheduler_output)):
            return execute()

    def _reads_argmax(self: Any, scheduler_output: Any) -> bool:
        """Whether the step's sampling reads no logits but the best."""
        sampling = self.input_batch.sampling_metadata
        thinking = sampling.thinking_budget_state_holder
        return (
            sampling.all_greedy
            and sampling.no_penalties
            and sampling.max_num_logprobs is None
            and sampling.allowed_token_ids_mask is None
            and not sampling.logprob_token_ids
            and not sampling.bad_words_token_ids
            and not (thinking is not None and thinking.has_tracked_requests())
            and not any(map(_changes_logits, sampling.logitsprocs.non_argmax_invariant))
            and not scheduler_output.has_structured_output_requests
            and not scheduler_output.scheduled_spec_decode_tokens
        )


def _changes_logits(processor: Any) -> bool:
    """Whether a request of the step has a logits processor's parameters, as far as is known."""
    if isinstance(processor, LogitBiasLogitsProcessor):
        return bool(processor.biases)
    if isinstance(processor, MinTokensLogitsProcessor):
        return bool(processor.min_toks)
    return True
