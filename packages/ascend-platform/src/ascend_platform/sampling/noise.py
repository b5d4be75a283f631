# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Exponential noise of both model runners, by which tokens are sampled.

The noise of a request with a seed depends on its seed, the position and the token only, by vLLM's
murmur3 hash (``vllm/v1/worker/gpu/sample/gumbel.py``). So the request gets the same tokens in any
batch, with a prompt in one step or in chunks, with prefix caching, after a preemption, with and
without draft tokens, and from both model runners. vLLM's V1 model runner draws from a generator for
each request instead, whose state depends on how often it has drawn; a draw advances it by 4 on
CUDA, which vLLM takes back for an unfinished prompt, and by 12 on NPUs.
"""

import functools

import torch
import torch_npu

from ascend_platform.chips import chip

_NUMBERS_AT_ONCE = 1 << 23
"""Noise that :func:`sample` computes at a time, which bounds its memory."""


def unseeded(logits: torch.Tensor, use_fp64: bool) -> torch.Tensor:
    """Exponential noise of the shape of `logits`, float32 or float64, from the device's generator,
    in one operator on chips that support it."""
    drawn = torch.empty_like(logits, dtype=torch.float64 if use_fp64 else torch.float32)
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
    return of_hashes(hash_seeds(seeds, steps), positions, vocab_size)


def hash_seeds(seeds: torch.Tensor, steps: torch.Tensor | None = None) -> torch.Tensor:
    """Hashes of seeds int64 ``[rows]``, int32 ``[rows]``, on any device; see :func:`exponential`."""
    low, high = seeds.contiguous().view(torch.int32).view(-1, 2).unbind(1)
    if steps is not None:
        high = high ^ steps.to(torch.int32)
    return _mix(_mix(torch.zeros_like(low), low), high)


def of_hashes(hashes: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exponential noise, float32 ``[rows, vocab_size]``, of hashed seeds int32 ``[rows]``."""
    h = _mix(hashes, positions.to(torch.int32))
    h = _mixed(h[:, None], _token_keys(vocab_size, hashes.device))
    h = _finish(h ^ 16)
    high, low = _shift(h, 16), h & 0xFFFF
    uniform = high.float() * 2**-16 + (low.float() + 0.5) * 2**-32
    return torch.log1p(uniform.neg_()).neg_()


def sample(logits: torch.Tensor, hashes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Sample the token of each row by the noise of its seed and position, int64 ``[rows]``.

    Args:
        logits: ``[rows, vocab_size]``, with all sampling parameters applied.
        hashes: of seeds, int32 ``[rows]``.
        positions: of the rows' input tokens, ``[rows]``.
    """
    rows = max(1, _NUMBERS_AT_ONCE // logits.shape[1])
    parts = zip(*(each.split(rows) for each in (logits, hashes, positions)), strict=True)
    tokens = [
        (part - of_hashes(each, position, logits.shape[1]).log_()).argmax(-1)
        for part, each, position in parts
    ]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


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
