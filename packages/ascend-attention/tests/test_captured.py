# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Attention that is captured with the shortest sequences and replayed with the longest. Its workspace
is that of the capture; the emulator refuses sequences for which it was not made."""

from types import SimpleNamespace

import pytest
import torch
from ascend_attention import dense, latent, sinks
from ascend_attention.metadata import FusedAttentionMetadata, longest_lengths
from ascend_platform.graph import acl_graph
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context

TOKENS, BLOCKS, DTYPE = 3, 9, torch.bfloat16
LENGTHS = ([1, 1, 1], [384, 129, 300])


@pytest.fixture(autouse=True)
def current_config():
    with set_current_vllm_config(VllmConfig()):
        yield


def table():
    return torch.arange(BLOCKS, dtype=torch.int32).view(TOKENS, 3).npu()


def dense_steps(names):
    mask = torch.ones(2048, 2048, dtype=torch.int8).triu_(1).npu()
    rows, tables = torch.arange(TOKENS).npu() * 3 * dense.BLOCK_SIZE, table()

    def step(lengths):
        values = {names[0]: [1, 2, 3], names[1]: lengths}
        return FusedAttentionMetadata(
            lambda: values, TOKENS, tables, rows, mask, torch.empty(1).npu(), one_query_each=True
        )

    return map(step, LENGTHS)


def fused(backend, size, **options):
    """The steps, and a function that computes one."""
    impl = backend.impl_cls(4, size, size**-0.5, 2, **options)
    cache = tuple(torch.randn(2, BLOCKS, dense.BLOCK_SIZE, 2, size, dtype=DTYPE).npu())
    query, key, value = (torch.randn(TOKENS, heads, size, dtype=DTYPE).npu() for heads in (4, 2, 2))
    return dense_steps(backend.builder_cls.length_args), lambda meta, output: impl.forward(
        None, query, key, value, cache, meta, output
    )


def dense_case():
    return *fused(dense.FusedAttentionBackend, 128), (4, 128)


def large_heads():
    return *fused(dense.FusedAttentionBackend, 256), (4, 256)


def window_case():
    return *fused(dense.FusedAttentionBackend, 64, sliding_window=100), (4, 64)


def sinks_case():
    sink_values = torch.randn(4, dtype=DTYPE).npu()
    return *fused(sinks.SinkAttentionBackend, 64, sinks=sink_values), (4, 64)


def int8_case():
    size, heads = 64, (4, 2)
    impl = dense.FusedAttentionImpl(heads[0], size, size**-0.5, heads[1])
    pages = torch.randint(-90, 90, (2, BLOCKS, dense.BLOCK_SIZE, heads[1], size), dtype=torch.int8)
    cache, scale = tuple(pages.npu()), torch.full((heads[1] * size,), 0.02, dtype=DTYPE).npu()
    layer = SimpleNamespace(k_cache_scale=scale, v_cache_scale=scale)
    layer.k_cache_offset = layer.v_cache_offset = None
    query, key, value = (torch.randn(TOKENS, n, size, dtype=DTYPE).npu() for n in (4, 2, 2))
    steps = dense_steps(dense.FusedAttentionBackend.builder_cls.length_args)
    return (
        steps,
        lambda meta, output: impl.forward(layer, query, key, value, cache, meta, output),
        (4, size),
    )


def latent_case():
    widths = latent.LATENT, latent.ROPE
    names = {"qk_nope_head_dim": 128, "v_head_dim": 128, "kv_b_proj": None}
    impl = latent.FusedLatentAttentionImpl(
        128, sum(widths), 0.04, 1, kv_lora_rank=widths[0], qk_rope_head_dim=widths[1], **names
    )
    cache, query = (
        [torch.randn(*shape, width, dtype=DTYPE).npu() for width in widths]
        for shape in ((BLOCKS, dense.BLOCK_SIZE, 1), (TOKENS, 128))
    )
    tables = table()

    def step(lengths):
        values = {"actual_seq_qlen": [1, 2, 3], "actual_seq_kvlen": lengths}
        none = torch.empty(1).npu()
        return latent.LatentMetadata(
            lambda: values, TOKENS, TOKENS, TOKENS, None, tables, None, none, None, TOKENS
        )

    def compute(meta, output):
        output.copy_(impl.forward_mqa(query, cache, meta, None)[0])

    return map(step, LENGTHS), compute, (128, widths[0])


@pytest.mark.parametrize(
    "case", [dense_case, large_heads, window_case, sinks_case, int8_case, latent_case]
)
def test_a_graph_of_short_sequences_computes_the_longest(case):
    (short, long), compute, shape = case()
    expected, output = (torch.zeros(TOKENS, *shape, dtype=DTYPE).npu() for _ in range(2))
    compute(long, expected)
    graph, config = acl_graph.NPUGraph(), VllmConfig()
    torch.npu.synchronize()
    with acl_graph._Capture(graph, stream=torch.npu.Stream()):
        compute(short, output)
    with set_forward_context({"layer": long}, config):
        graph.replay()
    torch.npu.synchronize()
    assert expected.abs().max() > 0
    assert torch.equal(output, expected)


def test_workspaces_are_asked_for_what_a_block_table_holds():
    given = {"block_table": torch.zeros(2, 40), "block_size": 128, "actual_seq_kvlen": [1, 7]}
    assert list(longest_lengths(given)["actual_seq_kvlen"]) == [40 * 128] * 2
    given["block_table"] = torch.zeros(2, 4000)  # More than the kernel takes.
    assert list(longest_lengths(given)["actual_seq_kvlen"]) == [262144] * 2
    assert given["actual_seq_kvlen"] == [1, 7]
