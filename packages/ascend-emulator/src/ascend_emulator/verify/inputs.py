# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Seeded inputs of the cases: the same bits on every machine and with every version of torch.

A specification is ``DTYPE SHAPE VALUES``, such as ``bfloat16 64x129 -3..3``:

- shape: sizes separated by ``x``; ``scalar`` has no dimensions;
- values: ``LOW..HIGH`` (uniform, integers inclusive), ``normal`` (sum of four uniform numbers,
  variance 1), ``permutation``, ``distinct`` (a permutation of equidistant numbers in [-1, 1)),
  ``count`` (0, 1, 2 …), ``special`` (zeros, infinities, NaN), or a list ``=1,-0.0,inf``.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

from ascend_emulator.verify.lazy import torch

# splitmix64's constants
GOLDEN, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
SPECIAL = "0,-0.0,1,-1,0.5,-0.5,2.5,-2.5,inf,-inf,nan,100,-100,1000,-1000,1e-30"
WHOLE = "0,1,-1,2,-2,3,7,-7,100,-100,127,-128"


def _bits(count: int, seed: int) -> Any:
    """``count`` pseudo-random integers of 24 bits: splitmix64, in int64 with wrap-around."""

    def shifted(x: Any, bits: int) -> Any:
        return (x >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift

    x = (torch.arange(count, dtype=torch.int64) + 1 + seed * 1_000_003) * GOLDEN
    x = (x ^ shifted(x, 30)) * FIRST
    x = (x ^ shifted(x, 27)) * SECOND
    return shifted(x ^ shifted(x, 31), 40)


def _uniform(count: int, seed: int) -> Any:
    return _bits(count, seed).double() / (1 << 24)


def _values(text: str, count: int, seed: int, whole: bool) -> Any:
    if text == "special":
        text = "=" + (WHOLE if whole else SPECIAL)
    if text.startswith("="):
        listed = torch.tensor([float(each) for each in text[1:].split(",")], dtype=torch.float64)
        return listed.repeat(-(-count // len(listed)))[:count]
    if text == "count":
        return torch.arange(count, dtype=torch.float64)
    if text in ("permutation", "distinct"):
        order = torch.argsort(_bits(count, seed), stable=True).double()
        return order if text == "permutation" else order / max(1, count) * 2 - 1
    if text == "normal":
        return sum(_uniform(count, 4 * seed + each) * 2 - 1 for each in range(4)) * 0.875
    low, _, high = text.partition("..")
    if not high:
        raise ValueError(f"unknown values {text!r}")
    if whole:
        return (_bits(count, seed) % (int(high) - int(low) + 1) + int(low)).double()
    return _uniform(count, seed) * (float(high) - float(low)) + float(low)


def seed_of(name: str) -> int:
    """The seed of a case's input, from their names."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % (1 << 20)


def make(specification: str, seed: int) -> Any:
    """The input tensor of a specification, on the CPU."""
    kind, shape, values = specification.split(" ", 2)
    dtype = getattr(torch, kind)
    sizes = [] if shape == "scalar" else [int(size) for size in shape.split("x")]
    count = math.prod(sizes)
    if dtype == torch.bool:
        return (_bits(count, seed) % 2 == 1).view(sizes)
    if dtype.is_complex:
        parts = [
            _values(values, count, 2 * seed + each, False).to(torch.float32) for each in range(2)
        ]
        return torch.complex(*parts).to(dtype).view(sizes)
    whole = not dtype.is_floating_point
    return _values(values, count, seed, whole).to(dtype).view(sizes)


def digest(tensor: Any) -> str:
    """A hash of a CPU tensor's values: the same for all NaN."""
    data = tensor.detach().cpu().contiguous()
    if data.is_floating_point() and data.element_size() > 1:
        data = torch.where(data.isnan(), torch.full_like(data, float("nan")), data)
    content = data.flatten().view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return hashlib.sha256(content).hexdigest()[:16]
