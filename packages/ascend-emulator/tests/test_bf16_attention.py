# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Attention of bfloat16 tensors by the emulator's own kernel, around the edges of its blocks, in
float64."""

import pytest
import torch
import torch_npu
from fused_attention import COMPRESSED, arranged, close, reference

TOKENS = 2**31 - 1


def visible(mode, queries, keys, before, after):
    """[queries, keys], true where a query sees a key."""
    distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
    if mode == 2:
        return distance <= 0
    if mode == 0:
        return distance < TOKENS
    return (distance - (keys - queries) <= after) & (distance - (keys - queries) >= -before)


# 30 rows and 128 keys are computed at a time, six rows in a tile: (queries, keys) below, at and
# above.
@pytest.mark.parametrize(
    ("queries", "keys"),
    [(1, 1), (2, 127), (5, 128), (7, 129), (15, 255), (16, 257), (31, 31), (33, 300)],
)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (7, 1), (64, 1)])
@pytest.mark.parametrize(
    ("mode", "before", "after"), [(0, 0, 0), (2, 0, 0), (3, TOKENS, 0), (4, 3, 0), (4, 131, 2)]
)
def test_edges_of_blocks(queries, keys, heads, groups, mode, before, after):
    layout = "BSND" if mode == 2 else "TND"  # The packed layouts do not have mode 2.
    query = torch.randn(2, heads, queries, 64).bfloat16()
    key, value = torch.randn(2, 2, groups, keys, 64).bfloat16()
    ends = [1, 1] if mode == 2 else [1, 2]
    out, lse = torch_npu.npu_fused_infer_attention_score(
        *(arranged(x, layout).npu() for x in (query, key, value)),
        atten_mask=COMPRESSED.npu() if mode else None,
        sparse_mode=mode,
        pre_tokens=before if mode == 4 else TOKENS,
        next_tokens=after if mode == 4 else TOKENS,
        num_heads=heads,
        num_key_value_heads=groups,
        scale=0.2,
        input_layout=layout,
        softmax_lse_flag=True,
        actual_seq_lengths=[end * queries for end in ends],
        actual_seq_lengths_kv=[end * keys for end in ends],
    )
    mask = ~visible(mode, queries, keys, before, after)
    wanted, sums = zip(
        *(reference(q, k, v, 0.2, mask) for q, k, v in zip(query, key, value, strict=True)),
        strict=True,
    )
    close(out, arranged(torch.stack(wanted), layout), 6)
    expected = torch.stack(sums) if mode == 2 else torch.cat(sums, 1).t()
    torch.testing.assert_close(
        lse.squeeze(-1).cpu().double(),
        expected.where(expected > -torch.inf, torch.inf),
        atol=2e-3,
        rtol=2e-3,
    )


@pytest.mark.parametrize(
    "layout", ["BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_BNSD", "BSND_NBSD", "NTD_TND", "TND_NTD"]
)
@pytest.mark.parametrize("size", [32, 96, 128, 256])
def test_layouts_and_head_sizes(layout, size):
    source, target = (layout.split("_") * 2)[:2]
    query, key, value = (
        torch.randn(2, n, s, size).bfloat16() for n, s in ((4, 6), (2, 130), (2, 130))
    )
    packed = (
        {"actual_seq_lengths": [6, 12], "actual_seq_lengths_kv": [130, 260]}
        if source in ("TND", "NTD")
        else {}
    )
    out, _ = torch_npu.npu_fused_infer_attention_score(
        *(arranged(x, source).npu() for x in (query, key, value)),
        atten_mask=COMPRESSED.npu(),
        sparse_mode=3,
        num_heads=4,
        num_key_value_heads=2,
        scale=size**-0.5,
        input_layout=layout,
        **packed,
    )
    mask = ~visible(3, 6, 130, TOKENS, 0)
    wanted = [
        reference(q, k, v, size**-0.5, mask)[0] for q, k, v in zip(query, key, value, strict=True)
    ]
    close(out, arranged(torch.stack(wanted), target), 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_that_are_no_numbers(dtype):
    query, key, value = torch.randn(3, 4, 4, 64).to(dtype)
    query[1, 2] = torch.nan
    value[3, 1, 5] = torch.inf
    out, _ = torch_npu.npu_fused_infer_attention_score(
        *(x.npu() for x in (query, key, value)),
        num_heads=4,
        num_key_value_heads=4,
        scale=0.1,
        input_layout="TND",
        actual_seq_lengths=[4],
        actual_seq_lengths_kv=[4],
    )
    odd = torch.zeros(4, 4, 64, dtype=torch.bool)
    odd[1, 2] = True
    odd[:, 1, 5] = True
    assert torch.equal(~out.cpu().isfinite(), odd)
    assert out.cpu()[1, 2].isnan().all()


def test_large_scores_do_not_overflow():
    query, key, value = 100 * torch.randn(3, 8, 2, 64)
    query, key, value = query.bfloat16(), key.bfloat16(), (value / 100).bfloat16()
    out, _ = torch_npu.npu_fused_infer_attention_score(
        *(x.npu() for x in (query, key, value)),
        num_heads=2,
        num_key_value_heads=2,
        scale=1.0,
        input_layout="TND",
        actual_seq_lengths=[8],
        actual_seq_lengths_kv=[8],
    )
    close(
        out, reference(*(x.transpose(0, 1) for x in (query, key, value)), 1.0)[0].transpose(0, 1), 6
    )


@pytest.mark.parametrize("before", [2, 130, 131])
def test_windows_that_begin_at_odd_tokens_of_pages(before):
    """The last token of an odd part of a page has no second token in its pair: the value beside its
    weight is not multiplied."""
    queries, keys, block_size = 5, 300, 16
    query = torch.randn(queries, 6, 64).bfloat16()
    key, value = torch.randn(2, keys, 2, 64).bfloat16()
    pages = [
        torch.cat([x, torch.full((20, 2, 64), torch.nan).bfloat16()]).view(-1, block_size, 128)
        for x in (key, value)
    ]

    query[0, 1] = torch.nan  # The weights beside those of head 0 are NaN.
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        *(x.npu() for x in pages),
        atten_mask=COMPRESSED.npu(),
        sparse_mode=4,
        pre_tokens=before,
        next_tokens=0,
        num_heads=6,
        num_key_value_heads=2,
        scale=0.2,
        input_layout="TND",
        block_table=torch.arange(20, dtype=torch.int32)[None].npu(),
        block_size=block_size,
        actual_seq_lengths=[queries],
        actual_seq_lengths_kv=[keys],
    )
    mask = ~visible(4, queries, keys, before, 0)
    wanted = reference(*(x.transpose(0, 1) for x in (query, key, value)), 0.2, mask)[0].transpose(
        0, 1
    )
    assert out[0, 1].isnan().all()
    hidden = torch.ones(queries, 6, dtype=torch.bool)
    hidden[0, 1] = False
    close(out.cpu()[hidden], wanted[hidden], 6)
