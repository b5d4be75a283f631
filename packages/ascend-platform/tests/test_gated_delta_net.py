# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Qwen's gated delta net in a step of decodes and prefills, against the convolutions and delta rules
that replace vLLM's, and the order in which its projections are loaded."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from ascend_platform.errors import RefusedError
from ascend_platform.state_layers import gated_delta_net
from ascend_platform.state_layers.gated_delta_metadata import PackedRows
from ascend_platform.state_layers.gated_delta_net import NPUGatedDeltaNetAttention as Layer
from ascend_platform.state_layers.kernels import causal_conv, gated_delta
from ascend_platform.worker.worker import NPUWorker

KEYS, VALUES, SIZE, WIDTH, BLOCKS = 2, 4, 16, 4, 9
CHANNELS = (2 * KEYS + VALUES) * SIZE
FLOAT32 = 2e-5


def layer():
    """The attributes that the methods under test read."""
    torch.manual_seed(0)
    sizes = SimpleNamespace(tp_size=1, key_dim=KEYS * SIZE, head_k_dim=SIZE, head_v_dim=SIZE)
    sizes._weight = torch.randn(CHANNELS, 1, WIDTH).npu()
    sizes.A_log, sizes.dt_bias = torch.rand(VALUES).npu(), torch.randn(VALUES).npu()
    sizes._kept = {
        "taps": sizes._weight[:, 0].t().contiguous(),
        "rates": -sizes.A_log.exp(),
        "biases": sizes.dt_bias,
        "zero": torch.zeros(1, CHANNELS).npu(),
    }
    sizes.kv_cache = (
        torch.randn(BLOCKS, WIDTH - 1, CHANNELS).npu(),
        torch.randn(BLOCKS, VALUES, SIZE, SIZE).npu(),
    )
    sizes.split_ba = lambda ba: ba.chunk(2, -1)
    sizes._inputs = lambda *given: Layer._inputs(sizes, *given)
    return sizes


def gates(gated_layer, ba):
    b, a = ba.chunk(2, -1)
    return a, b, gated_layer.A_log, gated_layer.dt_bias


def starts(sizes):
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)


def close(gated_layer, expected):
    torch.testing.assert_close(gated_layer, expected, rtol=0, atol=FLOAT32)


@pytest.fixture(autouse=True)
def built_in(monkeypatch):
    monkeypatch.setattr(gated_delta.rules, "decode", gated_delta.recurrent_rule)
    monkeypatch.setattr(gated_delta.rules, "prefill", gated_delta.chunk_rule)


def expected_decode(gated_layer, mixed, ba, blocks, conv, states):
    convolved = causal_conv.causal_conv1d_update(
        mixed, conv.transpose(1, 2), gated_layer._weight[:, 0], None, "silu", blocks
    )
    output = mixed.new_empty(len(mixed), 1, VALUES, SIZE)
    gated_delta.fused_recurrent_gated_delta_rule_packed_decode(
        convolved, *gates(gated_layer, ba), SIZE**-0.5, states, output, blocks, True
    )
    return output[:, 0]


@pytest.mark.parametrize("padding", [0, 2])
def test_decodes_and_the_padding_of_a_graph(padding):
    gated_layer = layer()
    conv, states = (cache.clone() for cache in gated_layer.kv_cache)
    blocks = torch.tensor([3, 7, 1] + [0] * padding, dtype=torch.int32).npu()
    mixed = torch.randn(len(blocks), CHANNELS).npu()
    ba = torch.randn(len(blocks), 2 * VALUES).npu()
    expected = expected_decode(gated_layer, mixed[:3], ba[:3], blocks[:3], conv, states)
    metadata = SimpleNamespace(
        non_spec_state_indices_tensor=blocks,
        padding=(blocks <= 0)[:, None] if padding else None,
    )
    output = Layer._decode(gated_layer, mixed, ba, gated_layer.kv_cache[0], metadata)
    close(output[:3], expected)
    close(gated_layer.kv_cache[1], states)
    close(gated_layer.kv_cache[0][1:], conv[1:])
    if padding:
        inputs = Layer._inputs(gated_layer, mixed, ba)
        assert not inputs.g[3:].any()
        assert not inputs.beta[3:].any()


@pytest.mark.parametrize(
    ("sizes", "decodes", "new"),
    [
        ([1, 1, 70, 2, 5], 2, [False, False, True, False, True]),
        ([5, 3], 0, [True, True]),
        ([66, 1, 4], 0, [False, False, False]),
    ],
)
def test_prefills_beside_decodes(sizes, decodes, new):
    gated_layer = layer()
    conv, states = (cache.clone() for cache in gated_layer.kv_cache)
    blocks = torch.tensor([4, 8, 2, 6, 5], dtype=torch.int32).npu()[: len(sizes)]
    begin, is_new = starts(sizes), torch.tensor(new)
    mixed, ba = torch.randn(sum(sizes), CHANNELS).npu(), torch.randn(sum(sizes), 2 * VALUES).npu()
    outputs = []
    if decodes:
        outputs.append(
            expected_decode(
                gated_layer, mixed[:decodes], ba[:decodes], blocks[:decodes], conv.clone(), states
            )
        )
    convolved = causal_conv.causal_conv1d_fn(
        mixed.t(),
        gated_layer._weight[:, 0],
        None,
        conv.transpose(1, 2),
        begin.npu(),
        blocks,
        ~is_new.npu(),
    ).t()[decodes:]
    q, k, v, g, beta = gated_delta.fused_post_conv_prep(
        convolved,
        *gates(gated_layer, ba[decodes:])[:2],
        gated_layer.A_log,
        gated_layer.dt_bias,
        KEYS,
        SIZE,
        SIZE,
    )
    inputs = gated_delta.GatedDeltaInputs(q, k, v, g, beta, SIZE**-0.5)
    rest = blocks[decodes:].long()
    before = states[rest].masked_fill(is_new[decodes:].npu().view(-1, 1, 1, 1), 0)
    prefills = (begin[decodes:] - decodes).npu()
    output, after = gated_delta.chunk_rule(inputs, before, prefills)
    states[rest] = after
    metadata = SimpleNamespace(
        rows=PackedRows.of(begin, is_new, WIDTH - 1, decodes, "npu"),
        non_spec_state_indices_tensor=blocks,
        prefill_query_start_loc=prefills,
        num_decodes=decodes,
    )
    close(
        Layer._prefill(gated_layer, mixed, ba, gated_layer.kv_cache[0], metadata),
        torch.cat((*outputs, output)),
    )
    close(gated_layer.kv_cache[0], conv)
    close(gated_layer.kv_cache[1], states)


@pytest.mark.parametrize("packed", [1, 2])
def test_projections_are_loaded_in_the_order_of_their_parts(packed):
    """Each of two ranks loads its heads; ``packed`` columns of a quantized weight are one."""
    heads, sizes, ranks = 4, [2, 2, 6], 2
    checkpoint = torch.arange(3 * heads * sum(sizes)).view(3, -1)
    if packed > 1:
        checkpoint = checkpoint.unflatten(-1, (-1, packed))[..., 0]
    interleaved = checkpoint.view(3, heads, -1)
    for rank in range(ranks):
        rows = interleaved[:, rank * heads // ranks : (rank + 1) * heads // ranks]
        parts = rows.split([size // packed for size in sizes], -1)
        expected = torch.cat([part.flatten(1) for part in parts], 1)
        order = torch.cat(
            [
                gated_delta_net._flat(heads // ranks, [size // packed for size in sizes])
                + each * heads // ranks * sum(sizes) // packed
                for each in range(ranks)
            ]
        )
        loaded = []

        def load(param, weight, loaded=loaded, rank=rank):
            loaded.append(weight.chunk(ranks, -1)[rank])

        gated_delta_net._loader(load, 1, order)(None, checkpoint)
        assert torch.equal(loaded[0], expected)


@pytest.mark.parametrize(
    ("interleaved", "columns", "other"),
    [(True, {}, True), (True, {"in_proj_qkvz": 0, "in_proj_ba": 0}, False), (False, {}, False)],
)
def test_reordered_projections_are_not_saved(interleaved, columns, other):
    """A loader of a saved state copies it to the parameters in whatever order they have."""
    net = torch.nn.Module()
    net.has_other_order = Layer.has_other_order.fget(
        SimpleNamespace(gqa_interleaved_layout=interleaved, _columns=columns)
    )
    worker = SimpleNamespace(get_model=lambda: torch.nn.Sequential(net))
    if other:
        with pytest.raises(RefusedError, match="fix: load the checkpoint"):
            NPUWorker._check_order(worker)
    else:
        NPUWorker._check_order(worker)
