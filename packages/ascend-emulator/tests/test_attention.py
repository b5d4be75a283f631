# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Attention and the paged cache, against softmax(scale * q k^T + mask) v in float64."""

import functools
import math

import comparisons
import pytest
import torch
import torch_npu
from cann_calls import Calls
from torch.nn import functional as F

close = functools.partial(comparisons.close, ulps=6)

HALVES = [torch.float16, torch.bfloat16]
HEADS = [(4, 4), (8, 2), (6, 1)]  # query heads, key and value heads
# The mask that sparse modes 2, 3 and 4 require.
COMPRESSED = torch.ones(2048, 2048, dtype=torch.int8).triu(1)


def left_out(mode, queries, keys, before=2**31 - 1, after=2**31 - 1):
    """[queries, keys], true where the mode leaves a score out."""
    row, column = torch.arange(queries)[:, None], torch.arange(keys)[None]
    if mode == 2:  # causal from the left upper corner
        return column > row
    end = column - (keys - queries)  # aligned at the right lower corner
    if mode == 3:
        return end > row
    return (end - row > after) | (row - end > before)


def reference(query, key, value, scale, mask=None):
    """query [t, n, d], key and value [l, m, d] with m dividing n; returns [t, n, d] and the
    log-sum-exp [t, n], float64."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    scores = torch.einsum("tnd,lnd->ntl", query, key) * scale
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    return torch.einsum("ntl,lnd->tnd", scores.softmax(-1), value), scores.logsumexp(-1).t()


def fused(query, key, value, *, heads, mask=None, **options):
    groups = heads[1]
    return torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        value.npu(),
        atten_mask=None if mask is None else mask.npu(),
        num_heads=heads[0],
        num_key_value_heads=groups,
        **options,
    )


def pages(tensors, block_size, layout, dtype):
    """Tensors [l, m, d] of requests scattered over blocks: the cache in CANN's layout and the block
    table."""
    _, groups, size = tensors[0].shape
    needed = [-(-len(x) // block_size) for x in tensors]
    # A read of missing values would change the result.
    blocks = torch.full((sum(needed) + 3, block_size, groups, size), 1e4, dtype=dtype)
    free = torch.randperm(len(blocks)).tolist()
    table = torch.zeros(len(tensors), max(needed) + 1, dtype=torch.int32)
    for row, (x, count) in enumerate(zip(tensors, needed, strict=True)):
        for i in range(count):
            block = free.pop()
            table[row, i] = block
            part = x[i * block_size : (i + 1) * block_size]
            blocks[block, : len(part)] = part
    flat = blocks.flatten(2) if layout == "H" else blocks.transpose(1, 2).contiguous()
    return flat, table


BATCHES = {  # (New tokens, all tokens) of each request.
    "decode": [(1, 1), (1, 200), (1, 128), (1, 129), (1, 37)],
    "prefill": [(5, 5), (130, 130), (1, 1)],
    "chunks": [(7, 200), (1, 300), (64, 64), (16, 144), (3, 130)],
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("layout", ["H", "NBD"])
def test_pages(layout, batch, heads, dtype):
    torch.manual_seed(hash((batch, heads)) % 1000)
    size, scale = 64, 0.125
    queries = [torch.randn(new, heads[0], size).to(dtype) for new, _ in BATCHES[batch]]
    keys, values = (
        [torch.randn(length, heads[1], size).to(dtype) for _, length in BATCHES[batch]]
        for _ in range(2)
    )
    joined = pages([torch.cat(pair, -1) for pair in zip(keys, values, strict=True)], 128, "", dtype)
    key_cache, value_cache = joined[0].split(size, -1)
    if layout == "H":
        key_cache, value_cache = (x.transpose(1, 2).flatten(2) for x in (key_cache, value_cache))
    out, lse = fused(
        torch.cat(queries),
        key_cache.contiguous(),
        value_cache.contiguous(),
        heads=heads,
        mask=COMPRESSED,
        sparse_mode=3,
        scale=scale,
        input_layout="TND",
        block_table=joined[1].npu(),
        block_size=128,
        actual_seq_lengths=torch.tensor([new for new, _ in BATCHES[batch]]).cumsum(0).tolist(),
        actual_seq_lengths_kv=[length for _, length in BATCHES[batch]],
        softmax_lse_flag=True,
    )
    wanted = [
        reference(q, k, v, scale, left_out(3, len(q), len(k)))
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    close(out, torch.cat([o for o, _ in wanted]))
    assert (lse.dtype, lse.shape) == (torch.float32, (len(out), heads[0], 1))
    torch.testing.assert_close(
        lse.squeeze(-1).cpu().double(), torch.cat([s for _, s in wanted]), atol=2e-3, rtol=2e-3
    )


def test_pages_of_a_request_that_has_nothing_in_them():
    query, pages_of = torch.randn(3, 4, 64).half(), torch.randn(2, 128, 128).half()
    options = {
        "block_table": torch.zeros(2, 1, dtype=torch.int32).npu(),
        "block_size": 128,
        "softmax_lse_flag": True,
    }
    options |= {
        "actual_seq_lengths": [2, 3],
        "actual_seq_lengths_kv": [0, 5],
        "input_layout": "TND",
    }
    out, lse = fused(query, pages_of, pages_of, heads=(4, 2), scale=0.1, **options)
    assert not out[:2].any()
    assert (lse[:2] == torch.inf).all()
    keys = pages_of[0, :5].unflatten(1, (2, 64))
    close(out[2:], reference(query[2:], keys, keys, 0.1, torch.zeros(1, 5, dtype=torch.bool))[0])


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("mode", [4, 5])
def test_int8_pages_with_pages_of_scales(mode, offsets):
    """A scale for each token of a page, in mode 5 for each KV head, too."""
    blocks, size, groups, dim = 4, 32, 2, 32
    lengths, table = [40, 20], torch.tensor([[2, 0], [3, 0]], dtype=torch.int32)
    query = torch.randn(2, 4, 1, dim).half()
    caches = torch.randint(-128, 128, (2, blocks, groups, size, dim), dtype=torch.int8)
    shape = (blocks, size) if mode == 4 else (blocks, groups, size)
    scales, shifts = torch.rand(2, *shape) * 0.02 + 0.01, torch.randn(2, *shape) * 5 * offsets

    def by_token(x):  # [blocks, groups or 1, size, 1]
        return (x[:, None] if mode == 4 else x)[..., None].double()

    whole = [
        (cache.double() + by_token(shift)) * by_token(scale)
        for cache, scale, shift in zip(caches, scales, shifts, strict=True)
    ]
    flat = (cache.transpose(1, 2).flatten(2).contiguous().npu() for cache in caches)
    more = {f"{name}_antiquant_mode": mode for name in ("key", "value")}
    more |= {"key_antiquant_scale": scales[0].npu(), "value_antiquant_scale": scales[1].npu()}
    if offsets:
        more |= {"key_antiquant_offset": shifts[0].npu(), "value_antiquant_offset": shifts[1].npu()}
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        *flat,
        num_heads=4,
        num_key_value_heads=groups,
        scale=0.2,
        input_layout="BNSD",
        block_table=table.npu(),
        block_size=size,
        actual_seq_lengths_kv=lengths,
        **more,
    )
    for request, length in enumerate(lengths):
        keys, values = (
            torch.cat([x[page] for page in table[request]], 1)[:, :length].transpose(0, 1)
            for x in whole
        )
        one_token = torch.zeros(1, length, dtype=torch.bool)
        expected = reference(query[request].transpose(0, 1), keys, values, 0.2, one_token)[0]
        close(out[request].transpose(0, 1), expected)


@pytest.mark.parametrize("block_size", [16, 32, 512])
def test_block_sizes_and_head_sizes(block_size):
    for size in (16, 128):
        key, value = torch.randn(2, 100, 2, size).half()
        query = torch.randn(20, 4, size).half()
        joined = pages([torch.cat([key, value], -1)], block_size, "", torch.float16)
        caches = (x.transpose(1, 2).flatten(2).contiguous() for x in joined[0].split(size, -1))
        options = {
            "block_table": joined[1].npu(),
            "block_size": block_size,
            "actual_seq_lengths": [20],
            "actual_seq_lengths_kv": [100],
        }
        out, _ = fused(
            query,
            *caches,
            heads=(4, 2),
            mask=COMPRESSED,
            sparse_mode=3,
            scale=0.1,
            input_layout="TND",
            **options,
        )
        close(out, reference(query, key, value, 0.1, left_out(3, 20, 100))[0])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("mode", [0, 2, 3, 4])
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
def test_batches_without_pages(layout, mode, heads, dtype):
    queries, length, size, batch = 24, 40, 32, 2
    query = torch.randn(batch, queries, heads[0], size).to(dtype)
    key, value = torch.randn(2, batch, length, heads[1], size).to(dtype)
    places = {
        "BSH": lambda x: x.flatten(2),
        "BSND": lambda x: x,
        "BNSD": lambda x: x.transpose(1, 2).contiguous(),
        "BNSD_BSND": lambda x: x.transpose(1, 2).contiguous(),
    }
    window = {"pre_tokens": 9, "next_tokens": 2} if mode == 4 else {}
    mask = (torch.rand(1, queries, length) > 0.8) if mode == 0 else COMPRESSED
    out, lse = fused(
        *map(places[layout], (query, key, value)),
        heads=heads,
        mask=mask,
        sparse_mode=mode,
        scale=0.2,
        input_layout=layout,
        softmax_lse_flag=True,
        **window,
    )
    ignored = (
        mask[0]
        if mode == 0
        else left_out(
            mode, queries, length, window.get("pre_tokens", 0), window.get("next_tokens", 0)
        )
    )
    wanted = [reference(q, k, v, 0.2, ignored) for q, k, v in zip(query, key, value, strict=True)]
    place = places["BSND" if layout == "BNSD_BSND" else layout]
    close(out, place(torch.stack([o for o, _ in wanted])))
    assert (lse.dtype, lse.shape) == (torch.float32, (batch, heads[0], queries, 1))
    torch.testing.assert_close(
        lse[..., 0].cpu().double(), torch.stack([s.t() for _, s in wanted]), atol=2e-3, rtol=2e-3
    )


@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
def test_actual_lengths_of_a_padded_batch(layout):
    query, key, value = (
        torch.randn(2, 6, 2, 16).half(),
        torch.randn(2, 9, 2, 16).half(),
        torch.randn(2, 9, 2, 16).half(),
    )
    place = (
        (lambda x: x.flatten(2)) if layout == "BSH" else (lambda x: x.transpose(1, 2).contiguous())
    )
    out, _ = fused(
        *map(place, (query, key, value)),
        heads=(2, 2),
        scale=0.25,
        input_layout=layout,
        actual_seq_lengths=[6, 4],
        actual_seq_lengths_kv=[5, 9],
    )
    first, second = (
        reference(query[0], key[0, :5], value[0, :5], 0.25)[0],
        reference(query[1, :4], key[1], value[1], 0.25)[0],
    )
    output = out.cpu().view(2, 6, 2, 16) if layout == "BSH" else out.cpu().transpose(1, 2)
    close(output[0], first)
    close(output[1, :4], second)


@pytest.mark.parametrize("mode", [0, 3])
def test_tokens_of_all_requests_in_a_row_without_pages(mode):
    counts = [(3, 3), (1, 8), (6, 10)]
    queries = [torch.randn(new, 4, 64).bfloat16() for new, _ in counts]
    keys, values = (
        [torch.randn(length, 4, 64).bfloat16() for _, length in counts] for _ in range(2)
    )
    lengths = [torch.tensor(column).cumsum(0).tolist() for column in zip(*counts, strict=True)]
    out, _ = fused(
        *map(torch.cat, (queries, keys, values)),
        heads=(4, 4),
        mask=COMPRESSED if mode else None,
        sparse_mode=mode,
        scale=0.125,
        input_layout="TND",
        actual_seq_lengths=lengths[0],
        actual_seq_lengths_kv=lengths[1],
    )
    wanted = [
        reference(q, k, v, 0.125, left_out(3, len(q), len(k)) if mode else None)[0]
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    close(out, torch.cat(wanted))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_scatter_pa_kv_cache(kind, dtype):
    key, value = torch.randn(2, 5, 2, 64).to(dtype)
    caches = torch.randn(2, 4, 16, 2, 64).to(dtype)
    slots = torch.tensor([63, 0, 17, 16, 40], dtype=kind)
    ours = caches.npu()
    torch_npu.npu_scatter_pa_kv_cache(
        key.npu(), value.npu(), ours[0], ours[1], slots.npu(), cache_mode="Norm"
    )
    expected = caches.clone()
    expected.flatten(1, 2)[0][slots.long()] = key
    expected.flatten(1, 2)[1][slots.long()] = value
    assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
def test_scaled_dot_product_attention(kind, dtype):
    query, key, value = (torch.randn(2, 4, length, 32).to(dtype) for length in (12, 12, 12))
    mask = torch.rand(12, 12) > 0.3
    mask[:, 0] = True
    options = {"plain": {}, "causal": {"is_causal": True}, "mask": {"attn_mask": mask}}[kind]
    expected = F.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), **options
    )
    ours = {name: x.npu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    close(F.scaled_dot_product_attention(query.npu(), key.npu(), value.npu(), **ours), expected)


def test_large_scores_do_not_overflow():
    query, key, value = torch.randn(3, 1, 4, 2, 16).half() * 40
    out, lse = fused(
        query, key, value, heads=(2, 2), scale=1.0, input_layout="BSND", softmax_lse_flag=True
    )
    expected, sums = reference(query[0], key[0], value[0], 1.0)
    assert sums.max() > math.log(torch.finfo(torch.float16).max)
    torch.testing.assert_close(lse[0, ..., 0].t().cpu().double(), sums, atol=1e-2, rtol=2e-3)
    close(out[0], expected, ulps=64)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_query_key_and_value_with_bias(agree, dtype):
    qkv, bias = torch.randn(2, 5, 24).to(dtype), torch.randn(24).to(dtype)
    agree(lambda x, b: torch._transform_bias_rescale_qkv(x, b, 4), qkv, bias)
    out = torch.zeros(2, 5, 5, 1).to(dtype).npu()
    message = Calls().refusal("TransformBiasRescaleQkv", qkv.npu(), bias.npu(), 5, out, out, out)
    assert message == "the last dimension of qkv is 24; it must be a multiple of 15"
