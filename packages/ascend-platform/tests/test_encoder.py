# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Built-in encoder-only attention on random batches, compared with softmax(q k^T) v in float64."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from ascend_platform.attention import encoder, paged
from ascend_platform.extension import RefusedError
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("max_elements", [1 << 24, 1 << 9])
def test_bidirectional_attention(window, max_elements, monkeypatch):
    monkeypatch.setattr(encoder, "MAX_ELEMENTS", max_elements)
    monkeypatch.setattr(paged, "MAX_ELEMENTS", max_elements)
    lengths, heads, size = [40, 1, 7, 100], 4, 32
    query, (key, value) = (
        torch.randn(sum(lengths), heads, size),
        torch.randn(2, sum(lengths), 2, size),
    )
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    with set_current_vllm_config(VllmConfig()):
        layer = encoder.EncoderAttentionImpl(
            heads, size, 0.2, 2, attn_type="encoder_only", sliding_window=window
        )
        spec = EncoderOnlyAttentionSpec(
            block_size=16, num_kv_heads=2, head_size=size, dtype=torch.float32
        )
        builder = encoder.EncoderAttentionMetadataBuilder(
            spec, ["layer"], VllmConfig(), torch.device("npu")
        )
    meta = builder.build(
        0, SimpleNamespace(query_start_loc_cpu=torch.tensor([*starts, 0]), num_reqs=len(lengths))
    )
    output = torch.empty(sum(lengths), heads, size, device="npu")
    layer.forward(None, query.npu(), key.npu(), value.npu(), None, meta, output)
    for start, end in pairwise(starts):
        q, k, v = (x[start:end].double().transpose(0, 1) for x in (query, key, value))
        outside = (torch.arange(end - start) - torch.arange(end - start)[:, None]).abs() >= (
            window or 1000
        )
        scores = (q @ k.repeat_interleave(2, 0).transpose(1, 2) * 0.2).masked_fill(
            outside, -torch.inf
        )
        expected = (scores.softmax(-1) @ v.repeat_interleave(2, 0)).transpose(0, 1)
        torch.testing.assert_close(output[start:end].cpu().double(), expected, atol=1e-5, rtol=1e-5)


def test_decoders_are_refused():
    assert not encoder.EncoderAttentionBackend.supports_attn_type("decoder")
    with pytest.raises(
        RefusedError, match="needs logits soft cap; the built-in encoder-only attention"
    ):
        encoder.EncoderAttentionImpl(4, 32, 0.2, attn_type="encoder_only", logits_soft_cap=2.0)
