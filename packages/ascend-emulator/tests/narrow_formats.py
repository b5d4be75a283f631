# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Formats of eight and four bits in float64, written from their standards without the emulator's
arithmetic: tables of values, roundings by search in them, and groups with a shared exponent."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# torch_npu's numbers of the dtypes that PyTorch does not have.
HIF8, E8M0, E2M1, E1M2 = 290, 293, 296, 297
GROUP = 32


def _bits(*fields: str) -> int:
    return int("".join(fields), 2)


def hif8() -> dict[int, float]:
    """HiF8's code to value, by the table of dot fields in arXiv 2409.16626."""
    values = {0: 0.0}
    for power in range(1, 8):  # The denormal numbers are powers of two.
        values[_bits("0", "0000", f"{power:03b}")] = 2.0 ** (power - 23)
    for mantissa in range(8):
        values[_bits("0", "0001", f"{mantissa:03b}")] = 1 + mantissa / 8
    for dot, width, count in (("001", 1, 8), ("01", 2, 8), ("10", 3, 4), ("11", 4, 2)):
        for exponent in range(2 ** (width - 1), 2**width):
            # Sign and magnitude. The first bit of the magnitude is hidden.
            rest = f"{exponent:b}"[1:]
            for sign, direction in (("0", 1), ("1", -1)):
                for mantissa in range(count):
                    low = f"{mantissa:0{count.bit_length() - 1}b}"
                    value = 2.0 ** (direction * exponent) * (1 + mantissa / count)
                    values[_bits("0", dot, sign, rest, low)] = value
    values |= {code + 128: -value for code, value in values.items() if code}
    return values | {0x80: float("nan"), 0x6F: float("inf"), 0xEF: float("-inf")}


def table(name: str) -> dict[int, float]:
    """Code to value of ``e4m3``, ``e5m2``, ``e8m0``, ``e2m1``, ``e1m2`` or ``hif8``."""
    codes = torch.arange(256, dtype=torch.uint8)
    kinds = {
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "e8m0": torch.float8_e8m0fnu,
    }
    if name in kinds:
        return dict(enumerate(codes.view(kinds[name]).to(torch.float64).tolist()))
    if name == "hif8":
        return hif8()
    # The Microscaling specification's table of e2m1; e1m2 has steps of a quarter.
    steps = [0.0, 0.5, 1, 1.5, 2, 3, 4, 6] if name == "e2m1" else [i / 4 for i in range(8)]
    return dict(enumerate([*steps, *(-step for step in steps)]))


def magnitudes(name: str) -> torch.Tensor:
    """The finite values that are not negative, ascending, in float64."""
    values = torch.tensor([*table(name).values()], dtype=torch.float64)
    return values[values.isfinite() & (values >= 0)].unique()


def rounded(values: torch.Tensor, name: str, mode: str = "rint") -> torch.Tensor:
    """The values in a format, saturated, in float64. ``mode``: rint, floor, round; HiF8 is rounded
    half away from zero."""
    steps, wide = magnitudes(name), values.to(torch.float64).contiguous()
    size = wide.abs().clamp(max=float(steps[-1]))
    high = torch.searchsorted(steps, size).clamp(max=len(steps) - 1)
    low = (high - (steps[high] != size).long()).clamp(min=0)
    below, above = size - steps[low], steps[high] - size
    up = above < below
    if mode == "round" or name == "hif8":
        up |= above == below
    elif mode == "floor":
        up = (wide < 0) & (low != high)
    else:
        up |= (above == below) & (low % 2 == 1)
    return torch.copysign(torch.where(up, steps[high], steps[low]), wide)


def exponent(values: torch.Tensor, name: str, rule: int, bound: float = 0.0) -> torch.Tensor:
    """The shared exponent of groups with these largest magnitudes, none of them zero."""
    largest = float(magnitudes(name)[-1])
    if rule == 0:  # It is that of the magnitude less that of the largest value.
        power = torch.frexp(values.double())[1] - 1
        return power - (torch.frexp(torch.tensor(largest, dtype=torch.float64))[1] - 1)
    quotient = (values.float() / torch.tensor(bound or largest, dtype=torch.float32)).double()
    fraction, power = torch.frexp(quotient)
    return torch.where(fraction == 0.5, power - 1, power)  # the next power of two


def groups(values: torch.Tensor, size: int = GROUP) -> torch.Tensor:
    """``[..., n]`` as ``[..., groups, size]``, with zeros behind an odd number of values."""
    missing = -values.shape[-1] % size
    return torch.nn.functional.pad(values, (0, missing)).unflatten(-1, (-1, size))


def quantized(
    values: torch.Tensor,
    name: str,
    rule: int,
    mode: str = "rint",
    size: int = GROUP,
    bound: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in a format, ``[..., n]``, and codes of the shared exponents, ``[..., groups]``."""
    parts = groups(values.double(), size)
    largest = parts.abs().amax(-1)
    power = exponent(largest.where(largest > 0, 1.0), name, rule, bound).clamp(-127, 127)
    power = power.where(largest > 0, -127)
    out = rounded(parts / 2.0 ** power[..., None].double(), name, mode)
    return out.flatten(-2)[..., : values.shape[-1]], (power + 127).to(torch.uint8)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Two codes of four bits for each byte, the lower half first."""
    codes = codes.cpu().view(torch.uint8)
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """The reverse of `unpacked`."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8)


def values_of(codes: torch.Tensor, name: str) -> torch.Tensor:
    """Codes as values in float64; of four bits two for each byte."""
    codes = unpacked(codes) if name in ("e2m1", "e1m2") else codes.cpu().view(torch.uint8)
    known = table(name)
    return torch.tensor([known[code] for code in range(len(known))]).double()[codes.long()]


def in_groups(pairs: torch.Tensor, axis: int) -> torch.Tensor:
    """Codes of shared exponents with the groups last, from the pairs ``[..., groups / 2, ..., 2]``
    of a tensor that was quantized along an axis."""
    pairs = pairs.cpu()
    return pairs.movedim(axis if axis >= 0 else axis - 1, -2).flatten(-2)


def cases() -> Iterator[tuple[str, int]]:
    """Formats and the rules of shared exponents that an NPU has for them."""
    yield from (("e4m3", 0), ("e4m3", 1), ("e5m2", 0), ("e5m2", 1))
    yield from (("e2m1", 0), ("e2m1", 2), ("e1m2", 0))
