# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Gumbel noise of the V2 runner, and sampling by it: vLLM's Triton kernels
(``gpu/sample/gumbel.py``) in PyTorch.

The noise depends on a seed, a position and a token only, by vLLM's murmur3 hash.

A request with a seed draws the same tokens in any batch, and those that vLLM draws on CUDA where
the logits are the same.
"""

import functools

import torch
import torch_npu

from ascend_platform.chips import chip

DRAFT_SALT = 1 << 30
"""Added to the positions of a drafter, whose noise differs from that of the target model."""


ACCEPT_SALT = 1 << 29
"""Added to the positions at which draft tokens are accepted or not, for numbers other than those
that sample the next token."""


def unseeded(logits: torch.Tensor, use_fp64: bool) -> torch.Tensor:
    """Exponential noise of the shape of `logits` from the device's generator, in one operator where
    the chip has it."""
    drawn = torch.empty_like(logits)
    is_fused = chip().family.top_k_top_p and not use_fp64
    return torch_npu.npu_sim_exponential_(drawn) if is_fused else drawn.exponential_()


def exponential(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab_size: int,
    steps: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exponential noise, float32 ``[rows, vocab_size]``; seeds and positions are int64 ``[rows]``.

    Draft steps ``[rows]`` change the upper halves of the seeds.
    """
    low, high = seeds.contiguous().view(torch.int32).view(-1, 2).unbind(1)
    if steps is not None:
        high = high ^ steps.to(torch.int32)
    h = _mix(torch.zeros_like(low), low)
    h = _mix(h, high)
    h = _mix(h, positions.to(torch.int32))
    h = _mixed(h[:, None], _token_keys(vocab_size, seeds.device))
    h = _finish(h ^ 16)
    high, low = _shift(h, 16), h & 0xFFFF
    uniform = high.float() * 2**-16 + (low.float() + 0.5) * 2**-32
    return torch.log1p(uniform.neg_()).neg_()


def _signed(constant: int) -> int:
    """An unsigned 32-bit constant as int32, in which the hash's multiplications wrap."""
    return constant - (1 << 32) if constant >> 31 else constant


def _shift(h: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int32 to the right by at least 8 bits.

    The AI CPU computes shifts. Without its lowest 8 bits the number is exact in float32, in which
    it is divided.
    """
    quotient = (h & -(1 << bits)).float().mul_(2.0**-bits).to(torch.int32)
    return quotient.bitwise_and_((1 << (32 - bits)) - 1)


def _rotate(h: torch.Tensor, bits: int) -> torch.Tensor:
    return (h * (1 << bits)).add_(_shift(h, 32 - bits))


def _key(value: torch.Tensor) -> torch.Tensor:
    return _rotate(value * _signed(0xCC9E2D51), 15) * 0x1B873593


def _mixed(h: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return _rotate(h ^ key, 13) * 5 + _signed(0xE6546B64)


def _mix(h: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return _mixed(h, _key(value))


def _finish(h: torch.Tensor) -> torch.Tensor:
    h = (h ^ _shift(h, 16)) * _signed(0x85EBCA6B)
    h = (h ^ _shift(h, 13)) * _signed(0xC2B2AE35)
    return h ^ _shift(h, 16)


@functools.lru_cache(maxsize=4)
def _token_keys(vocab_size: int, device: torch.device) -> torch.Tensor:
    return _key(torch.arange(vocab_size, dtype=torch.int32, device=device))


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
    drawn = exponential(seeds, places, logits.shape[1], steps).log_().neg_()
    return (logits + torch.where(temperatures == 0, 0, drawn)).argmax(-1)


def apply_temperature(
    logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor
) -> None:
    """Divide logits ``[rows, vocab_size]`` by the temperature, in place; temperature 0 means
    greedy."""
    by_row = temperature.index_select(0, expanded_idx_mapping)
    logits.div_(torch.where(by_row == 0, 1, by_row)[:, None])
