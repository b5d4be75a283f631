# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Samplers of the V2 runner, on the fused operators.

Nothing here synchronizes with the device. ``rows`` are rows of logits, several for a request with
draft tokens; ``expanded_idx_mapping`` has the request's index for each.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from vllm.v1.watermarking.gpu_sampler import GPUWatermarkSampler
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from ascend_platform.sampling import local_argmax, noise, topk_topp

NUM_PROCESSORS = 3
"""vLLM's own logits processors: biases, penalties and bad words; a user's follow."""


class NPUSampler(Sampler):
    """Sampler that draws with npu_top_k_top_p_sample, and only where a request of the step is not
    greedy."""

    _has_new_requests = True

    @functools.cached_property
    def seeds_set(self) -> UvaBackedTensor:
        """Whether each request has a seed of its own, bool ``[states]``."""
        return UvaBackedTensor(len(self.needs_logits_processing), dtype=torch.bool)

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        super().add_request(req_idx, sampling_params)
        self.seeds_set.np[req_idx] = sampling_params.seed is not None
        self._has_new_requests = True

    def apply_staged_writes(self) -> None:
        """Apply staged writes only if ``add_request`` or a custom logits processor staged any."""
        if self._has_new_requests or len(self.logits_processors) > NUM_PROCESSORS:
            super().apply_staged_writes()
            self.seeds_set.copy_to_uva()
            self._has_new_requests = False

    def reads_positions(self, rows: np.ndarray) -> bool:
        """Whether these requests' sampling reads the positions and tokens of logits: logits
        processors and seeds."""
        has_processors = bool(self.needs_logits_processing[rows].any())
        return has_processors or self.sampling_states.any_explicit_seed(rows)

    def reads_lengths(self, rows: np.ndarray) -> bool:
        """Whether these requests' sampling reads how many tokens are known: bad words, thinking
        budgets, or a user's logits processor."""
        thinking = self.thinking_budget_state
        return (
            len(self.logits_processors) > NUM_PROCESSORS
            or bool(self._num_bad_words[rows].any())
            or (thinking.enabled and bool(thinking.use_thinking_budget[rows].any()))
        )

    def reads_argmax(self, rows: np.ndarray) -> bool:
        """Whether these requests' sampling reads no logits but the best."""
        return (
            bool((self.sampling_states.temperature.np[rows] == 0).all())
            and not self.needs_logits_processing[rows].any()
            and self.get_logprobs_dims(rows) is None
            and not self._needs_processed_logits
        )

    @property
    def _needs_processed_logits(self) -> bool:
        return self.logprobs_mode.startswith("processed") or self.return_sampling_mask

    @functools.cached_property
    def _num_bad_words(self) -> np.ndarray:
        states = (each for each in self.logits_processors if isinstance(each, BadWordsState))
        return next(states).num_bad_words.np

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Like the base method, but gather each logit's position and token only if they are
        read."""
        indices, rows = input_batch.logits_indices, input_batch.idx_mapping_np
        if isinstance(indices, torch.Tensor) and not self.reads_positions(rows):
            none: Any = slice(0, 0)
            input_batch = dataclasses.replace(input_batch, logits_indices=none)
        return super().__call__(logits, input_batch)

    def apply_sampling_params(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        *arguments: Any,
        skip_top_k_top_p: bool = False,
    ) -> torch.Tensor:
        """Like the base method, but mask with the operator, as :meth:`_sample_random` does: the
        mask of a request does not depend on whether the step has draft tokens."""
        mappings = expanded_idx_mapping, idx_mapping, idx_mapping_np
        logits = super().apply_sampling_params(  # type: ignore[misc]
            logits, *mappings, *arguments, skip_top_k_top_p=True
        )
        if skip_top_k_top_p or not self.needs_logits_processing[idx_mapping_np].any():
            return logits
        states = self.sampling_states
        rows = expanded_idx_mapping, idx_mapping_np, logits.shape[1]
        k, p, *_ = states.get_top_k_top_p(*rows)  # type: ignore[call-arg]
        return topk_topp.mask(logits, k, p, states.top_k.np[idx_mapping_np])

    def _sample_random(
        self,
        processed_logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        *_: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one token for each row, int64 ``[rows]``."""
        states = self.sampling_states
        needs_logits = self._needs_processed_logits
        is_greedy = states.temperature.np[idx_mapping_np] == 0
        if is_greedy.all() and not needs_logits:
            return local_argmax.argmax(processed_logits), processed_logits
        logits = processed_logits.double() if self.use_fp64_gumbel else processed_logits.float()
        drawn = self._noise(logits, expanded_idx_mapping, idx_mapping_np, pos)
        if is_greedy.any():
            temperatures = states.temperature.gpu.index_select(0, expanded_idx_mapping)
            drawn.masked_fill_((temperatures == 0)[:, None], 1)
        has_seeds = states.any_explicit_seed(idx_mapping_np)
        top_k_np = states.top_k.np[idx_mapping_np]
        tokens, masked = topk_topp.sample(
            logits, top_k, top_p, drawn, top_k_np, has_seeds, needs_logits
        )
        return tokens, logits if masked is None else masked

    def _noise(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
    ) -> torch.Tensor:
        states = self.sampling_states
        if states.any_explicit_seed(idx_mapping_np):
            seeds = states.seeds.gpu.index_select(0, expanded_idx_mapping)
            return noise.exponential(seeds, pos, logits.shape[1]).to(logits.dtype)
        return noise.unseeded(logits, self.use_fp64_gumbel)


class NPUWatermarkSampler(GPUWatermarkSampler, NPUSampler):  # type: ignore[misc]  # of vLLM 0.33
    """GPUWatermarkSampler that, where no request of a step is watermarked, samples as
    NPUSampler."""

    def reads_positions(self, rows: np.ndarray) -> bool:
        return self._marks(rows) or super().reads_positions(rows)

    def reads_lengths(self, rows: np.ndarray) -> bool:
        return self._marks(rows) or super().reads_lengths(rows)

    def _marks(self, rows: np.ndarray) -> bool:
        samples = self.sampling_states.temperature.np[rows] != 0
        return bool((self.watermarking.np[rows] & samples).any())
