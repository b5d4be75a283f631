"""The built-in attention over random paged batches, against softmax(q k^T) v in float64."""

import random

import pytest
import torch
from ascend_platform import attention
from ascend_platform.kv_cache import PagedKV
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

BLOCK_SIZE, BLOCKS = 16, 96


def reference(query, key, value, scale, window=None, slopes=None, cap=None, sinks=None, causal=True):
    """query [tokens, heads, d] at the end of key and value [length, kv_heads, d]; float64."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("thd,lhd->htl", query, key) * scale
    if cap:
        scores = cap * (scores / cap).tanh()
    after = torch.arange(len(key)) - torch.arange(len(key) - len(query), len(key))[:, None]
    if slopes is not None:
        scores = scores + slopes.double().view(-1, 1, 1) * after
    if causal:
        scores = scores.masked_fill((after > 0) | (after <= -(window or len(key))), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)], -1)
    return torch.einsum("htl,lhd->thd", scores.softmax(-1)[..., : len(key)], value)


def batch(rng, requests, kind):
    """(new tokens, tokens in the cache before) of each request: decode, prefill, or chunks and decodes mixed."""
    pairs = {
        "decode": lambda: (1, rng.randint(0, 150)),
        "prefill": lambda: (rng.randint(1, 120), 0),
        "mixed": lambda: (rng.choice([1, rng.randint(2, 60)]), rng.choice([0, rng.randint(1, 100)])),
    }
    return [pairs[kind]() for _ in range(requests)]


@pytest.fixture(autouse=True)
def current_config():
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("at_once", [1 << 24, 1 << 11])  # the second cuts the work in many pieces
def test_attention_over_pages(dtype, heads, kv_heads, kind, at_once, monkeypatch):
    check(dtype, heads, kv_heads, kind, at_once, monkeypatch)


BEYOND = {
    "window": {"sliding_window": 24},
    "wide window": {"sliding_window": 100},
    "soft cap": {"logits_soft_cap": 1.5},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.02]},
    "sinks": {"sinks": torch.tensor([0.5, 3.0, -1.0, 2.0])},
    "all": {"sliding_window": 24, "logits_soft_cap": 1.5, "alibi_slopes": [0.5, 0.25, 0.1, 0.02], "sinks": torch.ones(4)},
}


@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("at_once", [1 << 24, 1 << 11])
@pytest.mark.parametrize("beyond", BEYOND)
def test_what_is_beyond_causal_attention(kind, at_once, beyond, monkeypatch):
    check(torch.float32, 4, 2, kind, at_once, monkeypatch, **BEYOND[beyond])


def check(dtype, heads, kv_heads, kind, at_once, monkeypatch, **beyond):
    monkeypatch.setattr(attention, "ELEMENTS_AT_ONCE", at_once)
    rng, size = random.Random(f"{heads}{kind}{at_once}"), 32
    pairs = batch(rng, rng.randint(1, 6), kind)
    if rng.random() < 0.5:  # vLLM puts requests of one token first, but nothing may depend on it
        pairs.sort(key=lambda pair: pair[0] > 1)
    lengths = [new + before for new, before in pairs]
    free = rng.sample(range(BLOCKS), BLOCKS)
    table = [[free.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]
    slots = [[table[r][t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE for t in range(n)] for r, n in enumerate(lengths)]
    keys, values = ([torch.randn(n, kv_heads, size, dtype=dtype) for n in lengths] for _ in range(2))
    queries = [torch.randn(new, heads, size, dtype=dtype) for new, _ in pairs]

    pages = torch.full((2, BLOCKS * BLOCK_SIZE, kv_heads, size), torch.nan, dtype=dtype)  # nothing else may be read
    for request, (_, before) in enumerate(pairs):
        pages[0][slots[request][:before]] = keys[request][:before]
        pages[1][slots[request][:before]] = values[request][:before]
    cache = PagedKV(*pages.view(2, BLOCKS, BLOCK_SIZE, kv_heads, size).npu())

    def new_tokens(per_request):
        return [item for items, (_, before) in zip(per_request, pairs, strict=True) for item in items[before:]]

    starts = [sum(new for new, _ in pairs[:r]) for r in range(len(pairs) + 1)]
    padded = [row + [0] * (10 - len(row)) for row in table]
    common = CommonAttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32).npu(),
        query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32).npu(),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(pairs),
        num_actual_tokens=starts[-1],
        max_query_len=max(new for new, _ in pairs),
        max_seq_len=max(lengths),
        block_table_tensor=torch.tensor(padded, dtype=torch.int32).npu(),
        slot_mapping=torch.tensor(new_tokens(slots)).npu(),
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=kv_heads, head_size=size, dtype=dtype)
    builder = attention.PagedAttentionMetadataBuilder(spec, ["layer"], VllmConfig(), torch.device("npu"))
    placed = {name: x.npu() if isinstance(x, torch.Tensor) else x for name, x in beyond.items()}
    layer = attention.PagedAttentionImpl(heads, size, size**-0.5, kv_heads, **placed)
    output = torch.empty(starts[-1], heads, size, dtype=dtype, device="npu")
    key, value = (torch.stack(new_tokens(x)).npu() for x in (keys, values))
    layer.forward(None, torch.cat(queries).npu(), key, value, cache, builder.build(0, common), output)

    slopes = torch.tensor(beyond["alibi_slopes"]) if "alibi_slopes" in beyond else None
    options = (beyond.get("sliding_window"), slopes, beyond.get("logits_soft_cap"), beyond.get("sinks"))
    expected = torch.cat([reference(q, k, v, size**-0.5, *options) for q, k, v in zip(queries, keys, values, strict=True)])
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.cpu().double(), expected, atol=bound, rtol=bound)


def test_profiling_without_metadata_gives_zero():
    layer = attention.PagedAttentionImpl(2, 16, 1.0)
    output = torch.full((3, 2, 16), torch.nan, device="npu")
    assert layer.forward(None, output, output, output, PagedKV(output, output), None, output).abs().sum().item() == 0


@pytest.mark.parametrize("singles", [0, 3])
def test_attention_to_an_encoder_s_tokens(singles):
    """Every token sees all of its request's keys; a request's are written once, a later step brings none."""
    heads, size, lengths, counts = 4, 32, [40, 7, 100], [1, 1, 1] if singles else [1, 5, 3]
    keys, values = ([torch.randn(n, 2, size) for n in lengths] for _ in range(2))
    table = torch.arange(21, dtype=torch.int32).view(3, 7)
    slots = torch.cat([torch.arange(n) + 7 * BLOCK_SIZE * r for r, n in enumerate(lengths)])
    cache = PagedKV(*torch.full((2, 21, BLOCK_SIZE, 2, size), torch.nan).npu())
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    layer = attention.PagedAttentionImpl(heads, size, size**-0.5, 2, attn_type="encoder_decoder")

    def attend(meta_slots, key, value):
        meta = attention.PagedAttentionMetadata(
            query_start=starts,
            kv_lens=lengths,
            block_table=table.npu(),
            slot_mapping=meta_slots,
            singles=singles,
            ends=torch.tensor(lengths[:singles], dtype=torch.int32).npu(),
            longest=112 if singles else 0,
            causal=False,
        )
        output = torch.empty(starts[-1], heads, size, device="npu")
        queries = torch.randn(starts[-1], heads, size)
        layer.forward(None, queries.npu(), key, value, cache, meta, output)
        own = zip(queries.split(counts), keys, values, strict=True)
        expected = torch.cat([reference(q, k, v, size**-0.5, causal=False) for q, k, v in own])
        torch.testing.assert_close(output.cpu().double(), expected, atol=1e-5, rtol=1e-5)

    attend(slots.npu(), torch.cat(keys).npu(), torch.cat(values).npu())
    attend(slots[:0].npu(), None, None)


def test_what_it_has_not_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="encoder_only attention"):
        attention.PagedAttentionImpl(2, 16, 1.0, attn_type="encoder_only")
