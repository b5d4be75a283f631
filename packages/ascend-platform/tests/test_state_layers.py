# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Layers with states, on the NPU, against the recurrences that define them, token by token in
float64."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ascend_platform.extension import GatedDeltaInputs
from ascend_platform.state_layers import state_cache
from ascend_platform.state_layers.kernels import causal_conv, gated_delta, selective_scan
from harness.engines import npus
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

LENGTHS = [1, 5, 64, 130, 2]
FLOAT32 = 2e-5
"""Largest error of values around 1, in float32."""


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def requests(lengths):
    begin = starts(lengths).tolist()
    return [slice(a, b) for a, b in itertools.pairwise(begin)]


def bound_of_chunks(decay):
    """Bound with chunks of 64 tokens, whose decays are differences of sums of this many ``decay``:
    a unit in the last place of a sum is a relative error of the result."""
    return FLOAT32 + 64 * decay * 2**-24


def error(result, expected):
    return (result.cpu().double() - expected).abs().max()


def delta_rule(q, k, v, g, beta, state):
    """Outputs and states after each token of one request; arguments in float64, state ``[heads,
    values, keys]``."""
    groups, outputs, states = v.shape[1] // k.shape[1], [], []
    for t in range(len(v)):
        key, query = k[t].repeat_interleave(groups, 0), q[t].repeat_interleave(groups, 0)
        state = state * g[t].exp()[:, None, None]
        change = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, key))
        state = state + change[..., None] * key[:, None]
        outputs.append(torch.einsum("hvk,hk->hv", state, query))
        states.append(state)
    return torch.stack(outputs), states


def tensors(tokens, decay=1.0):
    torch.manual_seed(tokens)
    q, k = (F.normalize(torch.randn(tokens, 2, 16), dim=-1) for _ in range(2))
    return (
        q,
        k,
        torch.randn(tokens, 4, 24),
        -torch.rand(tokens, 4) * decay,
        torch.rand(tokens, 4) * 2,
    )


@pytest.mark.parametrize("decay", [0.01, 1, 30])
def test_chunks_of_prefills_compute_the_delta_rule(decay):
    inputs, states = tensors(sum(LENGTHS), decay), torch.randn(len(LENGTHS), 4, 24, 16)
    npu = GatedDeltaInputs(*(each.npu() for each in inputs), 0.25)
    output, after = gated_delta.chunk_rule(npu, states.npu(), starts(LENGTHS).npu())
    for each, part in enumerate(requests(LENGTHS)):
        expected, final = delta_rule(*(x[part].double() for x in inputs), states[each].double())
        assert error(output[part], expected * 0.25) < bound_of_chunks(decay)
        assert error(after[each], final[-1]) < bound_of_chunks(decay)


def test_heads_of_the_published_size():
    """16 heads of keys for 32 of values, 1024 tokens: repeat_interleave does not take as many
    elements on the NPU."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1024, heads, 128) * 0.1 for heads in (16, 16, 32))
    g, beta = -torch.rand(1024, 32), torch.rand(1024, 32)
    states, where = torch.zeros(1, 32, 128, 128), starts([1024]).npu()
    output, after = gated_delta.chunk_rule(
        GatedDeltaInputs(*(x.npu() for x in (q, k, v, g, beta)), 0.1), states.npu(), where
    )
    alone = [x.npu() for x in (q[:, 15:], k[:, 15:], v[:, 30:], g[:, 30:], beta[:, 30:])]
    expected, final = gated_delta.chunk_rule(
        GatedDeltaInputs(*alone, 0.1), states[:, 30:].npu(), where
    )
    # Matmuls of other batch sizes may add in another order.
    assert error(output[:, 30:], expected.cpu()) < FLOAT32
    assert error(after[:, 30:], final.cpu()) < FLOAT32
    v, pool, blocks = (
        v[..., :1],
        torch.zeros(1025, 32, 1, 128).npu(),
        torch.arange(1, 1025, dtype=torch.int32).npu(),
    )
    one = gated_delta.recurrent_rule(
        GatedDeltaInputs(*(x.npu() for x in (q, k, v, g, beta)), 0.1), pool, blocks, None, None
    )
    score = (
        torch.einsum("thk,thk->th", q.repeat_interleave(2, 1), k.repeat_interleave(2, 1))
        * 0.1
        * beta
    )
    assert error(one, (v * score[..., None]).double()) < FLOAT32


def test_equal_keys_do_not_grow_errors():
    """The updates of a chunk cancel, which sums of powers of their matrix would not survive in
    float32."""
    q, k, v, g, beta = tensors(64)
    k, g, beta = k[:1].expand_as(k), g * 0, torch.full_like(beta, 1.5)
    output, _ = gated_delta.chunk_rule(
        GatedDeltaInputs(*(x.npu() for x in (q, k, v, g, beta)), 1.0),
        torch.zeros(1, 4, 24, 16).npu(),
        starts([64]).npu(),
    )
    expected, _ = delta_rule(
        *(x.double() for x in (q, k, v, g, beta)), torch.zeros(4, 24, 16).double()
    )
    assert error(output, expected) < FLOAT32


def test_decodes_compute_the_delta_rule_in_their_blocks():
    inputs, pool = tensors(3), torch.randn(6, 4, 24, 16)
    # the second row is padding
    states, blocks = pool.npu(), torch.tensor([4, 0, 2], dtype=torch.int32)
    output = gated_delta.recurrent_rule(
        GatedDeltaInputs(*(x.npu() for x in inputs), 0.25), states, blocks.npu(), None, None
    )
    for row, block in ((0, 4), (2, 2)):
        expected, after = delta_rule(
            *(x[row : row + 1].double() for x in inputs), pool[block].double()
        )
        assert error(output[row], expected[0] * 0.25) < FLOAT32
        assert error(states[block], after[0]) < FLOAT32
    assert torch.equal(states[[0, 1, 3, 5]].cpu(), pool[[0, 1, 3, 5]])


def test_packed_decodes_normalize_queries_and_keys():
    q, k, v, *_ = tensors(3)
    q, k, a, b, a_log, bias = (
        q * 3,
        k / 2,
        torch.randn(3, 4),
        torch.randn(3, 4),
        torch.randn(4),
        torch.randn(4),
    )
    pool, blocks = torch.randn(6, 4, 24, 16), torch.tensor([4, 5, 2], dtype=torch.int32)
    mixed, states, out = (
        torch.cat([each.flatten(1) for each in (q, k, v)], 1),
        pool.npu(),
        torch.empty(3, 1, 4, 24).npu(),
    )
    arguments = [x.npu() for x in (mixed, a, b, a_log, bias)]
    gated_delta.fused_recurrent_gated_delta_rule_packed_decode(
        *arguments, 0.25, states, out, blocks.npu(), True
    )
    g, beta = -a_log.double().exp() * F.softplus((a + bias).double()), b.double().sigmoid()
    unit = [F.normalize(each.double(), dim=-1) for each in (q, k)]
    for row, block in enumerate(blocks.tolist()):
        part = slice(row, row + 1)
        outputs, after = delta_rule(
            *(x[part] for x in (*unit, v.double(), g, beta)), pool[block].double()
        )
        assert error(out[row], outputs * 0.25) < FLOAT32
        assert error(states[block], after[-1]) < FLOAT32


def test_draft_tokens_keep_the_state_after_each():
    lengths, accepted = [3, 1, 2], [2, 1, 3]
    blocks = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    inputs, pool = tensors(sum(lengths)), torch.randn(10, 4, 24, 16)
    states = pool.npu()
    output = gated_delta.recurrent_rule(
        GatedDeltaInputs(*(x.npu() for x in inputs), 1.0),
        states,
        blocks.npu(),
        starts(lengths).npu(),
        torch.tensor(accepted, dtype=torch.int32).npu(),
    )
    for row, part in enumerate(requests(lengths)):
        expected, after = delta_rule(
            *(x[part].double() for x in inputs), pool[blocks[row, accepted[row] - 1]].double()
        )
        assert error(output[part], expected) < FLOAT32
        for each, state in enumerate(after):
            assert error(states[blocks[row, each]], state) < FLOAT32
        for unused in blocks[row, lengths[row] :].tolist():
            assert torch.equal(states[unused].cpu(), pool[unused])


def convolution(inputs, weight, bias, history):
    """Of one request; ``[tokens, channels]``, in float64, after `history`."""
    rows = torch.cat((history, inputs))
    width = weight.shape[1]
    result = torch.stack(
        [(rows[t : t + width].T * weight).sum(1) + bias for t in range(len(inputs))]
    )
    return F.silu(result), rows[len(rows) - width + 1 :]


def test_convolutions_of_prefills_and_decodes():
    torch.manual_seed(0)
    weight, bias, pool = torch.randn(8, 4), torch.randn(8), torch.randn(7, 8, 3)
    states, blocks = pool.npu(), torch.tensor([3, 1, 5, 6, 2])
    x, known = torch.randn(sum(LENGTHS), 8), torch.tensor([True, False, True, True, False])
    actual = causal_conv.causal_conv1d_fn(
        x.T.npu(),
        weight.npu(),
        bias.npu(),
        states,
        starts(LENGTHS).npu(),
        blocks.npu(),
        known.npu(),
        "silu",
    )
    kept = []
    for row, part in enumerate(requests(LENGTHS)):
        history = pool[blocks[row]].T.double() * known[row]
        expected, last = convolution(x[part].double(), weight.double(), bias.double(), history)
        assert error(actual.T[part], expected) < FLOAT32
        assert error(states[blocks[row]].T, last) < FLOAT32
        kept.append(last)
    following = torch.randn(len(LENGTHS), 8)
    actual = causal_conv.causal_conv1d_update(
        following.npu(), states, weight.npu(), bias.npu(), "silu", blocks.npu()
    )
    for row, last in enumerate(kept):
        expected, after = convolution(
            following[row : row + 1].double(), weight.double(), bias.double(), last
        )
        assert error(actual[row], expected[0]) < FLOAT32
        assert error(states[blocks[row]].T, after) < FLOAT32
    assert torch.equal(states[0].cpu(), pool[0])


def test_draft_convolutions_begin_after_the_accepted_tokens():
    torch.manual_seed(0)
    weight, bias, pool = torch.randn(8, 4), torch.randn(8), torch.randn(4, 8, 5)
    lengths, accepted, blocks = [3, 2], [2, 1], torch.tensor([[3], [1]]).expand(2, 3)
    states, x = pool.npu(), torch.randn(sum(lengths), 8)
    actual = causal_conv.causal_conv1d_update(
        x.npu(),
        states,
        weight.npu(),
        bias.npu(),
        "silu",
        blocks.npu(),
        torch.tensor(accepted).npu(),
        starts(lengths).npu(),
        3,
    )
    for row, part in enumerate(requests(lengths)):
        history = pool[blocks[row, 0], :, accepted[row] - 1 : accepted[row] + 2].T.double()
        expected, _ = convolution(x[part].double(), weight.double(), bias.double(), history)
        assert error(actual[part], expected) < FLOAT32
        rows = torch.cat((history, x[part].double()))[1:]
        assert error(states[blocks[row, 0]].T[: len(rows)], rows) < FLOAT32


# as vLLM 0.33 has them
@pytest.mark.parametrize("into_cache", [False, True], ids=["returned", "into the cache"])
def test_scans_of_mamba_2(into_cache):
    torch.manual_seed(0)
    tokens, heads, size, width = sum(LENGTHS), 4, 8, 6
    x, dt, a = torch.randn(tokens, heads, size), torch.randn(tokens, heads), -torch.rand(heads) * 3
    b, c, d, bias = (
        torch.randn(tokens, 2, width),
        torch.randn(tokens, 2, width),
        torch.randn(heads),
        torch.randn(heads),
    )
    before, out = (
        torch.randn(len(LENGTHS), heads, size, width),
        torch.empty(tokens, heads, size).npu(),
    )
    cache, blocks = (
        torch.zeros(len(LENGTHS) + 1, heads, size, width).npu(),
        torch.arange(len(LENGTHS), 0, -1).npu(),
    )
    after = selective_scan.mamba_chunk_scan_combined_varlen(
        *(each.npu() for each in (x, dt, a, b, c)),
        64,
        starts(LENGTHS).npu(),
        out=out,
        D=d.npu(),
        dt_bias=bias.npu(),
        initial_states=before.npu(),
        dt_softplus=True,
        **({"final_states_out": cache, "final_state_indices": blocks} if into_cache else {}),
    )
    if into_cache:
        assert after is None
        assert not cache[0].any()
        after = cache[blocks]
    pool = torch.cat((before, torch.zeros(1, heads, size, width))).npu()
    for row, part in enumerate(requests(LENGTHS)):
        expected, state = scan(
            x[part], dt[part] + bias, a[:, None, None], b[part], c[part], before[row]
        )
        expected = expected + x[part].double() * d[:, None].double()
        largest = max(1, float(expected.abs().max()))
        assert error(out[part], expected) < bound_of_chunks(3) * largest
        largest = max(1, float(state.abs().max()))
        assert error(after[row], state) < bound_of_chunks(3) * largest
        # The last token again as a decode, from the same state.
    whole = a[:, None, None].expand(heads, size, width)
    first = [part.start for part in requests(LENGTHS)]
    actual = torch.empty(len(first), heads, size).npu()
    selective_scan.selective_state_update(
        pool,
        x[first].npu(),
        dt[first, :, None].expand(-1, -1, size).npu(),
        whole.npu(),
        b[first].npu(),
        c[first].npu(),
        D=d[:, None].expand(-1, size).npu(),
        dt_bias=bias[:, None].expand(-1, size).npu(),
        dt_softplus=True,
        state_batch_indices=torch.tensor([1, 2, 3, 4, 0]).npu(),
        out=actual,
    )
    for row in range(len(first) - 1):
        one = slice(first[row], first[row] + 1)
        expected, state = scan(
            x[one], dt[one] + bias, a[:, None, None], b[one], c[one], before[row + 1]
        )
        assert (
            error(actual[row], expected[0] + x[one][0].double() * d[:, None].double()) < FLOAT32 * 5
        )
        assert error(pool[row + 1], state) < FLOAT32
    assert torch.equal(pool[0].cpu(), before[0])


def scan(x, dt, a, b, c, state):
    """Of one request; x ``[tokens, heads, size]``, b and c ``[tokens, groups, width]``, in
    float64."""
    outputs, state = [], state.double()
    groups = x.shape[1] // b.shape[1]
    for t in range(len(x)):
        by = F.softplus(dt[t].double())[:, None, None]
        into, outof = (each[t].double().repeat_interleave(groups, 0)[:, None] for each in (b, c))
        state = state * (by * a.double()).exp() + by * x[t].double()[..., None] * into
        outputs.append((state * outof).sum(-1))
    return torch.stack(outputs), state


def test_scans_of_mamba_1():
    torch.manual_seed(0)
    tokens, channels, width = sum(LENGTHS), 8, 6
    x, dt, z, a = (
        torch.randn(tokens, channels),
        torch.randn(tokens, channels),
        torch.randn(tokens, channels),
        -torch.rand(channels, width),
    )
    b, c, d, bias = (
        torch.randn(tokens, width),
        torch.randn(tokens, width),
        torch.randn(channels),
        torch.randn(channels),
    )
    pool, known = torch.randn(7, channels, width), torch.tensor([True, False, True, True, False])
    states, blocks = pool.npu(), torch.tensor([3, 1, 5, 6, 2])
    actual = selective_scan.selective_scan_fn(
        *(each.npu() for each in (x.T, states, dt.T, a, b.T, c.T, d, z.T, bias)),
        True,
        query_start_loc=starts(LENGTHS).npu(),
        cache_indices=blocks.npu(),
        has_initial_state=known.npu(),
    )
    for row, part in enumerate(requests(LENGTHS)):
        before = pool[blocks[row], :, None] * known[row]
        expected, state = scan(
            x[part][..., None], dt[part] + bias, a[:, None], b[part, None], c[part, None], before
        )
        expected = (expected[..., 0] + x[part].double() * d.double()) * F.silu(z[part].double())
        assert error(actual.T[part], expected) < FLOAT32 * 5
        assert error(states[blocks[row]], state[:, 0]) < FLOAT32


def test_a_block_of_states_is_cut_as_one_of_pages():
    attention = FullAttentionSpec(
        block_size=128, num_kv_heads=2, head_size=16, dtype=torch.bfloat16
    )
    spec = MambaSpec(
        shapes=((3, 40), (4, 16, 32)),
        dtypes=(torch.bfloat16, torch.float32),
        block_size=1024,
        page_size_padded=attention.page_size_bytes,
    )
    groups = [
        SimpleNamespace(kv_cache_spec=attention, layer_names=["attention"]),
        SimpleNamespace(kv_cache_spec=spec, layer_names=["states"]),
    ]
    blocks, page = 5, attention.page_size_bytes
    memory = torch.zeros(blocks * page + 64, dtype=torch.int8)
    region = memory[64:].view(blocks, 1, 1, page)
    convolution, recurrent = state_cache.split(
        {"attention": None}, {"states": region}, SimpleNamespace(kv_cache_groups=groups)
    )["states"]
    assert convolution.shape == (5, 3, 40)
    assert recurrent.shape == (5, 4, 16, 32)
    recurrent[2], convolution[3] = 1, 1
    keys, values = memory[64:].split(blocks * page // 2)
    assert keys.view(blocks, -1).any(1).tolist() == [False, False, True, False, False]
    assert values.view(blocks, -1).any(1).tolist() == [False, False, False, True, False]


def test_states_beside_latents_are_in_their_parts():
    """A block of latents and the same block of states share no byte with another block: with the
    latents of all blocks first, states that filled a block as it is would be overwritten."""
    attention = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=48, dtype=torch.bfloat16)
    spec = MambaSpec(
        shapes=((3, 40), (2, 16, 32)),
        dtypes=(torch.bfloat16, torch.float32),
        block_size=1024,
        page_size_padded=attention.page_size_bytes,
    )
    groups = [
        SimpleNamespace(kv_cache_spec=attention, layer_names=["attention"]),
        SimpleNamespace(kv_cache_spec=spec, layer_names=["states"]),
    ]
    blocks, page = 5, attention.page_size_bytes
    region = torch.zeros(blocks * page, dtype=torch.int8).view(blocks, 1, 1, page)
    convolution, recurrent = state_cache.split(
        {"attention": SimpleNamespace(kv_lora_rank=32)},
        {"states": region},
        SimpleNamespace(kv_cache_groups=groups),
    )["states"]
    recurrent[2], convolution[2] = 1, 1
    latents, rotated = region.view(-1).split([blocks * page * 2 // 3, blocks * page // 3])
    assert latents.view(blocks, -1).any(1).tolist() == [False, False, True, False, False]
    assert rotated.view(blocks, -1).any(1).tolist() in (
        [False] * 5,
        [False, False, True, False, False],
    )


def test_states_that_do_not_fit_into_a_block_have_no_place():
    assert state_cache.place([100, 1000], [1024, 1024]) == [(1, 0), (0, 0)]
    assert state_cache.place([100, 800, 20], [1024, 1024]) == [(0, 832), (0, 0), (0, 960)]
    assert state_cache.place([1000, 1000, 30], [1024, 1024]) is None
    assert state_cache.place([1025], [1024, 1024]) is None


def test_layers_are_not_warmed_up():
    """vLLM would compute a prefill in the profile run, for the autotuner of its kernels."""
    program = """
from ascend_platform.state_layers import replacements
from vllm.model_executor.custom_op import op_registry_oot

replacements._replace()
layer = op_registry_oot["QwenGatedDeltaNetAttention"]
print("WARM-UP", layer._warmup_prefill_kernels(None, None, 0))
"""
    done = npus.run(1, sys.executable, "-c", program, VLLM_PLUGINS="ascend")
    assert "WARM-UP None" in done.stdout, done.stdout + done.stderr[-2000:]
