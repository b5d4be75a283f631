# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""ATB's operators (libatb.so), through torch_npu's libop_plugin_atb.so, against their definitions
in float64."""

import functools

import comparisons
import pytest
import torch
import torch_npu

close = functools.partial(comparisons.close, ulps=6)

HALVES = [torch.float16, torch.bfloat16]
HEADS = [(4, 4), (8, 2), (6, 1)]  # query heads, key and value heads
BLOCK = 16


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def reference(query, key, value, scale, bias=None):
    """query [t, n, d], key [l, m, d] and value [l, m, e]; returns [t, n, e] and the log-sum-exp [n,
    t], float64."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    scores = torch.einsum("tnd,lnd->ntl", query, key) * scale
    if bias is not None:
        scores = scores + bias
    return torch.einsum("ntl,lnd->tnd", scores.softmax(-1), value), scores.logsumexp(-1)


def hidden(queries, keys):
    """The causal bias, aligned at the right lower corner."""
    return torch.full((queries, keys), -torch.inf, dtype=torch.float64).triu(keys - queries + 1)


def paged(lengths, groups, size, dtype, value_size=None):
    """Keys and values [l, m, d] of each request, their caches [blocks, block_size, m, d], some of
    no request, and the table."""
    keys, values = (
        [torch.randn(n, groups, d).to(dtype) for n in lengths] for d in (size, value_size or size)
    )
    needed = [-(-n // BLOCK) for n in lengths]
    caches = [
        torch.full((sum(needed) + 3, BLOCK, groups, d), 1e4, dtype=dtype)
        for d in (size, value_size or size)
    ]
    free = torch.randperm(sum(needed) + 3).tolist()
    # holes, that are not looked at
    table = torch.full((len(lengths), max(needed) + 1), -7, dtype=torch.int32)
    for row, count in enumerate(needed):
        for i in range(count):
            table[row, i] = block = free.pop()
            for cache, all_rows in zip(caches, (keys, values), strict=True):
                part = all_rows[row][i * BLOCK : (i + 1) * BLOCK]
                cache[block, : len(part)] = part
    return keys, values, *(cache.npu() for cache in caches), table.npu()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("where", ["cpu", "npu"])
def test_paged_attention(where, heads, dtype):
    """With sequence lengths on the host or on the device, and with a padding request of zero
    tokens."""
    lengths = [17, 1, 32, 0, 5]
    query = torch.randn(5, heads[0], 32).to(dtype)
    keys, values, *caches, table = paged(lengths, heads[1], 32, dtype, 24)
    out = torch.full((5, heads[0], 24), 9.0, dtype=dtype).npu()
    torch_npu._npu_paged_attention(
        query.npu(), *caches, heads[1], heads[0], 0.2, table, int32(*lengths).to(where), out
    )
    for i, length in enumerate(lengths):
        if length:
            close(out[i : i + 1], reference(query[i : i + 1], keys[i], values[i], 0.2)[0])
    assert not out[3].any()


@pytest.mark.parametrize("alibi", [None, "each", "all"])
def test_paged_attention_v2(alibi):
    lengths = [17, 40]
    query = torch.randn(2, 4, 16).half()
    keys, values, *caches, table = paged(lengths, 2, 16, torch.float16)
    mask = (
        None if alibi is None else torch.randn(*([2] if alibi == "each" else []), 4, 1, 48).half()
    )
    out = torch.empty(2, 4, 16).half().npu()
    options = {
        "value_cache": caches[1],
        "mask": None if mask is None else mask.npu(),
        "num_kv_heads": 2,
        "num_heads": 4,
    }
    options |= {"scale_value": 0.25, "mask_type": 0 if alibi is None else 2, "out": out}
    workspace = torch_npu.atb._npu_paged_attention_v2_get_workspace(
        query.npu(), caches[0], table, lengths, **options
    )
    torch_npu.atb._npu_paged_attention_v2(
        query.npu(), caches[0], table, lengths, workspace=workspace, **options
    )
    for i, length in enumerate(lengths):
        bias = (
            None if mask is None else (mask[i] if alibi == "each" else mask)[:, :, :length].double()
        )
        close(out[i : i + 1], reference(query[i : i + 1], keys[i], values[i], 0.25, bias)[0])


def test_paged_attention_mla():
    """Values are the first numbers of the keys."""
    lengths = [20, 3]
    query = torch.randn(2, 4, 24).half()
    keys, _, cache, _, table = paged(lengths, 1, 24, torch.float16)
    out = torch.empty(2, 4, 16).half().npu()
    torch_npu._npu_paged_attention_mla(
        query.npu(), cache, 1, 4, 0.3, table, int32(*lengths), 16, out
    )
    for i, key in enumerate(keys):
        close(out[i : i + 1], reference(query[i : i + 1], key, key[..., :16], 0.3)[0])


def test_paged_attention_quant():
    """Of int8 everything: the largest probability of a row counts as 127 (op-plugin's
    test_atb_paged_attention_quant.py)."""
    query = torch.randint(-9, 9, (1, 4, 32), dtype=torch.int8)
    cache = torch.randint(-9, 9, (2, BLOCK, 2, 32), dtype=torch.int8)
    scales = torch.rand(2, 4) * 0.1
    out = torch.empty(1, 4, 32).bfloat16().npu()
    table = int32(1, 0)[None].npu()
    torch_npu._npu_paged_attention_quant(
        query.npu(),
        cache.npu(),
        cache.npu(),
        2,
        4,
        0.25,
        table,
        int32(20),
        3,
        27,
        scales[0].npu(),
        scales[1].npu(),
        out,
    )
    rows = torch.cat([cache[1], cache[0, :4]]).repeat_interleave(2, 1).double()
    scores = (
        torch.einsum("nd,lnd->nl", query[0].double(), rows) * scales[0].double()[:, None] * 0.25
    )
    weights = (scores - scores.amax(-1, True)).exp()
    expected = (
        torch.einsum("nl,lnd->nd", (weights * 127).round(), rows)
        / 127
        * scales[1].double()[:, None]
    )
    close(out[0], expected / weights.sum(-1, True), ulps=8)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    "form", ["splitfuse", "splitfuse_v2", "qlens", "prefix_v2", "prefix_encoder"]
)
def test_several_queries_over_pages(form, heads, dtype):
    """Causal, with queries that are the last tokens of their requests."""
    counts, lengths = [5, 1, 16], [20, 33, 16]
    query = torch.randn(sum(counts), heads[0], 32).to(dtype)
    keys, values, *caches, table = paged(lengths, heads[1], 32, dtype)
    out = torch.empty_like(query).npu()
    mask = torch.zeros(128, 128, dtype=dtype).npu()  # The mode determines what is left out.
    if form.startswith("splitfuse"):
        extra = {}
        if form == "splitfuse":  # a row for each query
            mask = torch.zeros(sum(counts), 48)
            for rows, count, length in zip(mask.split(counts), counts, lengths, strict=True):
                rows[:, :length] = hidden(count, length).clamp(-10000)
            mask = mask.to(dtype).npu()
        function = getattr(torch_npu, f"_npu_paged_attention_{form}")
        function(
            query.npu(),
            *caches,
            table,
            int32(*lengths),
            mask,
            int32(*counts),
            heads[1],
            heads[0],
            0.2,
            out=out,
            **extra,
        )
    elif form == "qlens":
        torch_npu._npu_flash_attention_qlens(
            query.npu(),
            *caches,
            table,
            mask,
            int32(*counts),
            int32(*lengths),
            heads[1],
            heads[0],
            0.2,
            out,
        )
    elif form == "prefix_v2":
        options = {"num_kv_heads": heads[1], "num_heads": heads[0], "scale_value": 0.2, "out": out}
        torch_npu.atb._npu_flash_attention_prefix_v2(
            query.npu(), *caches, table, mask, counts, lengths, **options
        )
    else:
        out = torch_npu.atb.npu_self_attention_prefix_encoder(
            query.npu(), *caches, table, counts, lengths, heads[0], 0.2, heads[1]
        )
    for i, (rows, ours) in enumerate(zip(query.split(counts), out.split(counts), strict=True)):
        close(ours, reference(rows, keys[i], values[i], 0.2, hidden(counts[i], lengths[i]))[0])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("form", ["mask", "masks", "v3", "unpad", "unpad_v2"])
def test_flash_attention_over_packed_requests(form, heads, dtype):
    lengths = [7, 19, 1]
    query, key, value = (
        torch.randn(30, n, d).to(dtype)
        for n, d in zip((heads[0], *heads[1:] * 2), (32, 32, 24), strict=True)
    )
    out = torch.full((30, heads[0], 24), 9.0, dtype=dtype).npu()
    given = [x.npu() for x in (query, key, value)]
    mask = torch.full((24, 24), -10000.0).triu(1)
    if dtype == torch.bfloat16:
        mask = mask.ne(0).float()  # In masks of this dtype, a one leaves the score out.
    if form == "masks":
        mask = mask.repeat(3, 1, 1)
        mask[:, :, 0] = mask[0, 0, 1] * torch.tensor([0, 1, 0])[:, None]
        mask[1, 0, 0] = 0
    if form.startswith("mask"):
        torch_npu._npu_flash_attention(
            *given, mask.to(dtype).npu(), int32(*lengths), 0.2, *heads, out
        )
    elif form == "v3":
        torch_npu._npu_flash_attention_v3(
            *given, torch.zeros(128, 128, dtype=dtype).npu(), int32(*lengths), 0.2, *heads, out=out
        )
    else:
        getattr(torch_npu, f"_npu_flash_attention_{form}")(
            *given, int32(*lengths), 0.2, *heads, out=out
        )
    start = 0
    for i, length in enumerate(lengths):
        part = slice(start, start + length)
        bias = None if form.startswith("unpad") else hidden(length, length)
        if form == "masks" and i == 1:
            bias[1:, 0] = -torch.inf
        close(out[part], reference(query[part], key[part], value[part], 0.2, bias)[0])
        start += length
    assert (out[start:] == 9).all()  # rows of no request


def slopes(heads):
    return 2.0 ** -torch.arange(1, heads + 1)


def distances(queries, keys, roots):
    outside = (
        (torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)).clamp(0).double()
    )
    return outside.sqrt() if roots else outside


@pytest.mark.parametrize("kind", ["mask", "each", 4, 5])
def test_alibi(kind):
    """mask_type 2, a bias for each head; 4 and 5, a mask of distances or their roots, times a
    factor for each head."""
    lengths, heads = [300, 20], 4
    query, key, value = (torch.randn(320, n, 16).bfloat16() for n in (heads, 2, 2))
    roots = kind == 5
    bias = [
        -slopes(heads).double()[:, None, None] * distances(n, n, roots) + hidden(n, n)
        for n in lengths
    ]
    if isinstance(kind, int):
        mask = distances(256, 256, roots) + torch.full((256, 256), torch.inf).triu(1)
        options = {"mask": mask.bfloat16().npu(), "slopes": -slopes(heads).npu(), "mask_type": kind}
    else:
        mask = bias[0].bfloat16()
        if kind == "each":
            mask = torch.stack([mask, mask * 2])
            bias[1] = bias[1] * 2
        bias = [one.bfloat16().double() for one in bias]
        options = {"mask": mask.npu(), "mask_type": 2}
    out = torch.empty_like(query).npu()
    options |= {"scale_value": 0.25, "num_heads": heads, "num_kv_heads": 2, "out": out}
    torch_npu.atb._npu_flash_attention_v2(query.npu(), key.npu(), value.npu(), lengths, **options)
    for i, part in enumerate((slice(0, 300), slice(300, 320))):
        close(out[part], reference(query[part], key[part], value[part], 0.25, bias[i])[0])


@pytest.mark.parametrize("kind", [4, 5])
def test_alibi_over_pages(kind):
    counts, lengths = [3, 20], [35, 20]
    query = torch.randn(23, 4, 16).bfloat16()
    keys, values, *caches, table = paged(lengths, 2, 16, torch.bfloat16)
    mask = (
        (distances(256, 256, kind == 5) + torch.full((256, 256), torch.inf).triu(1))
        .bfloat16()
        .npu()
    )
    options = {
        "slopes": -slopes(4).npu(),
        "mask_type": kind,
        "num_kv_heads": 2,
        "num_heads": 4,
        "scale_value": 0.25,
    }
    out = torch.empty_like(query).npu()
    torch_npu.atb._npu_flash_attention_prefix_v2(
        query.npu(), *caches, table, mask, counts, lengths, out=out, **options
    )
    for i, (rows, ours) in enumerate(zip(query.split(counts), out.split(counts), strict=True)):
        bias = -slopes(4).double()[:, None, None] * distances(
            counts[i], lengths[i], kind == 5
        ) + hidden(counts[i], lengths[i])
        close(ours, reference(rows, keys[i], values[i], 0.25, bias)[0])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("counts", [None, [1, 2, 1]])
def test_multi_head_latent_attention(counts, dtype):
    lengths, tokens = [20, 33, 2], sum(counts or [1] * 3)
    query = torch.randn(tokens, 4, 40).to(dtype)
    keys, _, cache, _, table = paged(lengths, 1, 40, dtype)
    split = [x.contiguous() for x in query.npu().split([32, 8], -1)]
    caches = [x.contiguous() for x in cache.split([32, 8], -1)]
    out, lse = torch_npu.atb.npu_multi_head_latent_attention(
        *split, *caches, table, lengths, 4, 0.2, 1, True, qseqlen=counts, calc_type="calc_type_ring"
    )
    plain = torch_npu.atb.npu_multi_head_latent_attention(
        *split, *caches, table, lengths, 4, 0.2, 1, qseqlen=counts
    )
    assert torch.equal(out, plain)
    for rows, ours, sums, key in zip(
        *(x.split(counts or 1) for x in (query, out, lse)), keys, strict=True
    ):
        expected, expected_lse = reference(rows, key, key[..., :32], 0.2)
        close(ours, expected)
        close(sums[..., 0], expected_lse.t())


@pytest.mark.parametrize("triangular", [True, False])
def test_ring_mla(triangular):
    """Keys in two parts: the second call takes what the first gave."""
    counts, parts = [5, 3], [[9, 4], [5, 3]]
    query = torch.randn(8, 4, 24).half()
    keys = [torch.randn(sum(n), 2, 24).half() for n in parts]
    values = [torch.randn(sum(n), 2, 16).half() for n in parts]
    mask = torch.ones(512, 512).half().triu(1).npu()

    def ring(part, **options):
        split = [
            x.contiguous().npu()
            for source in (query, keys[part])
            for x in source.split([16, 8], -1)
        ]
        seqlen = torch.stack([int32(*counts), int32(*parts[part])])
        return torch_npu.atb.npu_ring_mla(
            *split, values[part].npu(), mask, seqlen, 4, 2, qk_scale=0.2, **options
        )

    out, lse = ring(0, calc_type="calc_type_first_ring")
    kind = "mask_type_triu" if triangular else "no_mask"
    out, lse = ring(1, calc_type="calc_type_default", mask_type=kind, pre_out=out, prev_lse=lse)
    for i, (rows, ours, sums) in enumerate(
        zip(query.split(counts), out.split(counts), lse.split(counts, 1), strict=True)
    ):
        key, value = (
            torch.cat([x.split(n)[i] for x, n in zip(both, parts, strict=True)])
            for both in (keys, values)
        )
        bias = torch.zeros(counts[i], parts[0][i] + parts[1][i], dtype=torch.float64)
        if triangular:
            bias[:, parts[0][i] :] = hidden(counts[i], counts[i])
        expected, expected_lse = reference(rows, key, value, 0.2, bias)
        close(ours, expected)
        torch.testing.assert_close(sums.cpu().double(), expected_lse, atol=1e-5, rtol=1e-5)


def test_captured_in_a_graph():
    """Replayed with the inputs' current values; sequence lengths on the host are those of the
    capture."""
    query, out = torch.randn(1, 2, 16).half().npu(), torch.empty(1, 2, 16).half().npu()
    keys, values, *caches, table = paged([20], 2, 16, torch.float16)
    rows, slots = torch.randn(1, 2, 16).half().npu(), int32(int(table[0, 0]) * BLOCK).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch_npu._npu_reshape_and_cache(rows, rows, *caches, slots)
        torch_npu._npu_paged_attention(query, *caches, 2, 2, 0.25, table, int32(20), out)
    for _ in range(2):
        rows.normal_()
        query.normal_()
        graph.replay()
        keys[0][0] = values[0][0] = rows[0].cpu()
        close(out, reference(query.cpu(), keys[0], values[0], 0.25)[0])


def test_calls_of_one_operator_within_a_capture():
    """Each computes its own tensors, though several are set up before the queue's thread launches
    the first."""
    inputs = [torch.full((3, 8), float(n)).half().npu() for n in range(40)]
    outputs = [torch.zeros(3, 8, dtype=torch.int8).npu() for _ in inputs]
    scale, offset = torch.ones(8).half().npu(), torch.zeros(8, dtype=torch.int8).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        for x, out in zip(inputs, outputs, strict=True):
            torch_npu._npu_quantize_per_tensor(x, scale, offset, out)
    graph.replay()
    assert [out.unique().tolist() for out in outputs] == [[n] for n in range(40)]
