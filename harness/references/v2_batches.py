# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Requests of random states for tests of the V2 runner's kernels."""

import random
from typing import Any

import numpy as np
import torch
from ascend_platform.runners.v2.kernels.device_step import DeviceStep
from ascend_platform.runners.v2.kernels.host_step import HostStep

# Maximum number of requests, tokens per request, and vocabulary size.
ROWS, WIDTH, VOCABULARY = 8, 96, 40

STEPS = 3
"""Maximum number of draft tokens."""


def device(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="npu")


class Batch:
    """Requests of random states: in prefill, with and without further chunks, or in decode."""

    def __init__(self, seed: int, decode: bool = False, empty: bool = False) -> None:
        rng = random.Random(seed)
        self.rows = rng.sample(range(ROWS), rng.randint(1, ROWS - 1))
        self.tokens = [[rng.randrange(VOCABULARY) for _ in range(WIDTH)] for _ in range(ROWS)]
        self.prefill_len, self.computed, self.total = ([0] * ROWS for _ in range(3))
        self.lengths = []
        for number, row in enumerate(self.rows):
            self.prefill_len[row] = rng.randint(1, 60)
            generates = decode or (number and rng.random() < 0.5)
            if generates:
                self.total[row] = self.prefill_len[row] + rng.randint(1, 30)
                self.computed[row] = self.total[row] - 1
                self.lengths.append(1)
            else:
                self.total[row] = self.prefill_len[row]
                self.computed[row] = rng.randrange(self.prefill_len[row])
                left = self.prefill_len[row] - self.computed[row]
                self.lengths.append(
                    0 if empty and rng.random() < 0.4 else rng.choice([left, rng.randint(1, left)])
                )
        self.starts = [sum(self.lengths[:number]) for number in range(len(self.rows) + 1)]
        self.num_tokens = self.starts[-1]
        self.last = [rng.randrange(VOCABULARY) for _ in range(ROWS)]
        for row in self.rows:
            if self.total[row] > self.prefill_len[row]:
                self.tokens[row][self.total[row] - 1] = self.last[row]
        self.step, self.step_on_host = self.make_device_step(), self.make_host_step()
        self.seq_lens = [
            self.computed[row] + length for row, length in zip(self.rows, self.lengths, strict=True)
        ]

    def make_device_step(self) -> DeviceStep:
        has_prefill = any(self.computed[row] < self.prefill_len[row] for row in self.rows)
        return DeviceStep(np.array(self.lengths), has_prefill)

    def make_host_step(self) -> HostStep:
        computed, prefill_len = (
            np.array(values)[self.rows] for values in (self.computed, self.prefill_len)
        )
        rows, lengths = np.array(self.rows), np.array(self.lengths)
        buffers = device(self.tokens), device([0] * 2 * ROWS, torch.int64)
        return HostStep(rows, lengths, computed, prefill_len, *buffers)

    def query_start_loc(self, padding: int = 2) -> torch.Tensor:
        return device(self.starts + [self.num_tokens] * padding)


class Drafts(Batch):
    """As Batch; requests in decode have draft tokens, and some in prefill placeholders."""

    def __init__(self, seed: int, decode: bool = False) -> None:
        super().__init__(seed, decode)
        rng = random.Random(seed)
        self.drafts = []
        for number, row in enumerate(self.rows):
            generates = self.computed[row] >= self.prefill_len[row]
            is_padded = (
                not generates and self.lengths[number] == self.prefill_len[row] - self.computed[row]
            )
            self.drafts.append(
                rng.randint(0, STEPS) if generates or (is_padded and rng.random() < 0.5) else 0
            )
            self.lengths[number] += self.drafts[-1]
        self.starts = [sum(self.lengths[:number]) for number in range(len(self.rows) + 1)]
        self.num_tokens = self.starts[-1]
        self.seq_lens = [
            self.computed[row] + length for row, length in zip(self.rows, self.lengths, strict=True)
        ]
        self.logits = [sum(self.drafts[:number]) + number for number in range(len(self.rows) + 1)]
        self.drafted = [[rng.randrange(VOCABULARY) for _ in range(STEPS)] for _ in range(ROWS)]
        is_prefill = any(self.computed[row] < self.prefill_len[row] for row in self.rows)
        self.step = DeviceStep(
            np.array(self.lengths),
            is_prefill,
            num_draft_tokens=np.array(self.drafts),
            looks_ahead=True,
        )
