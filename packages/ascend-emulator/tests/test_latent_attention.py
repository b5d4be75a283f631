# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Latent attention of the fused inference attention: scores of a latent and a rotary part, against
float64."""

import pytest
import torch
import torch_npu
from fused_attention import BATCH, COMPRESSED, arranged, close, reference


def paged(rows, block, order, dtype):
    """[b, l, d] in shuffled blocks of `block` tokens: the cache, in plain or fractal order, and the
    table."""
    count = -(-rows.size(1) // block)
    free = torch.randperm(len(rows) * count + 2).tolist()
    cache = torch.full((len(free), block, rows.size(2)), 50).to(dtype)
    table = torch.tensor([[free.pop() for _ in range(count)] for _ in rows], dtype=torch.int32)
    for i, row in enumerate(rows):
        for j, number in enumerate(table[i].tolist()):
            part = row[j * block : (j + 1) * block]
            cache[number, : len(part)] = part
    unit = 32 // cache.element_size()
    return (
        cache
        if order == "H"
        else cache.unflatten(-1, (-1, unit)).transpose(1, 2).unsqueeze(1).contiguous()
    ), table


@pytest.mark.parametrize("layout", ["BSND", "BSND_NBSD", "BNSD_NBSD", "TND_NTD"])
@pytest.mark.parametrize("order", ["H", "NZ"])
@pytest.mark.parametrize("queries", [1, 3])
def test_latent_attention_over_pages(queries, order, layout):
    if order == "NZ" and layout == "BNSD_NBSD":
        pytest.skip("a fractal cache goes with no layout BNSD")
    heads, length = 8, 150
    source, target = (layout.split("_") * 2)[:2]
    query, rope = (torch.randn(BATCH, heads, queries, size).bfloat16() for size in (512, 64))
    latent, key_rope = (torch.randn(BATCH, length, size).bfloat16() for size in (512, 64))
    seed = torch.random.get_rng_state()
    cache, table = paged(latent, 128, order, torch.bfloat16)
    torch.random.set_rng_state(seed)
    rope_cache, _ = paged(key_rope, 128, order, torch.bfloat16)
    lengths = [queries * (i + 1) for i in range(BATCH)] if source == "TND" else None
    causal = {"atten_mask": COMPRESSED.npu(), "sparse_mode": 3} if queries > 1 else {}
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        arranged(query, source).npu(),
        cache.npu(),
        cache.npu(),
        query_rope=arranged(rope, source).npu(),
        key_rope=rope_cache.npu(),
        num_query_heads=heads,
        num_key_value_heads=1,
        softmax_scale=0.04,
        input_layout=layout,
        block_table=table.npu(),
        block_size=128,
        actual_seq_qlen=lengths,
        actual_seq_kvlen=[length, 140],
        return_softmax_lse=True,
        **causal,
    )
    wanted = []
    for i, used in enumerate((length, 140)):
        keys = torch.cat([latent[i, :used], key_rope[i, :used]], -1)[None]
        mask = torch.arange(used)[None] > torch.arange(queries)[:, None] + used - queries
        wanted.append(
            reference(torch.cat([query[i], rope[i]], -1), keys, latent[i, None, :used], 0.04, mask)
        )
    close(out, arranged(torch.stack([o for o, _ in wanted]), target))
    sums = torch.stack([s for _, s in wanted])[..., None]
    close(lse, arranged(sums, "TND") if lengths else sums, ulps=2e4)


def in_pages(query, rope, latent, key_rope, order, **options):
    """Attention of queries ``[BATCH, tokens, heads, 512]`` to latents in blocks of 128 tokens."""
    seed = torch.random.get_rng_state()
    cache, table = paged(latent, 128, order, latent.dtype)
    torch.random.set_rng_state(seed)
    rope_cache, _ = paged(key_rope, 128, order, key_rope.dtype)
    out, _ = torch_npu.npu_fused_infer_attention_score_v2(
        query.npu(),
        cache.npu(),
        cache.npu(),
        query_rope=rope.npu(),
        key_rope=rope_cache.npu(),
        num_query_heads=query.shape[2],
        num_key_value_heads=1,
        softmax_scale=0.04,
        input_layout="BSND",
        block_table=table.npu(),
        block_size=128,
        actual_seq_kvlen=[latent.shape[1]] * BATCH,
        **options,
    )
    return out


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("queries", [1, 2])
def test_latent_attention_of_128_heads(queries, window):
    """DeepSeek-V3's, where tensor parallelism does not divide them."""
    if window and queries == 1:
        pytest.skip("a window goes with several query tokens")
    heads, length = 128, 150
    query, rope = (torch.randn(BATCH, queries, heads, size).bfloat16() for size in (512, 64))
    latent, key_rope = (torch.randn(BATCH, length, size).bfloat16() for size in (512, 64))
    masked = {"atten_mask": COMPRESSED.npu(), "sparse_mode": 4 if window else 3}
    masked |= {"pre_tokens": window, "next_tokens": 0} if window else {}
    out = in_pages(query, rope, latent, key_rope, "H", **(masked if queries > 1 else {}))
    at = torch.arange(queries)[:, None] + length - queries
    mask = torch.arange(length)[None] > at
    if window:
        mask |= torch.arange(length)[None] < at - window
    for i in range(BATCH):
        keys = torch.cat([latent[i], key_rope[i]], -1)[None]
        q = torch.cat([query[i], rope[i]], -1).transpose(0, 1)
        close(out[i].transpose(0, 1), reference(q, keys, latent[i, None], 0.04, mask)[0])


def test_other_attentions_have_up_to_64_query_heads_per_key_head():
    query, key = (torch.zeros(1, n, 1, 128, dtype=torch.half).npu() for n in (128, 1))
    with pytest.raises(RuntimeError, match=r"at most 64 is allowed \(rule fused_infer\.groups"):
        torch_npu.npu_fused_infer_attention_score(
            query, key, key, num_heads=128, num_key_value_heads=1, input_layout="BNSD", scale=1.0
        )


@pytest.mark.parametrize(
    ("requests", "tokens", "message"),
    [
        (4097, 1, "has 4097 entries"),
        (1, 2, "sparse_mode is 0"),
        (1, 17, "a request has 17 query tokens"),
    ],
)
def test_limits_of_latent_attention_over_pages(requests, tokens, message):
    query, rope = (
        torch.zeros(requests * tokens, 1, size, dtype=torch.bfloat16, device="npu")
        for size in (512, 64)
    )
    cache, rope_cache = (
        torch.zeros(1, 128, size, dtype=torch.bfloat16, device="npu") for size in (512, 64)
    )
    with pytest.raises(RuntimeError, match=message):
        torch_npu.npu_fused_infer_attention_score_v2(
            query,
            cache,
            cache,
            query_rope=rope,
            key_rope=rope_cache,
            num_query_heads=1,
            num_key_value_heads=1,
            input_layout="TND",
            block_table=torch.zeros(requests, 1, dtype=torch.int32, device="npu"),
            block_size=128,
            actual_seq_qlen=[tokens * (i + 1) for i in range(requests)],
            actual_seq_kvlen=[100] * requests,
        )


@pytest.mark.parametrize("queries", [1, 3])
def test_latent_attention_over_contiguous_keys(queries):
    """op-plugin's page for CANN 9.1, whose example 4 this is, demands no pages for latents of 512."""
    query, rope = (torch.randn(2, 16, queries, size).half() for size in (512, 64))
    latent, key_rope = (torch.randn(2, 1, 150, size).half() for size in (512, 64))
    causal = {"atten_mask": COMPRESSED.npu(), "sparse_mode": 3} if queries > 1 else {}
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        latent.npu(),
        latent.npu(),
        query_rope=rope.npu(),
        key_rope=key_rope.npu(),
        num_heads=16,
        num_key_value_heads=1,
        input_layout="BNSD",
        scale=0.04,
        **causal,
    )
    mask = torch.arange(150)[None] > torch.arange(queries)[:, None] + 150 - queries
    for i in range(2):
        scored, keys = (torch.cat([a[i], b[i]], -1) for a, b in ((query, rope), (latent, key_rope)))
        close(out[i], reference(scored, keys, latent[i], 0.04, mask)[0])


def test_latent_attention_without_pages():
    query, key, value = (torch.randn(9, 4, 128).bfloat16() for _ in range(3))
    ropes = torch.randn(2, 9, 4, 64).bfloat16()
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        value.npu(),
        query_rope=ropes[0].npu(),
        key_rope=ropes[1].npu(),
        num_heads=4,
        scale=0.1,
        input_layout="TND",
        actual_seq_lengths=[4, 9],
        actual_seq_lengths_kv=[4, 9],
        atten_mask=COMPRESSED.npu(),
        sparse_mode=3,
    )
    for part in (slice(0, 4), slice(4, 9)):
        q, k = (
            torch.cat([x[part], rope[part]], -1).transpose(0, 1)
            for x, rope in zip((query, key), ropes, strict=True)
        )
        mask = torch.ones(len(out[part]), len(out[part]), dtype=torch.bool).triu(1)
        close(out[part].transpose(0, 1), reference(q, k, value[part].transpose(0, 1), 0.1, mask)[0])


def test_int8_latent_attention():
    """An int8 query comes with its rope part divided by both scales, as npu_mla_prolog_v2
    gives it."""
    heads, length = 4, 40
    query = torch.randint(-127, 128, (BATCH, 1, heads, 512), dtype=torch.int8)
    latent = torch.randint(-127, 128, (BATCH, length, 512), dtype=torch.int8)
    rope, key_rope = (
        torch.randn(BATCH, 1, heads, 64).bfloat16() * 9,
        torch.randn(BATCH, length, 64).bfloat16(),
    )
    query_scale, key_scale = torch.rand(BATCH, 1, heads) * 0.01 + 0.005, torch.tensor([0.02])
    out = in_pages(
        query,
        rope,
        latent,
        key_rope,
        "NZ",
        dequant_scale_query=query_scale.npu(),
        dequant_scale_key=key_scale.npu(),
        dequant_scale_value=key_scale.npu(),
        query_quant_mode=3,
    )
    assert out.dtype == torch.bfloat16
    for i in range(BATCH):
        q = (
            torch.cat([query[i].double(), rope[i].double()], -1).transpose(0, 1)
            * query_scale[i].double().t()[..., None]
            * 0.02
        )
        k = torch.cat([latent[i].double(), key_rope[i].double()], -1)[None]
        close(out[i].transpose(0, 1), reference(q, k, latent[i, None].double() * 0.02, 0.04)[0])
