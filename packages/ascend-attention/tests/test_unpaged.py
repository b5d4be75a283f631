# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fused attention of heads for which Atlas A2 takes no pages with several query tokens and keys
before them, compared with softmax(q k^T) v in float64. The emulated A2 refuses such calls."""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ascend_attention import dense, unpaged
from ascend_platform.attention import length_bounds
from ascend_platform.graph import acl_graph
from harness.engines import npus
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
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec

BLOCK_SIZE, BLOCKS = dense.BLOCK_SIZE, 40
HEADS, KV_HEADS, SIZE, DTYPE = 4, 2, 256, torch.bfloat16


@pytest.fixture(autouse=True)
def current_config():
    with set_current_vllm_config(VllmConfig()):
        yield


def batch_of(requests, size=SIZE, seed=0):
    rng = random.Random(seed)
    return PagedBatch(Sizes(BLOCKS, BLOCK_SIZE, HEADS, KV_HEADS, size, DTYPE, 1e4), requests, rng)


def check(batch, common=None, images=None, **beyond):
    output = batch.run(dense.FusedAttentionBackend, common=common, **beyond)
    expected = batch.expected(images, window=beyond.get("sliding_window"))
    bound = 8 * torch.finfo(DTYPE).eps
    torch.testing.assert_close(output.double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("window", [None, 1, 100, 2000])
@pytest.mark.parametrize("size", [208, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_causal_attention(kind, size, window):
    rng = random.Random(f"{kind}{size}")
    check(batch_of(pairs(kind, rng, 4, 600), size), sliding_window=window)


LONG = [(1, 900), (40, 300), (3, 200), (30, 20), (17, 0), (200, 700)]
"""New tokens and those before: a decode, and chunks that are longer than the workspace or not."""


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("room", [100, 400, 1500])
def test_contexts_longer_than_the_workspace(monkeypatch, room, window):
    monkeypatch.setattr(unpaged, "capacity", lambda num_tokens, rows: room + (rows or 0))
    if window and room < 200:  # The keys of a window are read at once.
        monkeypatch.setattr(unpaged, "capacity", lambda num_tokens, rows: 200 + rows)
    check(batch_of(LONG), sliding_window=window)


@pytest.mark.parametrize("window", [None, 70])
def test_tokens_of_an_image_attend_in_both_directions(window):
    batch = batch_of(IMAGE_REQUESTS)
    check(batch, batch.common(IMAGES), IMAGES, sliding_window=window)


def test_draft_tokens_with_lengths_that_the_host_does_not_know():
    drafts, rejected = [3, 0, 1, 2], [1, 0, 0, 2]
    batch = batch_of([(1, 300), (1, 127), (1, 5), (1, 0)])
    common = batch.common()
    rejected_tokens = torch.tensor(rejected, dtype=torch.int32)
    common.seq_lens_cpu_upper_bound = common.seq_lens_cpu_upper_bound + rejected_tokens
    with length_bounds.subtract_rejected(length_bounds.Rejected(lambda: rejected, drafts)):
        check(batch, common)


def builder_of(config, dtype=DTYPE):
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=dtype
    )
    return dense.FusedAttentionMetadataBuilder(spec, ["layer"], config, torch.device("npu"))


def test_decodes_with_drafts_are_captured():
    """A graph of steps with two draft tokens for each request is replayed with longer sequences and
    other pages, and with padding."""
    config = VllmConfig()
    config.compilation_config.max_cudagraph_capture_size = 12
    builder = builder_of(config)
    layer = dense.FusedAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS)
    short = batch_of([(3, 0)] * 4)
    batches = [
        batch_of([(3, 300), (3, 126), (3, 1), (3, 500)], seed=1),
        batch_of([(3, 7)] * 3, seed=2),
    ]
    tokens = 12
    query, key, value, output = (
        torch.zeros(tokens, heads, SIZE, dtype=DTYPE).npu()
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    cache = torch.zeros(2, BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE, dtype=DTYPE).npu()
    table, slots = torch.zeros(4, 6, dtype=torch.int32).npu(), torch.zeros(tokens).long().npu()

    def prepared(batch):
        """The step of a batch, in the graph's buffers."""
        common = batch.common()
        num_tokens, requests = common.num_actual_tokens, len(batch.requests)
        cache.copy_(batch.cache)
        for buffer, rows in ((query, batch.queries), (key, None), (value, None)):
            buffer.zero_()
            if rows:
                buffer[:num_tokens] = torch.cat(rows).npu()
        key[:num_tokens], value[:num_tokens] = (
            batch.new(x).npu() for x in (batch.keys, batch.values)
        )
        slots.zero_()
        slots[:num_tokens] = common.slot_mapping
        table.zero_()
        table[:requests, : common.block_table_tensor.shape[1]] = common.block_table_tensor
        starts = torch.nn.functional.pad(
            common.query_start_loc_cpu, (0, 4 - requests), value=num_tokens
        )
        lengths = torch.nn.functional.pad(common.seq_lens_cpu_upper_bound, (0, 4 - requests))
        common.query_start_loc_cpu, common.query_start_loc = starts, starts.npu()
        common.seq_lens_cpu_upper_bound, common.seq_lens = lengths, lengths.npu()
        common.num_reqs, common.num_actual_tokens = 4, tokens
        common.block_table_tensor, common.slot_mapping = table, slots
        return builder.build(0, common)

    graph, stream = acl_graph.NPUGraph(), torch.npu.Stream()
    meta = prepared(short)
    torch.npu.synchronize()
    with acl_graph._Capture(graph, stream=stream):
        layer.forward(None, query, key, value, (cache[0], cache[1]), meta, output)
    for batch in (*batches, short):
        meta = prepared(batch)
        with set_forward_context({"layer": meta}, config):
            graph.replay()
        torch.npu.synchronize()
        expected = batch.expected()
        bound = 8 * torch.finfo(DTYPE).eps
        actual = output[: len(expected)].cpu().double()
        torch.testing.assert_close(actual, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize(
    ("sizes", "drafts", "support"),
    [
        ([256], 0, "UNIFORM_BATCH"),
        ([256, 256], 3, "UNIFORM_BATCH"),
        ([256], 16, "UNIFORM_SINGLE_TOKEN_DECODE"),
        ([256, 128], 3, "UNIFORM_SINGLE_TOKEN_DECODE"),
    ],
)
def test_graphs_of_single_tokens(sizes, drafts, support):
    layers = {str(place): SimpleNamespace(head_size=size) for place, size in enumerate(sizes)}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=None,
        num_speculative_tokens=drafts,
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=256, dtype=DTYPE)
    assert (
        dense.FusedAttentionBackend.builder_cls.get_cudagraph_support(config, spec).name == support
    )


def test_cross_attention():
    lengths, counts = [140, 7, 300, 20], [1, 5, 30, 2]
    keys, values = (
        [torch.randn(n, KV_HEADS, SIZE, dtype=DTYPE) for n in lengths] for _ in range(2)
    )
    slots = torch.cat([torch.arange(n) + 3 * BLOCK_SIZE * r for r, n in enumerate(lengths)])
    cache = tuple(torch.full((2, 12, BLOCK_SIZE, KV_HEADS, SIZE), 1e4, dtype=DTYPE).npu())
    ends = torch.tensor(counts).cumsum(0)
    common = batch_of([(n, 0) for n in counts]).common()
    common.seq_lens_cpu_upper_bound = torch.tensor(lengths, dtype=torch.int32)
    common.block_table_tensor = torch.arange(12, dtype=torch.int32).view(4, 3).npu()
    common.causal, common.slot_mapping = False, slots.npu()
    meta = builder_of(VllmConfig()).build(0, common)
    meta.slot_mapping = slots.npu()
    layer = dense.FusedAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, attn_type="encoder_decoder")
    queries = torch.randn(ends[-1], HEADS, SIZE, dtype=DTYPE)
    output = torch.empty(ends[-1], HEADS, SIZE, dtype=DTYPE, device="npu")
    pair = torch.cat(keys).npu(), torch.cat(values).npu()
    layer.forward(None, queries.npu(), *pair, cache, meta, output)
    per_request = zip(queries.split(counts), keys, values, strict=True)
    expected = torch.cat([reference(q, k, v, SIZE**-0.5, causal=False) for q, k, v in per_request])
    bound = 8 * torch.finfo(DTYPE).eps
    torch.testing.assert_close(output.cpu().double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("room", [100, 4096])
def test_int8_kv_cache(monkeypatch, room):
    monkeypatch.setattr(unpaged, "capacity", lambda num_tokens, row: max(room, num_tokens))
    requests = [(1, 300), (1, 5), (40, 300), (3, 200)]
    batch = batch_of(requests)
    scale = torch.full((KV_HEADS * SIZE,), 2**-5, dtype=DTYPE)
    for rows in (batch.keys, batch.values):  # what int8 keeps
        rows[:] = [(x / 2**-5).round().clamp(-127, 127) * 2**-5 for x in rows]
    pages = torch.full((2, BLOCKS * BLOCK_SIZE, KV_HEADS, SIZE), 99, dtype=torch.int8)
    for part, rows in enumerate((batch.keys, batch.values)):
        for slots, row, (_, before) in zip(batch._slots, rows, requests, strict=True):
            pages[part][slots[:before]] = (row[:before] / 2**-5).to(torch.int8)
    cache = tuple(pages.view(2, BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE).npu())
    config = VllmConfig()
    vars(config)["model_config"] = SimpleNamespace(is_mm_prefix_lm=False)
    meta = builder_of(config, torch.int8).build(0, batch.common())
    layer = SimpleNamespace(k_cache_scale=scale.npu(), v_cache_scale=scale.npu())
    layer.k_cache_offset = layer.v_cache_offset = None
    impl = dense.FusedAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS)
    query = torch.cat(batch.queries).npu()
    output = torch.empty_like(query)
    new = (batch.new(rows).npu() for rows in (batch.keys, batch.values))
    impl.forward(layer, query, *new, cache, meta, output)
    bound = 8 * torch.finfo(DTYPE).eps
    torch.testing.assert_close(output.cpu().double(), batch.expected(), atol=bound, rtol=bound)


def test_long_requests_stay_within_the_profiled_memory(monkeypatch):
    monkeypatch.setattr(unpaged, "WORKSPACE_TOKENS", 512)
    layer = dense.FusedAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS)
    batch = batch_of([(200, 2500)])
    meta = builder_of(VllmConfig()).build(0, batch.common())
    query = torch.cat(batch.queries).npu()
    new = [batch.new(rows).npu() for rows in (batch.keys, batch.values)]
    output = torch.empty_like(query)

    def peak(metadata):
        torch.npu.synchronize()
        torch.npu.reset_peak_memory_stats()
        before = torch.npu.memory_allocated()
        layer.forward(None, query, *new, tuple(batch.cache), metadata, output)
        torch.npu.synchronize()
        return torch.npu.max_memory_allocated() - before

    profiled, used = peak(None), peak(meta)
    print(f"profiled {profiled} bytes, used {used}")
    assert used <= profiled + (18 << 20)  # what the kernels need themselves
    assert profiled < 2 * 2700 * KV_HEADS * SIZE * 2


def test_decode_context_parallelism():
    """Two ranks have the context in turn, which fits the workspace or not."""
    program = Path(__file__).with_name("dcp_ranks.py")
    command = (sys.executable, str(program), str(SIZE), "4096", "100")
    errors = npus.by_name(npus.run(2, *command, VLLM_PLUGINS=""))["dcp"]["ranks"]
    assert max(map(max, errors)) < 8, errors
