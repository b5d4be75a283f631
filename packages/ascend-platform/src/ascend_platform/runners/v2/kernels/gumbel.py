# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sampling by Gumbel noise in the V2 runner: vLLM's Triton kernels (``gpu/sample/gumbel.py``) in
PyTorch.

Without draft tokens a request with a seed gets the tokens that vLLM draws on CUDA where the logits
are the same.
"""

import torch

from ascend_platform.sampling import noise

DRAFT_SALT = 1 << 30
"""Added to the positions of a drafter, whose noise differs from that of the target model."""


ACCEPT_SALT = 1 << 29
"""Added to the positions at which draft tokens are accepted or not, for numbers other than those
that sample the next token."""


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
    seeds, places, steps = seed.index_select(0, rows), pos.long(), None
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
    if is_drafting:
        places = places + DRAFT_SALT
    logits = logits.float()
    if apply_temperature:
        logits = logits / torch.where(temperatures == 0, 1, temperatures)
    drawn = noise.exponential(seeds, places, logits.shape[1], steps).log_().neg_()
    return (logits + torch.where(temperatures == 0, 0, drawn)).argmax(-1)


def apply_temperature(
    logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor
) -> None:
    """Divide logits ``[rows, vocab_size]`` by the temperature, in place; temperature 0 means
    greedy."""
    by_row = temperature.index_select(0, expanded_idx_mapping)
    logits.div_(torch.where(by_row == 0, 1, by_row)[:, None])
