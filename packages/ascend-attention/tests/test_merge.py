# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Merging partial results of attention, compared with float64."""

import pytest
import torch
from ascend_attention import context


@pytest.mark.parametrize("count", [2, 16, 17, 40])
def test_parts_of_any_number_are_merged_in_float32(count):
    """npu_attention_update takes 16 parts: 16 ranks and a rank's own tokens are more. Some parts
    have no keys."""
    sums, parts = torch.randn(count, 10), torch.randn(count, 10, 32).bfloat16()
    sums[1:, 4] = -torch.inf
    sums[1, 7] = -torch.inf
    output, merged = context.merge([*sums.npu()], [*parts.npu()])
    wide = sums.double()
    total = wide.logsumexp(0)
    expected = ((wide - total).exp()[..., None] * parts.double()).sum(0)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.cpu().double(), expected, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(merged.cpu().double(), total, atol=2e-6, rtol=2e-6)
