# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The V1 runner's sampler and rejection sampler: the fused operators of top-k and top-p, and noise
that depends on a request's seed and position only."""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from ascend_platform.kernels.ragged import request_of_token
from ascend_platform.overrides.guard import override
from ascend_platform.runners.v1 import sampling_step
from ascend_platform.runners.v1.kernels.rejection import write_accepted
from ascend_platform.sampling import noise, topk_topp

Generators = dict[int, torch.Generator]
"""Generators of requests with a seed, by row of the batch."""


class Seeds(NamedTuple):
    """Seeds of a batch's requests, on the NPU.

    Attributes:
        rows: of the requests with a seed, int64 ``[requests with a seed]``.
        hashes: of the seeds, int32 ``[requests]``; undefined for requests without one.
        are_set: bool ``[requests]``.
    """

    rows: torch.Tensor
    hashes: torch.Tensor
    are_set: torch.Tensor


def seeds_of(generators: Generators, count: int, device: torch.device) -> Seeds:
    """Seeds of a batch, copied to the NPU where the batch is another one."""
    by_row = tuple((row, each.initial_seed()) for row, each in sorted(generators.items()))
    return _copied(by_row, count, device)


@functools.lru_cache(maxsize=4)
def _copied(by_row: tuple[tuple[int, int], ...], count: int, device: torch.device) -> Seeds:
    seeds, are_set = np.zeros(count, np.int64), np.zeros(count, bool)
    for row, seed in by_row:
        # A generator returns the seed as an unsigned number.
        seeds[row], are_set[row] = np.uint64(seed % (1 << 64)).astype(np.int64), True
    arrays = np.flatnonzero(are_set), noise.hash_seeds(torch.from_numpy(seeds)).numpy(), are_set
    return Seeds(*(async_tensor_h2d(each, device=device) for each in arrays))


class NPUTopKTopPSampler(torch.nn.Module):
    """TopKTopPSampler on the fused operators, or in PyTorch (``sampling/topk_topp.py``)."""

    def __init__(self, native: TopKTopPSampler) -> None:
        super().__init__()
        self.logprobs_mode = native.logprobs_mode
        self.uses_float64 = getattr(native, "use_fp64_gumbel", False)

    def forward(
        self,
        logits: torch.Tensor,
        generators: Generators,
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample one token per request.

        Args:
            logits: float32 ``[requests, vocab_size]``.
            k: int32 ``[requests]``, vocab_size for requests without top-k.
            p: float32 ``[requests]``, 1 for requests without top-p.

        Returns:
            Token ids int64 ``[requests]``, and the processed logits or log-probabilities if
            ``logprobs_mode`` needs them.
        """
        step = sampling_step.current()
        seeds = None
        if step is not None and generators:
            seeds = seeds_of(generators, len(logits), logits.device)
        tokens, processed = topk_topp.sample(
            logits,
            k,
            p,
            self._noise(logits, seeds, step),
            _top_k(step),
            seeds is not None,
            self.logprobs_mode.startswith("processed"),
        )
        if processed is not None and self.logprobs_mode == "processed_logprobs":
            processed = processed.log_softmax(-1)
        return tokens, processed

    def _noise(
        self, logits: torch.Tensor, seeds: Seeds | None, step: sampling_step.SamplingStep | None
    ) -> torch.Tensor:
        if seeds is None or step is None:
            return noise.unseeded(logits, self.uses_float64)
        count, vocab_size = logits.shape
        dtype = torch.float64 if self.uses_float64 else torch.float32
        if len(seeds.rows) == count:
            return noise.of_hashes(seeds.hashes, step.positions, vocab_size).to(dtype)
        hashes = seeds.hashes.index_select(0, seeds.rows)
        positions = step.positions.index_select(0, seeds.rows)
        seeded = noise.of_hashes(hashes, positions, vocab_size).to(dtype)
        return noise.unseeded(logits, self.uses_float64).index_copy_(0, seeds.rows, seeded)


def _top_k(step: sampling_step.SamplingStep | None) -> np.ndarray:
    return np.empty(0, np.int32) if step is None else step.top_k


_rejection_sample = rejection_sampler.rejection_sample


def mask_logits(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """Replacement of vLLM's ``apply_top_k_top_p`` for the rejection sampler: k and p are
    ``[rows]``."""
    if (step := sampling_step.current()) is None:
        return apply_top_k_top_p(logits, k, p)
    return topk_topp.mask(logits, k, p, step.top_k)


def rejection_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    synthetic_mode: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Like vLLM's function, but a request with a seed gets the tokens that it gets without drafts:
    its draft tokens are accepted while they are what the target samples.

    The probability of that is the target's of the draft token, the same as vLLM's if the drafter
    has no probabilities.
    """

    def sample(metadata: SamplingMetadata) -> torch.Tensor:
        return _rejection_sample(
            draft_token_ids,
            num_draft_tokens,
            max_spec_len,
            cu_num_draft_tokens,
            draft_probs,
            target_logits,
            bonus_token_ids,
            metadata,
            synthetic_mode,
            **options,
        )

    step, generators = sampling_step.current(), sampling_metadata.generators
    if synthetic_mode or not generators or step is None:
        return sample(sampling_metadata)
    output = sample(replace(sampling_metadata, generators={}))
    if not len(draft_token_ids):
        return output
    seeds = seeds_of(generators, len(num_draft_tokens), output.device)
    requests = request_of_token(cu_num_draft_tokens, len(draft_token_ids))
    hashes = seeds.hashes.index_select(0, requests)
    tokens = noise.sample(target_logits, hashes, step.draft_positions)
    output.masked_fill_(seeds.are_set[:, None], rejection_sampler.PLACEHOLDER_TOKEN_ID)
    is_same = tokens == draft_token_ids
    write_accepted(output, cu_num_draft_tokens, tokens, is_same, bonus_token_ids, seeds.are_set)
    return output


def install(runner: Any) -> None:
    """Use the sampler in a model runner's sampler and rejection sampler."""
    runner.sampler.topk_topp_sampler = NPUTopKTopPSampler(runner.sampler.topk_topp_sampler)
    if getattr(runner, "rejection_sampler", None) is None:
        return
    override("vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p", mask_logits)
    override("vllm.v1.sample.rejection_sampler:rejection_sample", rejection_sample)
