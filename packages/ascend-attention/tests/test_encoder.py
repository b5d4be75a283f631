# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fused encoder attention on random batches, compared with softmax(q k^T) v in float64."""

import numpy as np
import pytest
import torch
from ascend_attention import encoder
from ascend_platform.extension import RefusedError
from ascend_platform.graph import acl_graph
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec


@pytest.fixture(autouse=True)
def current_config():
    torch.manual_seed(0)  # The bound is eight roundings, which some draws exceed.
    with set_current_vllm_config(VllmConfig()):
        yield


def reference(query, key, value, lengths, scale, window=None):
    """Reference in float64; query ``[tokens, heads, d]``, key and value ``[tokens,
    kv_heads, d]``."""
    parts = []
    for q, k, v in zip(
        *(x.double().transpose(0, 1).split(lengths, 1) for x in (query, key, value)), strict=True
    ):
        max_diff = (torch.arange(q.shape[1]) - torch.arange(q.shape[1])[:, None]).abs() >= (
            window or q.shape[1]
        )
        share = len(q) // len(k)
        scores = (q @ k.repeat_interleave(share, 0).transpose(1, 2) * scale).masked_fill(
            max_diff, -torch.inf
        )
        parts.append((scores.softmax(-1) @ v.repeat_interleave(share, 0)).transpose(0, 1))
    return torch.cat(parts)


def close(output, expected):
    bound = 8 * torch.finfo(output.dtype).eps
    torch.testing.assert_close(output.cpu().double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 64), (torch.float16, 80), (torch.float32, 32)]
)
def test_bidirectional_attention(dtype, size, window):
    lengths, heads = [40, 1, 7, 100], 4
    tokens = sum(lengths)
    query, (key, value) = (
        torch.randn(tokens, heads, size, dtype=dtype),
        torch.randn(2, tokens, 2, size, dtype=dtype),
    )
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts.npu(),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths).npu(),
        num_reqs=4,
        num_actual_tokens=tokens,
        max_query_len=100,
        max_seq_len=100,
        block_table_tensor=torch.zeros(4, 1, dtype=torch.int32).npu(),
        slot_mapping=torch.zeros(tokens).npu(),
        causal=False,
    )
    spec = EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=2, head_size=size, dtype=dtype)
    meta = encoder.FusedEncoderAttentionMetadataBuilder(
        spec, ["layer"], VllmConfig(), torch.device("npu")
    ).build(0, common)
    layer = encoder.FusedEncoderAttentionImpl(
        heads, size, 0.2, 2, attn_type="encoder_only", sliding_window=window
    )
    output = torch.empty(tokens + 3, heads, size, dtype=dtype, device="npu")
    layer.forward(None, query.npu(), key.npu(), value.npu(), None, meta, output)
    close(output[:tokens], reference(query, key, value, lengths, 0.2, window))


def test_more_sequences_than_one_call(monkeypatch):
    monkeypatch.setattr(encoder, "MAX_SEQUENCES", 3)
    lengths = [5, 1, 9, 4, 4, 30, 2]
    query, key, value = torch.randn(3, sum(lengths), 2, 32)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    output = encoder.attend(query.npu(), key.npu(), value.npu(), ends, 0.3)
    close(output, reference(query, key, value, lengths, 0.3))


def test_mm_encoder_attention():
    """A batch, packed sequences, and merged head dimensions."""
    layer = encoder.FusedMMEncoderAttention(4, 40, num_kv_heads=2)
    query, key, value = (
        torch.randn(3, 10, 4, 40),
        torch.randn(3, 10, 2, 40),
        torch.randn(3, 10, 2, 40),
    )
    expected = reference(*(x.flatten(0, 1) for x in (query, key, value)), [10] * 3, 40**-0.5)
    placed = [x.npu() for x in (query, key, value)]
    close(layer.forward_oot(*placed).flatten(0, 1), expected)
    close(layer.forward_oot(*(x.flatten(2) for x in placed)).view(30, 4, 40), expected)
    packed = [x.flatten(0, 1)[None] for x in placed]
    ends = torch.tensor([0, 3, 20, 30], dtype=torch.int32).npu()
    expected = reference(*(x.flatten(0, 1) for x in (query, key, value)), [3, 17, 10], 40**-0.5)
    close(layer.forward_oot(*packed, cu_seqlens=ends, max_seqlen=torch.tensor(17))[0], expected)


def replayed(buffer, ends):
    """Give a buffer the attributes that a copy into it leaves."""
    vars(buffer).clear()
    buffer.host_ends = ends


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_replay_attends_in_its_own_sequences(dtype):
    layer, size = encoder.FusedMMEncoderAttention(4, 40, num_kv_heads=2), (30, 40)
    inputs = [torch.randn(30, heads, 40).to(dtype) for heads in (4, 2, 2)]
    placed = [x.npu()[None] for x in inputs]
    buffer = torch.tensor([0, 15, 30, 30, 30], dtype=torch.int32).npu()
    layer.forward_oot(*placed, cu_seqlens=buffer)  # as EncoderCudaGraphManager does before
    pool, output = torch.npu.graph_pool_handle(), torch.empty_like(placed[0])
    fixed = torch.empty_like(placed[0])
    graph = acl_graph.NPUGraph()
    with acl_graph._Capture(graph, pool, stream=torch.npu.Stream()):
        output.copy_(layer.forward_oot(*placed, cu_seqlens=buffer))
        fixed.copy_(
            layer.forward_oot(*(x.view(3, 10, *x.shape[2:]) for x in placed)).view_as(fixed)
        )
    for lengths in ([3, 17, 10], [5], [1, 2, 3, 20], [30]):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        replayed(buffer, [*ends, ends[-1]])
        graph.replay()
        rows = sum(lengths)
        close(output[0, :rows], reference(*(x[:rows] for x in inputs), lengths, size[1] ** -0.5))
        close(fixed[0], reference(*inputs, [10] * 3, size[1] ** -0.5))
    replayed(buffer, [1, 2, 3, 4, 5])
    with pytest.raises(acl_graph.NotReplayedError):  # The buffer holds four.
        graph.replay()


def test_ends_that_an_encoder_computes_are_refused_in_a_graph():
    layer = encoder.FusedMMEncoderAttention(2, 32)
    query = torch.randn(1, 20, 64).npu()
    ends = torch.tensor([0, 3, 20], dtype=torch.int32).npu()
    graph = acl_graph.NPUGraph()
    with (
        pytest.raises(
            RefusedError, match="computes the sequence ends of its attention on the device"
        ),
        acl_graph._Capture(graph, torch.npu.graph_pool_handle(), stream=torch.npu.Stream()),
    ):
        layer.forward_oot(query, query, query, ends + 0)


def test_host_waits_for_lengths_at_most_once(monkeypatch):
    copies = []
    to_list = torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda x: copies.append(x.device.type) or to_list(x)
    )
    layer = encoder.FusedMMEncoderAttention(2, 32)
    query, key, value = torch.randn(3, 1, 20, 64).npu()
    ends = np.array([0, 3, 20], dtype=np.int32)
    # as Qwen-VL's models do
    known = layer.maybe_recompute_cu_seqlens(layer.attn_backend, ends, 64, 1, torch.device("npu"))
    unknown = torch.tensor(ends).npu()
    expected = reference(
        *(x[0].unflatten(-1, (2, 32)).cpu() for x in (query, key, value)), [3, 17], 32**-0.5
    )
    for lengths, waits in ((known, 0), (unknown, 1)):
        copies.clear()
        for _ in range(3):
            close(layer.forward_oot(query, key, value, lengths)[0].unflatten(-1, (2, 32)), expected)
        assert copies.count("npu") == waits


def test_unsupported_features_are_refused():
    with pytest.raises(RefusedError, match="ALiBi; the fused encoder-only attention"):
        encoder.FusedEncoderAttentionImpl(
            2, 16, 1.0, attn_type="encoder_only", alibi_slopes=[1.0, 0.5]
        )
    assert [
        encoder.FusedEncoderAttentionBackend.supports_head_size(size) for size in (72, 768, 784)
    ] == [True, True, False]
