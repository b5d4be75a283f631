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


def reference(query, key, value, scale):
    """query [tokens, heads, d] at the end of key and value [length, kv_heads, d]; float64."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("thd,lhd->htl", query, key) * scale
    later = torch.ones(len(query), len(key)).triu(len(key) - len(query) + 1).bool()
    return torch.einsum("htl,lhd->thd", scores.masked_fill(later, -torch.inf).softmax(-1), value)


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
    layer = attention.PagedAttentionImpl(heads, size, size**-0.5, kv_heads)
    output = torch.empty(starts[-1], heads, size, dtype=dtype, device="npu")
    key, value = (torch.stack(new_tokens(x)).npu() for x in (keys, values))
    layer.forward(None, torch.cat(queries).npu(), key, value, cache, builder.build(0, common), output)

    expected = torch.cat([reference(q, k, v, size**-0.5) for q, k, v in zip(queries, keys, values, strict=True)])
    bound = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.cpu().double(), expected, atol=bound, rtol=bound)


def test_profiling_without_metadata_gives_zero():
    layer = attention.PagedAttentionImpl(2, 16, 1.0)
    output = torch.full((3, 2, 16), torch.nan, device="npu")
    assert layer.forward(None, output, output, output, PagedKV(output, output), None, output).abs().sum().item() == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"alibi_slopes": [0.5, 0.25]}, "ALiBi"),
        ({"sliding_window": 4096}, "a sliding window"),
        ({"logits_soft_cap": 30.0}, "a logits soft cap"),
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"sinks": torch.zeros(2)}, "sinks"),
    ],
)
def test_what_it_has_not_is_refused_by_name(arguments, named):
    with pytest.raises(NotImplementedError, match=named):
        attention.PagedAttentionImpl(2, 16, 1.0, **arguments)
