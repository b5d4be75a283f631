# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sampling and log-probabilities of the V2 runner: vLLM's Triton kernels (``gpu/sample/``) in
PyTorch, and the fused operators.

Nothing here synchronizes with the device. ``rows`` are rows of logits, of which a request with
draft tokens has several; ``expanded_idx_mapping`` has the request's index for each.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from ascend_platform.chips import chip
from ascend_platform.kernels.v2 import gumbel as noise
from ascend_platform.sampling.topk_topp import MAX_TOP_K, top_k_top_p_sample
from ascend_platform.vllm_overrides import add, override

NUM_PROCESSORS = 3
"""vLLM's own logits processors: biases, penalties and bad words; a user's follow."""


class NPUSampler(Sampler):
    """Sampler that draws with npu_top_k_top_p_sample, and only where a request of the step is not
    greedy."""

    _has_new_requests = True

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        super().add_request(req_idx, sampling_params)
        self._has_new_requests = True

    def apply_staged_writes(self) -> None:
        """Apply staged writes only if ``add_request`` or a custom logits processor staged any."""
        if self._has_new_requests or len(self.logits_processors) > NUM_PROCESSORS:
            super().apply_staged_writes()
            self._has_new_requests = False

    def reads_positions(self, rows: np.ndarray) -> bool:
        """Whether these requests' sampling reads the positions and tokens of logits: logits
        processors and seeds."""
        return bool(
            self.needs_logits_processing[rows].any()
        ) or self.sampling_states.any_explicit_seed(rows)

    def reads_lengths(self, rows: np.ndarray) -> bool:
        """Whether a logits processor of these requests reads how many tokens are known: bad words,
        or a user's own."""
        return len(self.logits_processors) > NUM_PROCESSORS or bool(self._num_bad_words[rows].any())

    @functools.cached_property
    def _num_bad_words(self) -> np.ndarray:
        return next(
            each.num_bad_words.np
            for each in self.logits_processors
            if isinstance(each, BadWordsState)
        )

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Like the base method, but gather each logit's position and token only if they are
        read."""
        indices = input_batch.logits_indices
        if isinstance(indices, torch.Tensor) and not self.reads_positions(
            input_batch.idx_mapping_np
        ):
            none: Any = slice(0, 0)
            input_batch = dataclasses.replace(input_batch, logits_indices=none)
        return super().__call__(logits, input_batch)

    def _sample_random(
        self,
        processed_logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        has_topp_only_rows: bool,
        use_fused_sampler: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one token for each row, int64 ``[rows]``."""
        states = self.sampling_states
        needs_logits = self.logprobs_mode.startswith("processed") or self.return_sampling_mask
        is_greedy = states.temperature.np[idx_mapping_np] == 0
        if is_greedy.all() and not needs_logits:
            return processed_logits.argmax(-1), processed_logits
        logits = processed_logits.double() if self.use_fp64_gumbel else processed_logits.float()
        drawn = self._noise(logits, expanded_idx_mapping, idx_mapping_np, pos)
        if is_greedy.any():
            drawn.masked_fill_(
                (states.temperature.gpu.index_select(0, expanded_idx_mapping) == 0)[:, None], 1
            )
        top_k_np = states.top_k.np[idx_mapping_np]
        is_fused = chip().family.top_k_top_p and not self.use_fp64_gumbel
        if is_fused and not ((top_k_np > MAX_TOP_K) & (top_k_np < states.vocab_size)).any():
            tokens, processed = top_k_top_p_sample(
                logits, top_k, top_p, q=drawn, is_need_logits=needs_logits
            )
            return tokens, processed if needs_logits else logits
        logits = apply_top_k_top_p(logits, top_k, top_p, has_topp_only_rows=has_topp_only_rows)  # type: ignore[call-arg]
        return (logits - drawn.log_()).argmax(-1), logits

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


def gumbel_sample(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    apply_temperature: bool,
    is_drafting: bool,
    logits_cache: torch.Tensor | None = None,
    logits_cache_col: torch.Tensor | None = None,
    use_fp64: bool = False,
    logits_cache_source: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one token for each row, int64 ``[rows]``; the sampler itself does not call this,
    drafters do.

    With ``logits_cache`` ``[requests, steps, vocab_size]`` the logits are kept for the rejection
    sampler. Rows with a negative index are padding.
    """
    valid = expanded_idx_mapping >= 0
    rows = expanded_idx_mapping.clamp(min=0).long()
    temperatures = torch.where(valid, temperature.index_select(0, rows), 0)[:, None]
    seeds, positions = seed.index_select(0, rows), pos.long()
    if logits_cache is not None:
        assert logits_cache_col is not None
        source = logits if logits_cache_source is None else logits_cache_source
        steps = logits_cache_col.expand(len(rows)).long()
        cached = logits_cache.view(-1, logits_cache.shape[-1])
        places_in_cache = torch.add(steps, rows, alpha=logits_cache.shape[1])
        kept = torch.where(
            valid[:, None], source, cached.index_select(0, places_in_cache)[:, : source.shape[1]]
        )
        cached[:, : source.shape[1]].index_copy_(0, places_in_cache, kept.to(cached.dtype))
        seeds = seeds ^ (steps << 32)
    if is_drafting:
        positions = positions + noise.DRAFT_SALT
    logits = logits.float()
    if apply_temperature:
        logits = logits / torch.where(temperatures == 0, 1, temperatures)
    gumbel = noise.exponential(seeds, positions, logits.shape[1]).log_().neg_()
    return (logits + torch.where(temperatures == 0, 0, gumbel)).argmax(-1)


def apply_temperature(
    logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor
) -> None:
    """Divide logits ``[rows, vocab_size]`` by the temperature, in place; temperature 0 means
    greedy."""
    by_row = temperature.index_select(0, expanded_idx_mapping)
    logits.div_(torch.where(by_row == 0, 1, by_row)[:, None])


def apply_min_p(
    logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, min_p: torch.Tensor
) -> None:
    """Mask tokens that are less probable than min-p times the most probable one, in place."""
    threshold = logits.amax(-1) + min_p.index_select(0, expanded_idx_mapping).log()
    logits.masked_fill_(logits < threshold[:, None], -torch.inf)


def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of these tokens, float32 ``[rows, tokens]``, from logits ``[rows,
    vocab_size]``."""
    logits = logits.float()
    return logits.gather(-1, token_ids.long()).sub_(logits.logsumexp(-1, keepdim=True))


def get_num_nans(logits: torch.Tensor) -> torch.Tensor:
    """How many logits of each row are no numbers, int32 ``[rows]``."""
    return logits.isnan().sum(-1, dtype=torch.int32)


def rank_tokens(
    ranks: torch.Tensor,
    logits: torch.Tensor,
    stride: int,
    token_ids: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Replaces ``_ranks_kernel``: how many logits are not below the token's, int64 ``[rows]``,
    written."""
    chosen = logits.gather(-1, token_ids.long().view(-1, 1))
    torch.sum(logits >= chosen, -1, out=ranks)


def fill_logprob_token_ids(
    token_ids: torch.Tensor,
    token_ids_stride: int,
    valid_mask: torch.Tensor,
    valid_mask_stride: int,
    sampled: torch.Tensor,
    top: torch.Tensor,
    top_stride: int,
    expanded_idx_mapping: torch.Tensor,
    num_requested: torch.Tensor,
    requested: torch.Tensor,
    requested_stride: int,
    NUM_TOPK: int,
    PADDED_COLS: int,
) -> None:
    """Replaces ``_fill_logprob_token_ids_kernel``: the sampled token, then those that the request
    names, or the most probable.

    ``token_ids`` int64 and ``valid_mask`` bool are ``[rows, 1 + columns]``, written.
    """
    width = token_ids.shape[1] - 1
    count = num_requested.index_select(0, expanded_idx_mapping)[:, None]
    columns = torch.arange(width, device=token_ids.device)
    named = requested.index_select(0, expanded_idx_mapping)[:, :width].long()
    others = (
        torch.nn.functional.pad(top[:, :NUM_TOPK].long(), (0, width - NUM_TOPK))
        if NUM_TOPK
        else torch.zeros_like(named)
    )
    valid = columns < torch.where(count > 0, count, NUM_TOPK)
    token_ids[:, 0] = sampled
    token_ids[:, 1:] = torch.where(valid, torch.where(count > 0, named, others), 0)
    valid_mask[:, 0] = True
    valid_mask[:, 1:] = valid


KERNELS: dict[str, Callable[..., Any]] = {
    "vllm.v1.worker.gpu.sample.logprob:_ranks_kernel": rank_tokens,
    "vllm.v1.worker.gpu.sample.logprob:_fill_logprob_token_ids_kernel": fill_logprob_token_ids,
}
"""vLLM's kernels, and the functions that take their arguments."""


def install() -> None:
    from ascend_platform import kernels
    from ascend_platform.kernels.v2 import logits_processors

    override("vllm.v1.worker.gpu.sample.sampler:Sampler", NPUSampler)
    override("vllm.v1.worker.gpu.sample.gumbel:gumbel_sample", gumbel_sample)
    override("vllm.v1.worker.gpu.metrics.logits:get_num_nans", get_num_nans)
    override("vllm.v1.worker.gpu.sample.gumbel:apply_temperature", apply_temperature)
    override("vllm.v1.worker.gpu.sample.min_p:apply_min_p", apply_min_p)
    add(
        "vllm.triton_utils.importing:TritonPlaceholder",
        {"next_power_of_2": staticmethod(next_power_of_2)},
    )
    override("vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs", compute_token_logprobs)
    kernels.register(KERNELS)
    logits_processors.install()
