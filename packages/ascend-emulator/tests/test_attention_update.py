# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Attention update, MLA prolog, lightning indexer and sparse attention, against references in
float64."""

import re
import sys
import textwrap

import pytest
import torch
import torch_npu
from cann_calls import needs_argument

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def close(actual, expected, ulps=4):
    bound = ulps * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.cpu().double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_update(dtype):
    lse, parts = torch.randn(3, 10), torch.randn(3, 10, 32).to(dtype)
    lse[1, 4] = torch.inf  # a part without keys
    out, total = torch_npu.npu_attention_update([x.npu() for x in lse], [x.npu() for x in parts], 1)
    wide = lse.double().masked_fill(lse.isposinf(), -torch.inf)
    close(out, ((wide - wide.logsumexp(0)).exp()[..., None] * parts.double()).sum(0))
    close(total, wide.logsumexp(0))
    assert torch.equal(
        torch_npu.npu_attention_update([x.npu() for x in lse], [x.npu() for x in parts], 0)[0], out
    )


@pytest.mark.parametrize("layout", ["SBH", "TND", "packed"])
def test_ring_attention_update(calls, layout):
    heads, size, counts = 2, 16, [3, 4]
    shape = (5, 2, heads * size) if layout == "SBH" else (7, heads, size)
    outs = torch.randn(2, *shape)
    stats_shape = (2, heads, 5) if layout == "SBH" else (7, heads)
    largest, sums = torch.randn(2, *stats_shape), torch.rand(2, *stats_shape) + 0.5

    def given(x):
        """The columns of eight; requests one after the other as [heads, tokens] unless the layout
        is the output's."""
        if layout == "packed":
            x = torch.cat([part.t().reshape(-1) for part in x.split(counts)]).view(7, heads)
        return x[..., None].expand(*x.shape, 8).contiguous().npu()

    options = (
        {}
        if layout == "SBH"
        else {"input_layout": "TND", "actual_seq_qlen": torch.tensor([3, 7]).npu()}
    )
    if layout == "TND":
        options["input_softmax_layout"] = "TND"
    parts = [
        outs[0].npu(),
        given(largest[0]),
        given(sums[0]),
        outs[1].npu(),
        given(largest[1]),
        given(sums[1]),
    ]
    out, most, total = torch_npu.npu_ring_attention_update(*parts, **options)
    if layout != "TND":  # the first version, which MindSpeed calls
        first = [torch.empty_like(x) for x in (out, most, total)]
        layout_of_outputs = options.get("input_layout", "SBH")
        calls.compute(
            "RingAttentionUpdate", *parts, options.get("actual_seq_qlen"), layout_of_outputs, *first
        )
        assert all(torch.equal(*pair) for pair in zip(first, (out, most, total), strict=True))
    lse = largest.double() + sums.double().log()
    weights = (lse - lse.logsumexp(0)).exp()
    if layout == "SBH":
        wide = outs.double().view(2, 5, 2, heads, size) * weights.permute(0, 3, 1, 2)[..., None]
        close(out, wide.sum(0).flatten(2), ulps=16)
    else:
        close(out, (outs.double() * weights[..., None]).sum(0), ulps=16)
    assert torch.equal(most.cpu(), torch.maximum(given(largest[0]), given(largest[1])).cpu())
    close(
        (most + total.log())[..., 0].flatten().sort()[0],
        lse.logsumexp(0).flatten().sort()[0],
        ulps=16,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("perm", [(0, 1, 2), (1, 0, 2)])
def test_transpose_batchmatmul(perm, split, dtype):
    x, weight = (
        torch.randn(4, 6, 32).permute(perm).contiguous().to(dtype),
        torch.randn(4, 32, 16).to(dtype),
    )
    out = torch_npu.npu_transpose_batchmatmul(
        x.npu(),
        weight.npu(),
        perm_x1=perm,
        perm_x2=(0, 1, 2),
        perm_y=(1, 0, 2),
        batch_split_factor=split,
    )
    expected = (x.double().permute(perm) @ weight.double()).transpose(0, 1)
    close(
        out,
        expected if split == 1 else expected.reshape(6, 2, 32).transpose(0, 1),
        ulps=64 if dtype == torch.float32 else 8,
    )


def rms(x, gamma, epsilon=1e-5):
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * gamma


def rotate(x, cos, sin):
    x = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@pytest.mark.parametrize("weights", ["ND", "NZ"])
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ"])
@pytest.mark.parametrize("small", [False, True], ids=["bfloat16", "int8"])
def test_mla_prolog(small, mode, version, weights):
    tokens, hidden, low, heads, size, latent, rotary = (
        5,
        7168 if version == 2 else 6144,
        1536,
        2,
        128,
        512,
        64,
    )
    dtype = torch.int8 if small else torch.bfloat16

    def weight(*shape):
        return (
            torch.randint(-100, 100, shape, dtype=dtype)
            if small
            else (torch.randn(shape) / shape[0] ** 0.5).to(dtype)
        )

    x, down, up, down_key = (
        weight(tokens, hidden),
        weight(hidden, low),
        weight(low, heads * (size + rotary)),
        weight(hidden, latent + rotary),
    )
    up_key = (torch.randn(heads, size, latent) / size**0.5).bfloat16()
    gammas = torch.rand(low).bfloat16() + 0.5, torch.rand(latent).bfloat16() + 0.5
    sin, cos = torch.rand(2, tokens, rotary).bfloat16()
    index = torch.tensor([0, 31, 16, 3, 40])
    caches = torch.zeros(3, 16, 1, latent).to(dtype), torch.zeros(3, 16, 1, rotary).bfloat16()
    scales = {}
    if small:
        scales = {
            "dequant_scale_x": torch.rand(tokens, 1) * 1e-2,
            "dequant_scale_w_dq": torch.rand(1, low) * 1e-2,
            "dequant_scale_w_uq_qr": torch.rand(1, heads * (size + rotary)) * 1e-3,
            "dequant_scale_w_dkv_kr": torch.rand(1, latent + rotary) * 1e-2,
            "quant_scale_ckv": torch.full((1, latent), 40.0),
        }
    ours = [t.npu() for t in caches]
    given = [t.npu() for t in (x, down, up, up_key, down_key, *gammas, sin, cos)]
    if weights == "NZ":
        torch.npu.config.allow_internal_format = True
        for place in (1, 2, 4):
            given[place] = torch_npu.npu_format_cast(given[place], 29)
        torch.npu.config.allow_internal_format = False
    options = {name: t.npu() for name, t in scales.items()} | {"cache_mode": mode}
    if version == 2:
        query, rope, _, _, query_scale = torch_npu.npu_mla_prolog_v2(
            *given, index.npu(), *ours, **options
        )
    else:
        options |= {
            "cache_index": index.npu(),
            "weight_quant_mode": 2 if small else 0,
            "kv_cache_quant_mode": 1 if small else 0,
        }
        query, rope, query_scale, *_ = torch_npu.npu_mla_prolog_v3(
            *given, *ours, query_quant_mode=int(small), **options
        )
    wide = x.double()

    def product(left, right, name, rows=None):
        out = left.double() @ right.double()
        return (
            out
            * (scales["dequant_scale_x"].double() if rows is None else rows)
            * scales[name].double()
            if small
            else out
        )

    query_low = rms(product(wide, down, "dequant_scale_w_dq"), gammas[0].double())
    if small:
        rows = query_low.abs().amax(-1, keepdim=True) / 127
        query_low = (query_low / rows).round()
    else:
        rows, query_low = None, query_low.bfloat16()
    both = product(query_low, up, "dequant_scale_w_uq_qr", rows).view(tokens, heads, size + rotary)
    absorbed = torch.einsum("tnd,ndl->tnl", both[..., :size].bfloat16().double(), up_key.double())
    turned = rotate(both[..., size:], cos.double()[:, None], sin.double()[:, None])
    if small:
        factor = query_scale.cpu().double()
        close(query_scale, absorbed.abs().amax(-1, keepdim=True) / 127, ulps=1e5)
        torch.testing.assert_close(
            query.cpu().double() * factor, absorbed, atol=2 * float(factor.max()), rtol=0
        )
        torch.testing.assert_close(rope.cpu().double() * factor / 40, turned, atol=2e-2, rtol=2e-2)
    else:
        close(query, absorbed, ulps=8)
        close(rope, turned, ulps=8)
    keys = product(wide, down_key, "dequant_scale_w_dkv_kr")
    key = rms(keys[:, :latent], gammas[1].double())
    key = (key * 40).round().clamp(-128, 127) if small else key
    key_rope = rotate(keys[:, latent:], cos.double(), sin.double())
    for cache, rows, result in zip(caches, (key, key_rope), ours, strict=True):
        expected = torch.zeros(cache.shape).double()
        unit = 32 // cache.element_size() if mode == "PA_NZ" else rows.size(1)
        for slot, row in zip(index.tolist(), rows, strict=True):
            expected.view(3, -1, 16, unit)[slot // 16, :, slot % 16] = (
                row.view(-1, unit) if mode == "PA_NZ" else row
            )
        whole = cache.dtype == torch.int8
        torch.testing.assert_close(
            result.cpu().double(), expected, atol=1 if whole else 3e-2, rtol=0 if whole else 3e-2
        )


NAMES = [
    "token_x",
    "weight_dq",
    "weight_uq_qr",
    "weight_uk",
    "weight_dkv_kr",
    "rmsnorm_gamma_cq",
    "rmsnorm_gamma_ckv",
]
NAMES += ["rope_sin", "rope_cos", "kv_cache", "kr_cache", "cache_index"]
FLOAT, INT8 = {"dtype": torch.float32}, {"dtype": torch.int8}
SMALL_UP = {
    "weight_uq_qr": INT8,
    "dequant_scale_w_uq_qr": {"size": (1, 384)} | FLOAT,
    "weight_quant_mode": 1,
}


def prolog(
    version=3,
    hidden=7168,
    low=1536,
    heads=2,
    size=128,
    latent=512,
    rotary=64,
    block=16,
    rows=(2,),
    **changes,
):
    """Call the operator with zeros; changes are options, or a tensor's dtype and shape."""
    shapes = [
        (*rows, hidden),
        (hidden, low),
        (low, heads * (size + rotary)),
        (heads, size, latent),
        (hidden, latent + rotary),
    ]
    shapes += [
        (low,),
        (latent,),
        (*rows, rotary),
        (*rows, rotary),
        (3, block, 1, latent),
        (3, block, 1, rotary),
        rows,
    ]
    dtypes = [torch.bfloat16] * 11 + [torch.int64]
    standard = {
        name: {"size": shape, "dtype": dtype}
        for name, shape, dtype in zip(NAMES, shapes, dtypes, strict=True)
    }
    given = standard | {
        name: standard.get(name, {}) | change if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    given = {
        name: torch.zeros(**each, device="npu") if isinstance(each, dict) else each
        for name, each in given.items()
    }
    getattr(torch_npu, f"npu_mla_prolog_v{version}")(**given)
    torch.npu.synchronize()


def test_sizes_that_mla_prolog_takes():
    prolog()
    prolog(rows=(3, 2), hidden=7680, block=128, heads=1)
    prolog(**SMALL_UP)
    prolog(
        kv_cache=INT8,
        kr_cache=INT8,
        quant_scale_ckv={"size": (1, 512)} | FLOAT,
        quant_scale_ckr={"size": (1, 64)} | FLOAT,
        kv_cache_quant_mode=2,
        **SMALL_UP,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 5120}, "the hidden size of token_x is 5120; allowed: 6144, 7168, 7680"),
        ({"hidden": 6144, "version": 2}, "the hidden size of token_x is 6144; allowed: 7168"),
        ({"low": 1024}, "the latent size of a query is 1024; allowed: 1536"),
        ({"latent": 256}, "the latent size of a key is 256; allowed: 512"),
        ({"size": 192}, "the head size without rotary embedding is 192; allowed: 128"),
        ({"rotary": 32}, "the head size with rotary embedding is 32; allowed: 64"),
        ({"heads": 3}, "the number of heads is 3; allowed: 1, 2, 4, 8, 16, 32, 64, 128"),
        ({"block": 64}, "the block size is 64; allowed: 16, 128"),
        ({"rows": (1, 17)}, "the sequence length of token_x is 17; allowed: 0 to 16"),
        (
            {"kr_cache": {"size": (4, 16, 1, 64)}},
            "kr_cache has shape [4, 16, 1, 64]; it must be [3, 16, 1, 64]",
        ),
        ({"cache_index": {"size": (1, 2)}}, "cache_index has shape [1, 2]; it must be [2]"),
        ({"cache_index": {"dtype": torch.int32}}, "cache_index"),
        ({"rmsnorm_gamma_cq": FLOAT}, "rmsnorm_gamma_cq"),
        ({"rope_cos": FLOAT}, "rope_cos"),
        ({"kv_cache": {"dtype": torch.float16}}, "kv_cache"),
        ({"token_x": {"dtype": torch.float16}}, "token_x"),
        ({"weight_quant_mode": 1}, "weight_quant_mode is 1; it must be 0 for bfloat16 weights"),
        (SMALL_UP | {"weight_quant_mode": 0}, "weight_quant_mode is 0"),
        (
            SMALL_UP | {"dequant_scale_w_uq_qr": {"size": (1, 192)} | FLOAT},
            "dequant_scale_w_uq_qr's number of elements is 192",
        ),
        ({"kv_cache_quant_mode": 1}, "kv_cache_quant_mode is 1"),
        ({"query_quant_mode": 1}, "query_quant_mode is 1; allowed: 0"),
        (
            {
                "kv_cache": INT8,
                "quant_scale_ckv": {"size": (1, 512)} | FLOAT,
                "kv_cache_quant_mode": 2,
            },
            "kv_cache is int8 and weight",
        ),
    ],
)
def test_sizes_and_dtypes_that_mla_prolog_does_not_take(changes, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        prolog(**changes)


PAGES = torch.tensor([[3, 0, 5], [1, 4, 2]], dtype=torch.int32)
COUNTS, LENGTHS, BLOCK = [2, 2], [40, 25], 16


def rows_of(cache):
    """Tokens of each request in the pages, ``[length, D]``."""
    return [cache[pages].flatten(0, 2)[:n] for pages, n in zip(PAGES, LENGTHS, strict=True)]


def paged(layout, mode, keys="key"):
    ends = [2, 4] if layout == "TND" else COUNTS
    return {
        "actual_seq_lengths_query": torch.tensor(ends, dtype=torch.int32).npu(),
        f"actual_seq_lengths_{keys}": torch.tensor(LENGTHS, dtype=torch.int32).npu(),
        "block_table": PAGES.npu(),
        "layout_query": layout,
        "layout_key" if keys == "key" else "layout_kv": "PA_BSND",
        "sparse_mode": mode,
    }


def split(x, layout):
    return (x if layout == "TND" else x.view(2, 2, *x.shape[1:])).npu()


@pytest.mark.parametrize("small", [False, True], ids=["float16", "int8"])
@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("mode", [0, 3])
def test_lightning_indexer(mode, layout, small):
    heads, size = 4, 128
    query, weights, keys = (
        torch.randn(4, heads, size).half(),
        torch.rand(4, heads).half(),
        torch.randn(6, BLOCK, 1, size).half(),
    )
    given = paged(layout, mode) | {"sparse_count": 30}
    if small:
        query8, keys8 = (torch.randint(-127, 128, x.shape, dtype=torch.int8) for x in (query, keys))
        query_scale, key_scale = (
            (torch.rand(4, heads) + 0.5).half(),
            (torch.rand(6, BLOCK, 1) + 0.5).half(),
        )
        query, keys = (
            query8.double() * query_scale.double()[..., None],
            keys8.double() * key_scale.double()[..., None],
        )
        chosen = torch_npu.npu_quant_lightning_indexer(
            split(query8, layout),
            keys8.npu(),
            split(weights, layout),
            split(query_scale, layout),
            key_scale.npu(),
            0,
            0,
            **given,
        )
    else:
        chosen = torch_npu.npu_lightning_indexer(
            split(query, layout), keys.npu(), split(weights, layout), **given
        )[0]
    flat, rows = chosen.cpu().view(4, 30), rows_of(keys)
    for t in range(4):
        seen = LENGTHS[t // 2] - (1 - t % 2 if mode == 3 else 0)
        scores = (
            torch.einsum("nd,ld->nl", query[t].double(), rows[t // 2].double()).relu()
            * weights[t].double()[:, None]
        )
        order = scores.sum(0)[:seen].argsort(descending=True)[:30]
        assert set(flat[t][flat[t] >= 0].tolist()) == set(order.tolist())
        assert (flat[t] >= 0).sum() == len(order)
        assert (flat[t, len(order) :] == -1).all()


@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("mode", [0, 3])
def test_sparse_flash_attention(mode, layout):
    """Also named tokens that the mask hides. The value is the key."""
    heads = 4
    query, ropes = torch.randn(4, heads, 512).half(), torch.randn(4, heads, 64).half()
    keys, key_ropes = torch.randn(6, BLOCK, 1, 512).half(), torch.randn(6, BLOCK, 1, 64).half()
    named = torch.full((4, 1, 30), -1, dtype=torch.int32)
    for t, count in enumerate([30, 7, 25, 1]):
        named[t, 0, :count] = torch.randperm(LENGTHS[t // 2])[:count]
    out = torch_npu.npu_sparse_flash_attention(
        split(query, layout), keys.npu(), keys.npu(), split(named, layout), 0.1, sparse_block_size=1,
        query_rope=split(ropes, layout), key_rope=key_ropes.npu(), attention_mode=2, **paged(layout, mode, "kv"),
    )[0]  # fmt: skip
    for t in range(4):
        seen = LENGTHS[t // 2] - (1 - t % 2 if mode == 3 else 0)
        own = named[t, 0][(named[t, 0] >= 0) & (named[t, 0] < seen)].long()
        key = torch.cat([rows_of(keys)[t // 2], rows_of(key_ropes)[t // 2]], -1)[own].double()
        scores = torch.cat([query[t], ropes[t]], -1).double() @ key.t() * 0.1
        close(out.view(4, heads, 512)[t], scores.softmax(-1) @ key[:, :512], ulps=8)


SINKS_OF_SPARSE_ATTENTION = needs_argument("npu_sparse_flash_attention", "sinks")
SINKS = """
    import torch, torch_npu
    heads, ends = 4, torch.tensor([2], dtype=torch.int32).npu()
    query, rope, keys, key_rope = (torch.randn(n, h, w).half() for n, h, w in
                                   [(2, heads, 512), (2, heads, 64), (20, 1, 512), (20, 1, 64)])
    sinks, named = torch.randn(heads), torch.randperm(20)[:12].int()
    out = torch_npu.npu_sparse_flash_attention(
        query.npu(), keys.npu(), keys.npu(), named.expand(2, 1, 12).contiguous().npu(), 0.1, sinks=sinks.npu(),
        query_rope=rope.npu(), key_rope=key_rope.npu(), attention_mode=2, sparse_block_size=1, sparse_mode=0,
        actual_seq_lengths_query=ends, actual_seq_lengths_kv=ends + 18, layout_query="TND", layout_kv="TND",
    )[0]
    key = torch.cat([keys, key_rope], -1)[named.long(), 0].double()
    scores = torch.cat([query, rope], -1).double() @ key.t() * 0.1
    weights = torch.cat([scores, sinks.double()[None, :, None].expand(2, heads, 1)], -1).softmax(-1)[..., :12]
    torch.testing.assert_close(out.cpu().double(), weights @ key[:, :512], atol=8e-3, rtol=8e-3)
    print("as in float64")
"""


@SINKS_OF_SPARSE_ATTENTION
def test_sparse_flash_attention_with_sinks_on_950(run):
    done = run(
        "run", "--soc", "Ascend950PR_9599", "--", sys.executable, "-c", textwrap.dedent(SINKS)
    )
    assert "as in float64" in done.stdout, done.stderr


def attend_sparsely(heads=4, size=512, block=BLOCK, key_rope=None, **given):
    query, cache = (
        torch.zeros(4, heads, size).half().npu(),
        torch.zeros(6, block, 1, size).half().npu(),
    )
    rope = torch.zeros(4, heads, 64).half().npu()
    key_rope = torch.zeros(6, block, 1, 64).half().npu() if key_rope is None else key_rope
    named = torch.zeros(4, 1, 8, dtype=torch.int32).npu()
    options = (
        {"query_rope": rope, "key_rope": key_rope, "attention_mode": 2}
        | paged("TND", 3, "kv")
        | given
    )
    torch_npu.npu_sparse_flash_attention(query, cache, cache, named, 0.1, **options)


def select_sparsely(heads=4, size=128, block=BLOCK, key=None, **given):
    key = torch.zeros(6, block, 1, size).half().npu() if key is None else key
    query, weights = torch.zeros(4, heads, size).half().npu(), torch.zeros(4, heads).half().npu()
    torch_npu.npu_lightning_indexer(
        query, key, weights, **{"sparse_count": 8} | paged("TND", 3) | given
    )


def multiplied(batch, inner, columns, turned=False):
    """Arguments of npu_transpose_batchmatmul, with one row."""
    x = torch.zeros((1, batch, inner) if turned else (batch, 1, inner)).half().npu()
    return x, torch.zeros(batch, inner, columns).half().npu()


def select_quantized(apart="", sparse_count=8, **dtypes):
    """The tensor ``apart`` is a view that is not contiguous."""
    shapes = {"weights": (4, 4), "query_scale": (4, 4), "key_scale": (6, BLOCK, 1)}
    given = {
        name: torch.zeros(*shape, 2, dtype=dtypes.get(name, torch.float16)).npu()
        for name, shape in shapes.items()
    }
    given = {
        name: x[..., 0] if name == apart else x[..., 0].contiguous() for name, x in given.items()
    }
    query, key = (
        torch.zeros(shape, dtype=torch.int8).npu() for shape in ((4, 4, 128), (6, BLOCK, 1, 128))
    )
    torch_npu.npu_quant_lightning_indexer(
        query, key, *given.values(), 0, 0, sparse_count=sparse_count, **paged("TND", 3)
    )


def strided(size):
    """Pages of one part of a wider cache."""
    return torch.zeros(6, BLOCK, 1, 2 * size).half().npu()[..., :size]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: select_sparsely(heads=65), "heads of query is 65; allowed: 1 to 64"),
        (lambda: select_sparsely(size=64), "have 64 and 64 elements; 128 are expected"),
        (lambda: select_sparsely(block=24), "the block size of key is 24"),
        (lambda: select_sparsely(block=2048), "the block size of key is 2048; allowed: 16 to 1024"),
        (lambda: select_sparsely(key=strided(128)), "key"),
        (lambda: select_sparsely(sparse_count=2049), "sparse_count is 2049"),
        (
            lambda: select_quantized(weights=torch.bfloat16),
            "weights is BFloat16 (DT_BFLOAT16); allowed: Half",
        ),
        (
            lambda: select_quantized(query_scale=torch.float32),
            "query_dequant_scale is Float (DT_FLOAT); allowed: Half",
        ),
        (
            lambda: select_quantized(key_scale=torch.float32),
            "key_dequant_scale is Float (DT_FLOAT); allowed: Half",
        ),
        (lambda: select_quantized(apart="query_scale"), "query_dequant_scale"),
        (lambda: select_quantized(apart="key_scale"), "key_dequant_scale"),
        (lambda: select_quantized(sparse_count=3072), "sparse_count is 3072; allowed: 1 to 2048"),
        (
            lambda: select_sparsely(return_value=True),
            "return_value is not supported with pages of keys",
        ),
        (lambda: attend_sparsely(heads=6), "heads of query is 6; allowed: powers of two to 128"),
        (lambda: attend_sparsely(size=256), "have 256 and 64 elements; 512 and 64 are expected"),
        (lambda: attend_sparsely(attention_mode=0), "attention_mode is 0"),
        (
            lambda: attend_sparsely(sparse_block_size=3),
            "sparse_block_size is 3; allowed: powers of two to 128",
        ),
        (
            lambda: attend_sparsely(sparse_block_size=32),
            "sparse_block_size 32 does not divide the block size 16",
        ),
        (lambda: attend_sparsely(query_rope=None), "query_rope and key_rope must be given"),
        (lambda: attend_sparsely(key_rope=strided(64)), "key_rope"),
        (
            lambda: attend_sparsely(return_softmax_lse=True),
            "return_softmax_lse is not supported with pages of keys",
        ),
        pytest.param(
            lambda: attend_sparsely(sinks=torch.zeros(4).npu()),
            "this operator is supported on Ascend950",
            marks=SINKS_OF_SPARSE_ATTENTION,
        ),
    ],
)
def test_limits_of_the_indexer_and_of_sparse_attention(call, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: torch_npu.npu_attention_update([x[0]], [x.half(), x.half()], 0),
            "lists of 1 lse and 2 local_out",
        ),
        (
            lambda x: torch_npu.npu_attention_update([x[0]] * 17, [x.repeat(1, 2)] * 17, 0),
            "lists of 17 lse and local_out; at most 16 are allowed",
        ),
        (
            lambda x: torch_npu.npu_attention_update([x[0]], [x], 0),
            "head_dim of local_out is 4; allowed: 8 to 512",
        ),
        (
            lambda x: torch_npu.npu_attention_update([x[0]], [x.repeat(1, 3)], 0),
            "head_dim of local_out is 12",
        ),
        (lambda x: torch_npu.npu_transpose_batchmatmul(*multiplied(1, 8, 16)), "K is 8"),
        (lambda x: torch_npu.npu_transpose_batchmatmul(*multiplied(1, 16, 8)), "N is 8"),
        (
            lambda x: torch_npu.npu_transpose_batchmatmul(*multiplied(1, 65536, 16)),
            "K is 65536; allowed: 1 to 65535",
        ),
        (
            lambda x: torch_npu.npu_transpose_batchmatmul(
                *multiplied(4096, 16, 16, turned=True), perm_x1=(1, 0, 2)
            ),
            "K x B is 65536; allowed: 1 to 65535",
        ),
        (
            lambda x: torch_npu.npu_transpose_batchmatmul(x[None], x[None], perm_x1=(2, 1, 0)),
            "perm_x1 should be [0, 1, 2] or [1, 0, 2]",
        ),
    ],
)
def test_arguments_outside_the_documentation_are_refused(call, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call(torch.randn(4, 4).npu())
