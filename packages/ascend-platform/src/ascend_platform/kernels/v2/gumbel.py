# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Random numbers of the V2 runner that depend only on a seed, a position and a token: vLLM's
murmur3 hash, in PyTorch.

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


def exponential(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exponential noise, float32 ``[rows, vocab_size]``; seeds and positions are int64
    ``[rows]``."""
    h = _mix(torch.zeros_like(seeds, dtype=torch.int32), seeds.to(torch.int32))
    h = _mix(h, (seeds >> 32).to(torch.int32))
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
    """Logical shift to the right of int32."""
    return torch.bitwise_right_shift(h, bits) & ((1 << (32 - bits)) - 1)


def _rotate(h: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.bitwise_left_shift(h, bits) | _shift(h, 32 - bits)


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
