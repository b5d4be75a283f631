# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fused attention on random paged batches, compared with softmax(q k^T) v in float64."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from ascend_attention import dense, int8, sinks
from ascend_attention.metadata import FusedAttentionMetadata
from ascend_platform.extension import RefusedError
from harness.references.paged_batches import (
    IMAGE_REQUESTS,
    IMAGES,
    KINDS,
    PagedBatch,
    Sizes,
    pairs,
    reference,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec, SlidingWindowSpec

BLOCK_SIZE, BLOCKS = dense.BLOCK_SIZE, 32


@pytest.fixture(autouse=True)
def current_config():
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (8, 2, 128), (4, 1, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_causal_attention(dtype, heads, kv_heads, size, kind):
    check(dtype, heads, kv_heads, size, kind)


@pytest.mark.parametrize("window", [1, 100, 128, 2000])
@pytest.mark.parametrize("kind", KINDS)
def test_sliding_windows(kind, window):
    check(torch.bfloat16, 8, 2, 64, kind, sliding_window=window)


@pytest.mark.parametrize("size", [80, 96, 112, 192, 256])
def test_head_sizes(size):
    check(torch.float16, 4, 2, size, "mixed")


@pytest.mark.parametrize(
    ("size", "expected"),
    [(64, True), (80, False), (96, False), (128, True), (192, True), (256, False)],
)
def test_one_query_head_for_each_key_value_head(size, expected):
    """The kernel takes three head sizes in layout TND; layers of others are refused when they are
    made."""
    text = (
        f"head_size {size} not supported with one query head for each key-value head; fix:"
        " VLLM_PLUGINS=ascend"
    )
    with nullcontext() if expected else pytest.raises(RefusedError, match=text):
        check(torch.bfloat16, 4, 4, size, "mixed")


@pytest.mark.parametrize(("size", "expected"), [(64, True), (80, False), (128, True)])
def test_sinks_of_one_query_head_for_each_key_value_head(size, expected):
    options = {"sinks": torch.ones(4, dtype=torch.bfloat16)}
    with (
        nullcontext()
        if expected
        else pytest.raises(RefusedError, match=f"head_size {size} not supported with one query")
    ):
        check(torch.bfloat16, 4, 4, size, "mixed", sinks.SinkAttentionBackend, **options)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_sinks(kind, window):
    sink_values = torch.tensor([0.5, 3.0, -1.0, 5.0], dtype=torch.bfloat16)
    check(
        torch.bfloat16,
        4,
        2,
        64,
        kind,
        sinks.SinkAttentionBackend,
        sliding_window=window,
        sinks=sink_values,
    )


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("backend", [dense.FusedAttentionBackend, sinks.SinkAttentionBackend])
def test_tokens_of_an_image_attend_in_both_directions(backend, window):
    rng, dtype = random.Random(0), torch.bfloat16
    batch = PagedBatch(Sizes(BLOCKS, BLOCK_SIZE, 4, 2, 64, dtype, 1e4), IMAGE_REQUESTS, rng)
    options = {"sinks": torch.ones(4, dtype=dtype)} if backend is sinks.SinkAttentionBackend else {}
    output = batch.run(backend, common=batch.common(IMAGES), sliding_window=window, **options)
    expected = batch.expected(IMAGES, window=window, **options)
    assert (expected - batch.expected(window=window, **options)).abs().max() > 0.1
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, atol=bound, rtol=bound)


def check(dtype, heads, kv_heads, size, kind, backend=dense.FusedAttentionBackend, **beyond):
    rng = random.Random(f"{heads}{kind}")
    requests = pairs(kind, rng, rng.randint(1, 5), 600)
    batch = PagedBatch(Sizes(BLOCKS, BLOCK_SIZE, heads, kv_heads, size, dtype, 1e4), requests, rng)
    output = batch.run(backend, joined=True, **beyond)
    expected = batch.expected(window=beyond.get("sliding_window"), sinks=beyond.get("sinks"))
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, atol=bound, rtol=bound)


def test_cross_attention():
    """Each token attends to all keys of its request. They are written in the first step; the second
    step has none."""
    heads, size, lengths, counts, dtype = 4, 64, [140, 7, 300], [1, 5, 3], torch.bfloat16
    keys, values = ([torch.randn(n, 2, size, dtype=dtype) for n in lengths] for _ in range(2))
    slots = torch.cat([torch.arange(n) + 3 * BLOCK_SIZE * r for r, n in enumerate(lengths)])
    cache = tuple(torch.full((2, 9, BLOCK_SIZE, 2, size), 1e4, dtype=dtype).npu())
    ends = torch.tensor(counts).cumsum(0).tolist()
    layer = dense.FusedAttentionImpl(heads, size, size**-0.5, 2, attn_type="encoder_decoder")
    for new in (slots, slots[:0]):
        meta = FusedAttentionMetadata(
            compute_lengths=lambda: {"actual_seq_lengths": ends, "actual_seq_lengths_kv": lengths},
            num_tokens=ends[-1],
            block_table=torch.arange(9, dtype=torch.int32).view(3, 3).npu(),
            slot_mapping=new.npu(),
            mask=torch.ones(2048, 2048, dtype=torch.int8).triu_(1).npu(),
            softmax_lse=torch.empty(1, device="npu"),
            causal=False,
        )
        queries = torch.randn(ends[-1], heads, size, dtype=dtype)
        output = torch.empty(ends[-1], heads, size, dtype=dtype, device="npu")
        pair = (torch.cat(keys).npu(), torch.cat(values).npu()) if len(new) else (None, None)
        layer.forward(None, queries.npu(), *pair, cache, meta, output)
        per_request = zip(queries.split(counts), keys, values, strict=True)
        expected = torch.cat(
            [reference(q, k, v, size**-0.5, causal=False) for q, k, v in per_request]
        )
        bound = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(output.cpu().double(), expected, atol=bound, rtol=bound)


def quantized(rows, scale, offset):
    """Quantize rows ``[tokens, kv_heads, head_size]`` to int8; also returns the dequantized values
    in float64."""
    flat = rows.double().flatten(1)
    small = (flat / scale.double() + offset.double()).round().clamp(-128, 127)
    return small.to(torch.int8).view(rows.shape), ((small - offset.double()) * scale.double()).view(
        rows.shape
    )


def off_ties(rows, scale, offset):
    """Zero values near a rounding tie, which float32 and float64 may round differently."""
    steps = rows.flatten(1).double() / scale.double() + offset.double()
    near = ((steps - steps.floor()) - 0.5).abs() < 1e-3
    return rows.masked_fill(near.view(rows.shape), 0)


LONG = [(3, 900), (1, 40), (20, 300), (1, 300)]
"""New tokens and those before."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "in slices"])
def test_int8_kv_cache(dtype, symmetric, kind, monkeypatch):
    heads, kv_heads, size = 8, 2, 64
    rng = random.Random(kind)
    requests = LONG if kind == "in slices" else pairs(kind, rng, 4, 600)
    if kind == "in slices":
        # 2 blocks, for requests of up to 8 blocks.
        monkeypatch.setattr(int8, "WORKSPACE_TOKENS", 1)
    # Decodes come first, because vLLM sorts the batch for the builder.
    requests = sorted(requests, key=lambda pair: pair[0] != 1)
    lengths = [new + before for new, before in requests]
    table = [list(range(8 * r, 8 * r + 8)) for r in range(4)]
    slots = [
        [table[r][t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(n)]
        for r, n in enumerate(lengths)
    ]
    scales = [(torch.rand(kv_heads * size) * 0.02 + 0.02).to(dtype) for _ in range(2)]
    offsets = [
        torch.zeros_like(scale) if symmetric else torch.randint(-40, 40, scale.shape).to(dtype)
        for scale in scales
    ]
    both = [
        [off_ties(torch.randn(n, kv_heads, size, dtype=dtype), scale, offset) for n in lengths]
        for scale, offset in zip(scales, offsets, strict=True)
    ]
    stored = [
        [quantized(x, s, o) for x in rows] for rows, s, o in zip(both, scales, offsets, strict=True)
    ]
    pages = torch.full((2, BLOCKS * BLOCK_SIZE, kv_heads, size), 99, dtype=torch.int8)
    for part in range(2):
        for request, (_, before) in enumerate(requests):
            pages[part][slots[request][:before]] = stored[part][request][0][:before]
    cache = tuple(pages.view(2, BLOCKS, BLOCK_SIZE, kv_heads, size).npu())
    queries = [torch.randn(new, heads, size, dtype=dtype) for new, _ in requests]
    ends = [sum(new for new, _ in requests[: r + 1]) for r in range(4)]
    new_slots = [
        slot for row, (_, before) in zip(slots, requests, strict=True) for slot in row[before:]
    ]
    meta = FusedAttentionMetadata(
        compute_lengths=lambda: {"actual_seq_lengths": ends, "actual_seq_lengths_kv": lengths},
        num_tokens=ends[-1],
        block_table=torch.tensor(table, dtype=torch.int32).npu(),
        slot_mapping=torch.tensor(new_slots).npu(),
        mask=torch.ones(2048, 2048, dtype=torch.int8).triu_(1).npu(),
        softmax_lse=torch.empty(1, device="npu"),
    )
    names = ("k_cache_scale", "v_cache_scale", "k_cache_offset", "v_cache_offset")
    values = [x.npu() for x in scales] + [None if symmetric else x.npu() for x in offsets]
    layer = SimpleNamespace(**dict(zip(names, values, strict=True)))
    impl = dense.FusedAttentionImpl(heads, size, size**-0.5, kv_heads)
    output = torch.empty(ends[-1], heads, size, dtype=dtype, device="npu")
    new_rows = [
        torch.cat([x[before:] for x, (_, before) in zip(rows, requests, strict=True)]).npu()
        for rows in both
    ]
    impl.forward(layer, torch.cat(queries).npu(), *new_rows, cache, meta, output)

    def attended(keys, values):
        return torch.cat(
            [reference(q, k, v, size**-0.5) for q, k, v in zip(queries, keys, values, strict=True)]
        )

    (keys, values), bound = ([[x for _, x in rows] for rows in stored]), 6 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        output.cpu().double(), attended(keys, values), atol=bound, rtol=bound
    )
    assert (output.cpu() - attended([k * 1.3 for k in keys], values)).abs().max() > 2 * bound
    assert (output.cpu() - attended(keys, [v * 1.3 for v in values])).abs().max() > 2 * bound


def test_int8_prefill_stays_within_the_profiled_memory(monkeypatch):
    """The profiling run allocates as much as a prefill of a long context at the end of a mixed
    batch."""
    monkeypatch.setattr(int8, "WORKSPACE_TOKENS", 512)
    tokens, heads, kv_heads, size, blocks = 256, 8, 2, 64, 64
    impl = dense.FusedAttentionImpl(heads, size, size**-0.5, kv_heads)
    scale = torch.full((kv_heads * size,), 0.01, dtype=torch.float16, device="npu")
    layer = SimpleNamespace(
        kv_cache_torch_dtype=torch.int8, k_cache_scale=scale, v_cache_scale=scale
    )
    layer.k_cache_offset = layer.v_cache_offset = None
    cache = tuple(torch.ones(2, blocks, BLOCK_SIZE, kv_heads, size, dtype=torch.int8).npu())
    query, output = (
        torch.randn(tokens, heads, size, dtype=torch.float16, device="npu") for _ in range(2)
    )
    new = torch.randn(tokens, kv_heads, size, dtype=torch.float16, device="npu")
    length = blocks * BLOCK_SIZE
    meta = FusedAttentionMetadata(
        compute_lengths=lambda: {"actual_seq_lengths": [tokens], "actual_seq_lengths_kv": [length]},
        num_tokens=tokens,
        block_table=torch.arange(blocks, dtype=torch.int32).view(1, blocks).npu(),
        slot_mapping=torch.arange(length - tokens, length).npu(),
        mask=torch.ones(2048, 2048, dtype=torch.int8).triu_(1).npu(),
        softmax_lse=torch.empty(1, device="npu"),
    )

    def peak(call, *arguments):
        torch.npu.synchronize()
        torch.npu.reset_peak_memory_stats()
        before = torch.npu.memory_allocated()
        call(*arguments)
        torch.npu.synchronize()
        return torch.npu.max_memory_allocated() - before

    halves = [
        torch.ones(2, BLOCK_SIZE, kv_heads, size, dtype=torch.float16, device="npu")
        for _ in range(2)
    ]
    lengths = {"actual_seq_lengths": [tokens], "actual_seq_lengths_kv": [tokens]}
    kernel = peak(
        impl.attend_pages,
        query,
        *halves,
        lengths,
        meta.block_table[:, :2].contiguous(),
        meta,
        output,
    )
    profiled, used = (
        peak(impl.forward, layer, query, new, new, cache, metadata, output)
        for metadata in (None, meta)
    )
    print(
        f"profiled {profiled} bytes, used {used}, {kernel} by the kernel; all blocks are"
        f" {4 * length * kv_heads * size}"
    )
    assert used <= profiled + kernel
    assert profiled < 4 * length * kv_heads * size / 2


def test_draft_tokens_with_lengths_that_the_host_does_not_know():
    """A drafter's later pass: of 3, 0, 1 and 2 draft tokens 1, 0, 0 and 2 are rejected, as only the
    device knows."""
    from ascend_platform.attention import length_bounds

    drafts, rejected = [3, 0, 1, 2], [1, 0, 0, 2]
    rng = random.Random(0)
    batch = PagedBatch(
        Sizes(BLOCKS, BLOCK_SIZE, 4, 2, 64, torch.float16, 1e4),
        [(1, 300), (1, 127), (1, 5), (1, 0)],
        rng,
    )
    common = batch.common()
    common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound + torch.tensor(
        rejected, dtype=torch.int32
    )
    waits = []

    def unknown():
        waits.append(1)
        return rejected

    with length_bounds.subtract_rejected(length_bounds.Rejected(unknown, drafts)):
        output = batch.run(dense.FusedAttentionBackend, common=common)
    assert not waits
    bound = 8 * torch.finfo(torch.float16).eps
    torch.testing.assert_close(output.double(), batch.expected(), atol=bound, rtol=bound)


def test_profiling_run_returns_zeros():
    layer = dense.FusedAttentionImpl(2, 16, 1.0, 1)
    output = torch.full((3, 2, 16), torch.nan, device="npu", dtype=torch.float16)
    assert (
        layer.forward(None, output, output, output, (output, output), None, output)
        .abs()
        .sum()
        .item()
        == 0
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"alibi_slopes": [0.5, 0.25]}, "ALiBi"),
        ({"logits_soft_cap": 30.0}, "logits soft cap"),
        ({"attn_type": "encoder_only"}, "encoder-only attention"),
        ({"sinks": torch.zeros(2)}, "sinks"),
    ],
)
def test_unsupported_features_are_refused(arguments, named):
    with pytest.raises(RefusedError, match=named):
        dense.FusedAttentionImpl(2, 16, 1.0, **arguments)


def test_more_requests_than_the_kernel_takes_are_refused():
    """At most 4096, of which one may be a dummy request for padding tokens."""
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
    )
    config = VllmConfig()
    for num_requests in (4095, 4096):
        config.scheduler_config.max_num_seqs = num_requests
        refusal = pytest.raises(
            RefusedError, match="not max_num_seqs 4096; fix: --max-num-seqs 4095"
        )
        with refusal if num_requests == 4096 else nullcontext():
            dense.FusedAttentionMetadataBuilder(spec, ["layer"], config, torch.device("npu"))


@pytest.mark.parametrize("kind", [FullAttentionSpec, CrossAttentionSpec])
def test_cross_attention_has_no_graph_support(kind):
    spec = kind(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    support = dense.FusedAttentionMetadataBuilder.get_cudagraph_support(VllmConfig(), spec)
    assert support.name == ("ALWAYS" if kind is FullAttentionSpec else "NEVER")


def test_sliding_windows_with_int8_are_refused():
    spec = SlidingWindowSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.int8, sliding_window=64
    )
    with pytest.raises(RefusedError, match="int8 KV cache is not supported with sliding windows"):
        dense.FusedAttentionMetadataBuilder(spec, ["layer"], VllmConfig(), torch.device("npu"))


def test_sinks_support_bfloat16_and_small_heads():
    backend = sinks.SinkAttentionBackend
    assert [backend.supports_dtype(dtype) for dtype in (torch.bfloat16, torch.float16)] == [
        True,
        False,
    ]
    assert [backend.supports_head_size(size) for size in (64, 128, 192)] == [True, True, False]


@pytest.mark.parametrize(
    ("head_size", "expected"), [(16, True), (128, True), (256, True), (72, False), (512, False)]
)
def test_supported_head_sizes(head_size, expected):
    assert dense.FusedAttentionBackend.supports_head_size(head_size) is expected
