# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Packed layouts of the fused inference attention: head sizes, requests without keys, views."""

import re
from itertools import accumulate

import pytest
import torch
import torch_npu
from fused_attention import (
    BATCH,
    COMPRESSED,
    GROUPS,
    HEADS,
    KEYS,
    QUERIES,
    SIZE,
    close,
    inputs,
    reference,
)


def packed(heads, groups, size, counts, keys, value_size=0, layout="TND", **options):
    """The fused attention of requests with these numbers of queries and keys, in a
    packed layout."""
    tokens = [
        (sum(counts), heads, size),
        (sum(keys), groups, size),
        (sum(keys), groups, value_size or size),
    ]
    shapes = tokens if layout == "TND" else [(n, t, d) for t, n, d in tokens]
    given = {
        "num_heads": heads,
        "num_key_value_heads": groups,
        "input_layout": layout,
        "scale": 0.2,
    }
    given |= {
        "actual_seq_lengths": list(accumulate(counts)),
        "actual_seq_lengths_kv": list(accumulate(keys)),
    } | options
    return torch_npu.npu_fused_infer_attention_score(
        *(torch.randn(shape).bfloat16().npu() for shape in shapes), **given
    )[0]


@pytest.mark.parametrize("layout", ["TND", "NTD_TND"])
@pytest.mark.parametrize("size", [16, 80, 96, 112, 160, 256])
def test_head_sizes_of_multi_head_attention_in_packed_layouts(size, layout):
    """The text is that of hardware. Grouped queries, one more query head, have them (vllm-ascend
    serves 256 so)."""
    text = (
        f"When layout is {layout[:3]}, queryD({size}), keyD({size}) and valueD({size}) must be same"
        " equal 192/128/64"
    )
    with pytest.raises(RuntimeError, match=re.escape(text)) as error:
        packed(2, 2, size, [3, 4], [5, 4], layout=layout)
    assert "error code is 561002" in str(error.value)
    assert packed(2, 1, size, [3, 4], [5, 4], layout=layout).isfinite().all()


@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (128, 128), (192, 192), (192, 128)])
def test_multi_head_attention_in_packed_layouts_has(size, value_size):
    assert packed(2, 2, size, [3, 4], [5, 4], value_size).shape == (7, 2, value_size)


def test_packed_layouts_have_at_most_4096_requests():
    assert packed(1, 1, 64, [1] * 4096, [1] * 4096).isfinite().all()
    with pytest.raises(
        RuntimeError,
        match="actual_seq_lengths has 4097 entries in layout TND; at most 4096 are allowed",
    ):
        packed(1, 1, 64, [1] * 4097, [1] * 4097)


@pytest.mark.parametrize("layout", ["TND", "BNSD"])
def test_keys_of_one_query_token(layout):
    """More than 262144 are for more query tokens. All blocks of the block table are the same."""
    table, cache = (
        torch.zeros(1, 2049, dtype=torch.int32).npu(),
        torch.zeros(1, 128, 64).bfloat16().npu(),
    )
    paged = {
        "block_table": table,
        "block_size": 128,
        "num_heads": 1,
        "scale": 0.1,
        "input_layout": layout,
    }
    paged |= {"atten_mask": COMPRESSED.npu(), "sparse_mode": 3}

    def decode(length, tokens):
        query = torch.zeros(tokens, 1, 64).bfloat16().npu()
        query = query if layout == "TND" else query.transpose(0, 1)[None].contiguous()
        lengths = {"actual_seq_lengths": [tokens], "actual_seq_lengths_kv": [length]}
        torch_npu.npu_fused_infer_attention_score(query, cache, cache, **paged, **lengths)

    decode(262144, 1)
    with pytest.raises(
        RuntimeError,
        match="a request has 262145 keys; at most 262144 are allowed with one query token",
    ):
        decode(262145, 1)
    decode(262145, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_blocks_of_a_request_without_keys_are_not_looked_at(dtype):
    """vLLM pads the batches of graphs with such requests."""
    query, cache = (
        torch.randn(2, 2, 1, 64).to(dtype).npu(),
        torch.randn(3, 128, 128).to(dtype).npu(),
    )
    table = torch.tensor([[2], [-1]], dtype=torch.int32).npu()
    paged = {
        "block_table": table,
        "block_size": 128,
        "actual_seq_lengths_kv": [5, 0],
        "input_layout": "BNSD",
    }
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query, cache, cache, num_heads=2, scale=0.1, **paged
    )
    keys = cache[2, :5].cpu().view(5, 2, 64).transpose(0, 1)
    close(out[0], reference(query[0].cpu(), keys, keys, 0.1)[0])
    assert not out[1].any()


@pytest.mark.parametrize(
    "part", ["atten_mask", "pse_shift", "key_shared_prefix", "value_shared_prefix"]
)
def test_views_that_are_not_contiguous_are_refused(part):
    given = {"atten_mask": torch.zeros(BATCH, 1, QUERIES, KEYS, 2, dtype=torch.bool)}
    given["pse_shift"] = torch.zeros(1, HEADS, QUERIES, KEYS, 2).half()
    prefix = torch.zeros(1, GROUPS, 5, SIZE, 2).half()
    if "prefix" in part:
        given = {"key_shared_prefix": prefix, "value_shared_prefix": prefix}
    given = {
        name: x.npu()[..., 0] if name == part else x[..., 0].contiguous().npu()
        for name, x in given.items()
    }
    options = {
        "num_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "input_layout": "BNSD",
        "scale": 0.2,
    }
    with pytest.raises(RuntimeError, match=f"{part} "):
        torch_npu.npu_fused_infer_attention_score(*(x.npu() for x in inputs()), **given, **options)
