# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Built-in attention on random paged batches, compared with softmax(q k^T) v in float64."""

import random

import pytest
import torch
from ascend_platform.attention import paged, sparse_latent
from ascend_platform.attention.encoder import EncoderAttentionBackend
from ascend_platform.attention.kv_cache import KVCachePair
from ascend_platform.attention.latent import PagedLatentAttentionBackend
from ascend_platform.extension import RefusedError
from harness.references.latent_batches import LatentBatch, SparseLatentBatch
from harness.references.paged_batches import (
    IMAGE_REQUESTS,
    IMAGES,
    PagedBatch,
    Sizes,
    pairs,
    reference,
)
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import AttentionType

BLOCK_SIZE, BLOCKS = 16, 96


@pytest.fixture(autouse=True)
def current_config():
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("max_elements", [1 << 24, 1 << 11])  # the second needs many chunks
def test_causal_attention(dtype, heads, kv_heads, kind, max_elements, monkeypatch):
    check(dtype, heads, kv_heads, kind, max_elements, monkeypatch)


@pytest.mark.parametrize("size", [80, 96, 256])
def test_head_sizes(size, monkeypatch):
    """Those that fused attention leaves to it, where each key-value head has one query head."""
    check(torch.bfloat16, 4, 4, "mixed", 1 << 24, monkeypatch, size=size)


@pytest.mark.parametrize("widths", [(512, 64), (96, 32)])
@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
def test_latent_attention(widths, kind):
    rng = random.Random(kind)
    batch = LatentBatch(3, widths, torch.float32, pairs(kind, rng, 3, 300), rng)
    torch.testing.assert_close(
        batch.run(PagedLatentAttentionBackend).double(), batch.expected(), atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize(("widths", "indexer"), [((512, 64), (16, 128)), ((96, 32), (5, 24))])
@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("max_elements", [1 << 24, 1 << 11])
def test_sparse_latent_attention(widths, indexer, kind, max_elements, monkeypatch):
    monkeypatch.setattr(sparse_latent, "MAX_ELEMENTS", max_elements)
    rng = random.Random(kind)
    batch = SparseLatentBatch(
        3, widths, torch.float32, pairs(kind, rng, 3, 120), rng, count=24, indexer=indexer
    )
    chosen, output = batch.run_sparse(sparse_latent.PagedSparseLatentAttentionBackend)
    batch.check_selected(chosen, bound=1e-4)
    torch.testing.assert_close(output.double(), batch.expected_of(chosen), atol=2e-5, rtol=2e-5)


BEYOND = {
    "window": {"sliding_window": 24},
    "wide window": {"sliding_window": 100},
    "soft cap": {"logits_soft_cap": 1.5},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.02]},
    "ALiBi of square roots": {"alibi_slopes": [1.5, 0.5, 0.1, 0.02], "use_alibi_sqrt": True},
    "no chunks": {"chunk_lookback": -1},
    "sinks": {"sinks": torch.tensor([0.5, 3.0, -1.0, 2.0])},
    "all": {
        "sliding_window": 24,
        "logits_soft_cap": 1.5,
        "alibi_slopes": [0.5, 0.25, 0.1, 0.02],
        "sinks": torch.ones(4),
    },
}


@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("max_elements", [1 << 24, 1 << 11])
@pytest.mark.parametrize("beyond", BEYOND)
def test_optional_features(kind, max_elements, beyond, monkeypatch):
    check(torch.float32, 4, 2, kind, max_elements, monkeypatch, **BEYOND[beyond])


def check(dtype, heads, kv_heads, kind, max_elements, monkeypatch, size=32, **beyond):
    monkeypatch.setattr(paged, "MAX_ELEMENTS", max_elements)
    rng = random.Random(f"{heads}{kind}{max_elements}")
    requests = pairs(kind, rng, rng.randint(1, 6), 150)
    if rng.random() < 0.5:  # vLLM sorts decodes first, but the result must not depend on it.
        requests.sort(key=lambda pair: pair[0] > 1)
    batch = PagedBatch(
        Sizes(BLOCKS, BLOCK_SIZE, heads, kv_heads, size, dtype, torch.nan), requests, rng
    )
    output = batch.run(paged.PagedAttentionBackend, **beyond)
    slopes = torch.tensor(beyond["alibi_slopes"]) if "alibi_slopes" in beyond else None
    options = {
        "window": beyond.get("sliding_window"),
        "cap": beyond.get("logits_soft_cap"),
        "sinks": beyond.get("sinks"),
        "sqrt": beyond.get("use_alibi_sqrt", False),
    }
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        output.double(), batch.expected(slopes=slopes, **options), atol=bound, rtol=bound
    )


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("max_elements", [1 << 24, 1 << 11])
def test_tokens_of_an_image_attend_in_both_directions(window, max_elements, monkeypatch):
    monkeypatch.setattr(paged, "MAX_ELEMENTS", max_elements)
    sizes = Sizes(BLOCKS, BLOCK_SIZE, 4, 2, 32, torch.float32, torch.nan)
    batch = PagedBatch(sizes, IMAGE_REQUESTS, random.Random(0))
    output = batch.run(
        paged.PagedAttentionBackend, common=batch.common(IMAGES), sliding_window=window
    )
    expected = batch.expected(IMAGES, window=window)
    assert (expected - batch.expected(window=window)).abs().max() > 0.1
    torch.testing.assert_close(output.double(), expected, atol=1e-6, rtol=1e-6)


def test_slopes_of_alibi_are_copied_to_the_device_once(monkeypatch):
    slopes, copied, tensor = [0.5, 0.25, 0.125, 0.03], [], torch.tensor
    layers = [paged.PagedAttentionImpl(4, 16, 0.25, 4, alibi_slopes=slopes) for _ in range(3)]
    cache = KVCachePair(*torch.zeros(2, 2, BLOCK_SIZE, 4, 16).npu())
    meta = paged.PagedAttentionMetadata(
        query_start_loc=[0, 5],
        seq_lens=[5],
        block_table=torch.ones(1, 1, dtype=torch.int32).npu(),
        slot_mapping=torch.arange(BLOCK_SIZE, BLOCK_SIZE + 5).npu(),
        num_decodes=0,
        decode_seq_lens=torch.empty(0, dtype=torch.int32).npu(),
        max_decode_tokens=0,
        causal=True,
    )
    query, key, value = torch.randn(3, 5, 4, 16).npu()
    monkeypatch.setattr(
        torch, "tensor", lambda *args, **named: copied.append(args[0]) or tensor(*args, **named)
    )
    for layer in layers:
        layer.forward(None, query, key, value, cache, meta, torch.empty_like(query))
    assert [list(values) for values in copied if values in (slopes, tuple(slopes))] == [slopes]


def test_profiling_run_returns_zeros():
    layer = paged.PagedAttentionImpl(2, 16, 1.0)
    output = torch.full((3, 2, 16), torch.nan, device="npu")
    assert (
        layer.forward(None, output, output, output, KVCachePair(output, output), None, output)
        .abs()
        .sum()
        .item()
        == 0
    )


@pytest.mark.parametrize("num_decodes", [0, 3])
def test_cross_attention(num_decodes):
    """Each token attends to all keys of its request. They are written in the first step; the second
    step has none."""
    heads, size, lengths, counts = 4, 32, [40, 7, 100], [1, 1, 1] if num_decodes else [1, 5, 3]
    keys, values = ([torch.randn(n, 2, size) for n in lengths] for _ in range(2))
    table = torch.arange(21, dtype=torch.int32).view(3, 7)
    slots = torch.cat([torch.arange(n) + 7 * BLOCK_SIZE * r for r, n in enumerate(lengths)])
    cache = KVCachePair(*torch.full((2, 21, BLOCK_SIZE, 2, size), torch.nan).npu())
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    layer = paged.PagedAttentionImpl(heads, size, size**-0.5, 2, attn_type="encoder_decoder")

    def attend(meta_slots, key, value):
        meta = paged.PagedAttentionMetadata(
            query_start_loc=starts,
            seq_lens=lengths,
            block_table=table.npu(),
            slot_mapping=meta_slots,
            num_decodes=num_decodes,
            decode_seq_lens=torch.tensor(lengths[:num_decodes], dtype=torch.int32).npu(),
            max_decode_tokens=112 if num_decodes else 0,
            causal=False,
        )
        output = torch.empty(starts[-1], heads, size, device="npu")
        queries = torch.randn(starts[-1], heads, size)
        layer.forward(None, queries.npu(), key, value, cache, meta, output)
        per_request = zip(queries.split(counts), keys, values, strict=True)
        expected = torch.cat(
            [reference(q, k, v, size**-0.5, causal=False) for q, k, v in per_request]
        )
        torch.testing.assert_close(output.cpu().double(), expected, atol=1e-5, rtol=1e-5)

    attend(slots.npu(), torch.cat(keys).npu(), torch.cat(values).npu())
    attend(slots[:0].npu(), None, None)


@pytest.mark.parametrize("window", [None, 24])
def test_values_of_another_size_than_keys(window):
    """MiMo-V2: two prefills, then a decode of each."""
    lens, total, starts = [40, 70], [41, 71], [0, 40, 110]
    keys, values = ([torch.randn(n, 2, width) for n in total] for width in (32, 16))
    table = torch.arange(10, dtype=torch.int32).view(2, 5).npu()
    pages = (torch.full((10, BLOCK_SIZE, 2, width), torch.nan).npu() for width in (32, 16))
    cache, layer = KVCachePair(*pages), paged.PagedAttentionImpl(4, 32, 0.2, 2, None, window)
    slots = [torch.arange(n) + 5 * BLOCK_SIZE * i for i, n in enumerate(total)]

    def attend(new, rows, **options):
        meta = paged.PagedAttentionMetadata(
            block_table=table,
            slot_mapping=torch.cat([per_request[new] for per_request in slots]).npu(),
            causal=True,
            **options,
        )
        output, query = torch.empty(rows, 4, 16).npu(), torch.randn(rows, 4, 32)
        per_request = (torch.cat([each[new] for each in both]).npu() for both in (keys, values))
        layer.forward(None, query.npu(), *per_request, cache, meta, output)
        pairs = zip(query.split([rows // 2] * 2 if rows == 2 else lens), keys, values, strict=True)
        until = slice(None, new.stop)
        expected = [reference(q, k[until], v[until], 0.2, window) for q, k, v in pairs]
        torch.testing.assert_close(output.cpu().double(), torch.cat(expected), atol=1e-5, rtol=1e-5)

    none = torch.empty(0, dtype=torch.int32).npu()
    attend(
        slice(0, -1),
        110,
        query_start_loc=starts,
        seq_lens=lens,
        num_decodes=0,
        decode_seq_lens=none,
        max_decode_tokens=0,
    )
    attend(
        slice(-1, None),
        2,
        query_start_loc=[0, 1, 2],
        seq_lens=total,
        num_decodes=2,
        decode_seq_lens=torch.tensor(total, dtype=torch.int32).npu(),
        max_decode_tokens=80,
    )


def test_unsupported_features_are_refused():
    with pytest.raises(RefusedError, match="encoder-only attention"):
        paged.PagedAttentionImpl(2, 16, 1.0, attn_type="encoder_only")


@pytest.mark.parametrize("plain", [False, True])
def test_capability_queries(plain):
    """vLLM passes members of AttentionType, whose str() is not their value."""
    asked = [kind.value if plain else kind for kind in AttentionType]
    decoder, encoder = paged.PagedAttentionBackend, EncoderAttentionBackend
    assert [kind for kind in asked if decoder.supports_attn_type(kind)] == [
        "decoder",
        "encoder_decoder",
    ]
    assert [kind for kind in asked if encoder.supports_attn_type(kind)] == ["encoder_only"]
    assert (decoder.supports_sink(), encoder.supports_sink()) == (True, False)
    assert decoder.supports_sliding_window()
    assert encoder.supports_sliding_window()
