# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Lightning indexer and sparse attention, against references in float64."""

import re
import sys
import textwrap

import pytest
import torch
import torch_npu
from cann_calls import needs_argument
from comparisons import close

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
        selected = named[t, 0][(named[t, 0] >= 0) & (named[t, 0] < seen)].long()
        key = torch.cat([rows_of(keys)[t // 2], rows_of(key_ropes)[t // 2]], -1)[selected].double()
        scores = torch.cat([query[t], ropes[t]], -1).double() @ key.t() * 0.1
        close(out.view(4, heads, 512)[t], scores.softmax(-1) @ key[:, :512], ulps=8)


def packed(keys, ropes):
    """Int8 latents, rotated elements and scales of tiles as one row of bytes, and the dequantized
    latents in the ropes' dtype."""
    scales = torch.rand(*keys.shape[:-1], 4) / 64 + 1 / 128
    rows = torch.cat([keys, ropes.view(torch.int8), scales.view(torch.int8)], -1)
    return rows, (keys * scales.repeat_interleave(128, -1)).to(ropes.dtype)


@pytest.mark.parametrize("value_width", [512, 656])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["BSND", "TND"])
@pytest.mark.parametrize("mode", [0, 3])
def test_kv_quant_sparse_flash_attention(mode, layout, dtype, value_width):
    heads = 4
    query = torch.randn(4, heads, 576, dtype=dtype)
    keys = torch.randint(-127, 128, (6, BLOCK, 1, 512), dtype=torch.int8)
    ropes = torch.randn(6, BLOCK, 1, 64, dtype=dtype)
    rows, latents = packed(keys, ropes)
    named = torch.full((4, 1, 30), -1, dtype=torch.int32)
    for t, count in enumerate([30, 7, 25, 1]):
        named[t, 0, :count] = torch.randperm(LENGTHS[t // 2])[:count]
    values = rows[..., :value_width].contiguous().npu()
    out = torch_npu.npu_kv_quant_sparse_flash_attention(
        split(query, layout), rows.npu(), values, split(named, layout), 0.1, 2, 2, attention_mode=2,
        **paged(layout, mode, "kv"),
    )  # fmt: skip
    for t in range(4):
        seen = LENGTHS[t // 2] - (1 - t % 2 if mode == 3 else 0)
        selected = named[t, 0][(named[t, 0] >= 0) & (named[t, 0] < seen)].long()
        key = torch.cat([rows_of(latents)[t // 2], rows_of(ropes)[t // 2]], -1)[selected].double()
        scores = query[t].double() @ key.t() * 0.1
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


def attend_to_int8(
    heads=4, size=576, width=656, key=None, modes=(2, 2), dtype=torch.bfloat16, **given
):
    query = torch.zeros(4, heads, size, dtype=dtype).npu()
    key = torch.zeros(6, BLOCK, 1, width, dtype=torch.int8).npu() if key is None else key
    named = torch.zeros(4, 1, 8, dtype=torch.int32).npu()
    options = {"attention_mode": 2} | paged("TND", 3, "kv") | given
    torch_npu.npu_kv_quant_sparse_flash_attention(query, key, key, named, 0.1, *modes, **options)


def select_sparsely(heads=4, size=128, block=BLOCK, key=None, **given):
    key = torch.zeros(6, block, 1, size).half().npu() if key is None else key
    query, weights = torch.zeros(4, heads, size).half().npu(), torch.zeros(4, heads).half().npu()
    torch_npu.npu_lightning_indexer(
        query, key, weights, **{"sparse_count": 8} | paged("TND", 3) | given
    )


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
        (lambda: select_sparsely(heads=65), "dimension -2 of query is 65; allowed: 1 to 64"),
        (lambda: select_sparsely(size=64), "the last dimension of query is 64; allowed: 128"),
        (lambda: select_sparsely(block=24), "dimension 1 of key is 24"),
        (lambda: select_sparsely(block=2048), "dimension 1 of key is 2048; allowed: 16 to 1024"),
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
            "rule lightning_indexer.return-value",
        ),
        (lambda: attend_sparsely(heads=6), "dimension -2 of query is 6; allowed: 1, 2, 4"),
        (lambda: attend_sparsely(size=256), "the last dimension of query is 256; allowed: 512"),
        (lambda: attend_sparsely(attention_mode=0), "attention_mode is 0"),
        (
            lambda: attend_sparsely(sparse_block_size=3),
            "sparse_block_size is 3; allowed: 1, 2, 4",
        ),
        (
            lambda: attend_sparsely(sparse_block_size=32),
            "sparse_block_size 32 does not divide the block size 16",
        ),
        (lambda: attend_sparsely(query_rope=None), "query_rope is needed"),
        (lambda: attend_sparsely(key_rope=strided(64)), "key_rope"),
        (
            lambda: attend_sparsely(return_softmax_lse=True),
            "return_softmax_lse is 1; allowed: 0",
        ),
        (lambda: attend_to_int8(heads=48), "dimension -2 of query is 48; allowed: 1, 2, 4"),
        (lambda: attend_to_int8(size=512), "the last dimension of query is 512; allowed: 576"),
        (lambda: attend_to_int8(width=640), "the last dimension of key is 640; allowed: 656"),
        (lambda: attend_to_int8(dtype=torch.float32), "query is Float (DT_FLOAT); allowed: B"),
        (lambda: attend_to_int8(modes=(1, 2)), "key_quant_mode is 1; allowed: 2"),
        (lambda: attend_to_int8(modes=(2, 1)), "value_quant_mode is 1; allowed: 2"),
        (lambda: attend_to_int8(attention_mode=0), "attention_mode is 0; allowed: 2"),
        (lambda: attend_to_int8(quant_scale_repo_mode=0), "quant_scale_repo_mode is 0; allowed: 1"),
        (lambda: attend_to_int8(tile_size=64), "tile_size is 64; allowed: 128"),
        (lambda: attend_to_int8(sparse_block_size=32), "sparse_block_size is 32; allowed: 1, 2"),
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
