# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Attention by the versions of operators that torch_npu calls on Ascend950, against float64;
test_ascend950.py runs these tests on that chip."""

from itertools import accumulate

import pytest
import torch
import torch_npu
from fused_attention import COMPRESSED, GROUPS, HEADS, SIZE, arranged, close, inputs, reference

DTYPES = [torch.bfloat16, torch.float16]
COUNTS, LENGTHS = [5, 1, 3], [5, 40, 130]
BLOCKS, BLOCK = 5, 128


def causal(count, length):
    """Left-out keys of the last query tokens."""
    return torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)


def requests(dtype, size=SIZE):
    """Query tokens and keys of each request, in blocks of a cache with a block table."""
    query = torch.randn(sum(COUNTS), HEADS, size).to(dtype)
    cache = torch.randn(2, BLOCKS, BLOCK, GROUPS, size).to(dtype)
    table = torch.tensor([[3, 0], [1, 0], [4, 2]], dtype=torch.int32)
    keys, values = (
        [part[table[i]].flatten(0, 1)[:length].transpose(0, 1) for i, length in enumerate(LENGTHS)]
        for part in cache
    )
    return query, cache, table, keys, values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_inference_attention_over_pages(dtype, with_sinks):
    query, cache, table, keys, values = requests(dtype, 64)
    sink = torch.randn(HEADS).to(torch.bfloat16) if with_sinks and dtype != torch.float16 else None
    options = {} if sink is None else {"learnable_sink": sink.npu()}
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        query.npu(),
        *(part.flatten(2).npu() for part in cache),
        block_table=table.npu(),
        block_size=BLOCK,
        atten_mask=COMPRESSED.npu(),
        actual_seq_qlen=[*accumulate(COUNTS)],
        actual_seq_kvlen=LENGTHS,
        num_query_heads=HEADS,
        num_key_value_heads=GROUPS,
        softmax_scale=0.2,
        input_layout="TND",
        sparse_mode=3,
        return_softmax_lse=sink is None,
        **options,
    )
    start = 0
    for i, count in enumerate(COUNTS):
        part = query[start : start + count].transpose(0, 1)
        mask = causal(count, LENGTHS[i])
        expected, sums = reference(part, keys[i], values[i], 0.2, mask, sink=sink)
        close(out[start : start + count], expected.transpose(0, 1))
        if sink is None:
            assert torch.allclose(
                lse[start : start + count, :, 0].cpu().double(), sums.transpose(0, 1), atol=1e-3
            )
        start += count


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH"])
def test_inference_attention_without_pages(layout):
    query, key, value = inputs()
    out, _ = torch_npu.npu_fused_infer_attention_score(
        *(arranged(x, layout).npu() for x in (query, key, value)),
        num_heads=HEADS,
        num_key_value_heads=GROUPS,
        scale=0.2,
        input_layout=layout,
    )
    expected = torch.stack(
        [reference(q, k, v, 0.2)[0] for q, k, v in zip(query, key, value, strict=True)]
    )
    close(out, arranged(expected, layout))


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "TND"])
def test_training_attention(layout):
    query, key, value = inputs(torch.bfloat16)
    packed = {"actual_seq_qlen": [6, 12], "actual_seq_kvlen": [20, 40]} if layout == "TND" else {}
    out = torch_npu.npu_fusion_attention(
        *(arranged(x, layout).npu() for x in (query, key, value)),
        HEADS,
        layout,
        scale=0.2,
        atten_mask=COMPRESSED.bool().npu(),
        sparse_mode=3,
        **packed,
    )[0]
    expected = torch.stack(
        [
            reference(q, k, v, 0.2, causal(6, 20))[0]
            for q, k, v in zip(query, key, value, strict=True)
        ]
    )
    close(out, arranged(expected, layout))


def test_training_attention_with_sinks():
    query, key, value = inputs(torch.bfloat16)
    sink = torch.randn(HEADS)
    out = torch_npu.npu_fusion_attention_v2(
        *(arranged(x, "BNSD").npu() for x in (query, key, value)),
        HEADS,
        "BNSD",
        scale=0.2,
        sink=sink.npu(),
    )[0]
    expected = torch.stack(
        [reference(q, k, v, 0.2, sink=sink)[0] for q, k, v in zip(query, key, value, strict=True)]
    )
    close(out, expected)


def test_dropout_is_refused():
    query, key, value = (x.npu() for x in inputs(torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"dropout by the seed .* is not emulated"):
        torch_npu.npu_fusion_attention(query, key, value, HEADS, "BNSD", keep_prob=0.5)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("PromptFlashAttention", lambda q, k: torch_npu.npu_prompt_flash_attention(q, k, k)),
        ("FlashAttention", lambda q, k: torch_npu.npu_fusion_attention_v3(q, k, k, 4, "BNSD")),
    ],
)
def test_what_torch_npu_refuses_there(name, call):
    query, key, _ = (x.npu() for x in inputs(torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"(?i)950"):
        call(query, key)
