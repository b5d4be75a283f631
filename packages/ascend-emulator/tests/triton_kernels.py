# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Kernels for test_triton.py, which runs where ascend-emulator[triton] is installed."""

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def add_without_mask(x, y, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at) + tl.load(y + at)
    tl.store(out + at, total)


@triton.jit
def activate(x, out, n, scale, GATED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    result = value * tl.sigmoid(value) if GATED else tl.maximum(tl.exp(value) - 1.0, value)
    tl.store(out + at, (result * scale).to(out.dtype.element_ty), mask=at < n)


@triton.jit
def reduce_rows(x, total, largest, where, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + at, mask=at < columns, other=float("-inf")).to(tl.float32)
    tl.store(largest + row, tl.max(value, 0))
    tl.store(where + row, tl.argmax(value, 0))
    tl.store(total + row, tl.sum(tl.where(at < columns, value, 0.0), 0))


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=float("-inf")).to(tl.float32)
    power = tl.exp(value - tl.max(value, 0))
    tl.store(out + row * columns + at, power / tl.sum(power, 0), mask=inside)


@triton.jit
def matmul(a, b, out, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + inner
        left_inside = (rows[:, None] < M) & (k[None, :] < K)
        right_inside = (k[:, None] < K) & (columns[None, :] < N)
        left = tl.load(a + rows[:, None] * K + k[None, :], mask=left_inside, other=0.0)
        right = tl.load(b + k[:, None] * N + columns[None, :], mask=right_inside, other=0.0)
        total += tl.dot(left, right)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    place = out + rows[:, None] * N + columns[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gather(index, x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    chosen = tl.load(index + at, mask=inside, other=0)
    tl.store(out + at, tl.load(x + chosen, mask=inside), mask=inside)


@triton.jit
def count(x, out, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0)
    tl.atomic_add(out + value % BINS, value, mask=at < n)
    tl.atomic_add(out + BINS, tl.sum(value, 0))


@triton.jit
def powers(x, out, times, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=1.0)
    result = value
    for _ in range(1, times):
        result = result * value
    tl.store(out + at, result, mask=at < n)


@triton.jit
def transpose(x, out, rows, columns, BR: tl.constexpr, BC: tl.constexpr):
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    value = tl.load(x + r[:, None] * columns + c[None, :], mask=inside)
    transposed_inside = (c[:, None] < columns) & (r[None, :] < rows)
    tl.store(out + c[:, None] * rows + r[None, :], tl.trans(value), mask=transposed_inside)


@triton.jit
def copy_by_address(addresses, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    source = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    value = tl.load(source + at, mask=at < n)
    tl.store(out + tl.program_id(0) * n + at, value, mask=at < n)


@triton.jit
def last_writer(out):
    tl.store(out, tl.program_id(0))


def configuration(**options):
    return triton.Config(options)


tuned_add = triton.autotune(configs=[configuration(BLOCK=64), configuration(BLOCK=256)], key=["n"])(
    add
)
chosen_add = triton.heuristics({"BLOCK": lambda given: triton.next_power_of_2(given["n"])})(add)
