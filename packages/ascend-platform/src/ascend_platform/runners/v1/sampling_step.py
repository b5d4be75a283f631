# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The logits that the V1 runner samples from in a step, and where they are in their requests.

vLLM hands its samplers logits without positions. The host does not know these with asynchronous
scheduling and draft tokens, whose accepted ones are counted on the device.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


class SamplingStep:
    """A step that is being sampled.

    Attributes:
        drafts: draft tokens and the indices of their logits; None without a drafter.
    """

    def __init__(self, runner: Any, drafts: SpecDecodeMetadata | None) -> None:
        self._runner, self.drafts = runner, drafts

    @functools.cached_property
    def _positions(self) -> torch.Tensor:
        return self._runner.positions.index_select(0, self._runner.logits_indices)

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """Position of the input token of each request's logits, after its draft tokens, int64
        ``[requests]``."""
        if self.drafts is None:
            return self._positions
        return self._positions.index_select(0, self.drafts.bonus_logits_indices)

    @functools.cached_property
    def draft_positions(self) -> torch.Tensor:
        """Position of the input token of each draft token's logits, int64 ``[draft tokens]``."""
        assert self.drafts is not None
        return self._positions.index_select(0, self.drafts.target_logits_indices)

    @property
    def top_k(self) -> np.ndarray:
        """Top-k of each request, vocab_size for requests without."""
        batch = self._runner.input_batch
        return batch.top_k_cpu[: batch.num_reqs]

    @property
    def num_prompt_tokens(self) -> np.ndarray:
        return self._runner.input_batch.num_prompt_tokens


_current: ContextVar[SamplingStep | None] = ContextVar("sampling step", default=None)


def current() -> SamplingStep | None:
    """The step that is being sampled; None where vLLM warms up its samplers."""
    return _current.get()


class SamplingStepMixin:
    """Mixin for GPUModelRunner that lets samplers and logits processors read the step.

    The generators of requests with a seed are not drawn from: ``sampling/noise.py`` computes their
    noise.
    """

    def _prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = super()._prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        self.logits_indices = inputs[0]
        return inputs

    def _sample(self: Any, logits: Any, drafts: SpecDecodeMetadata | None) -> Any:
        token = _current.set(SamplingStep(self, drafts))
        try:
            return super()._sample(logits, drafts)  # type: ignore[misc]
        finally:
            _current.reset(token)

    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Like the base method, but take nothing back from a generator that has drawn nothing: what
        vLLM subtracts from the offset for a discarded token is added before."""
        batch = self.input_batch
        for row in np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0]:
            if (generator := batch.generators.get(int(row))) is not None:
                generator.set_offset(generator.get_offset() + 4)
        return super()._bookkeeping_sync(*args, **kwargs)  # type: ignore[misc]
