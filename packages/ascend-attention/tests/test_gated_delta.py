# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The gated delta rule by CANN's operators, against its recurrence in float64, and the choice
between them and the built-in."""

from types import SimpleNamespace

import ascend_attention
import pytest
import torch
import torch.nn.functional as F
from ascend_attention.gated_delta import FusedGatedDeltaRule
from ascend_platform import host
from ascend_platform.extension import GatedDeltaInputs
from ascend_platform.plugins import registry, requirements, slots
from ascend_platform.state_layers import gated_delta

LAYER = {
    "heads": 32,
    "sizes": (128, 128),
    "dtype": torch.bfloat16,
    "state_dtype": torch.bfloat16,
    "tokens": 1,
    "chunk_sizes": range(128, 129),
}


def inputs(tokens):
    torch.manual_seed(tokens)
    q, k = (F.normalize(torch.randn(tokens, 2, 128), dim=-1).bfloat16() for _ in range(2))
    return (
        q,
        k,
        torch.randn(tokens, 4, 128).bfloat16(),
        -torch.rand(tokens, 4),
        torch.rand(tokens, 4).bfloat16().float(),
    )


def pool(blocks):
    return torch.randn(blocks, 4, 128, 128).bfloat16()


def golden(q, k, v, g, beta, state):
    """Outputs and the state after each token of one request, in float64."""
    outputs, states, state = [], [], state.double()
    q, k = (each.double().repeat_interleave(2, 1) for each in (q, k))
    for t in range(len(v)):
        state = state * g[t].double().exp()[:, None, None]
        change = beta[t].double()[:, None] * (v[t].double() - (state @ k[t][..., None]).squeeze(-1))
        state = state + change[..., None] * k[t][:, None]
        outputs.append((state @ q[t][..., None]).squeeze(-1))
        states.append(state)
    return torch.stack(outputs), states


def close(result, expected):
    """Within a unit in the last place of bfloat16 for another order of sums, and half of one for
    rounding."""
    torch.testing.assert_close(result.cpu().double(), expected, rtol=1.5 * 2**-7, atol=2**-8)


def on_npu(tensors, scale):
    return GatedDeltaInputs(*(each.npu() for each in tensors), scale)


def strided(states):
    """The same numbers in blocks that are longer than a state."""
    region = torch.zeros(len(states), states[0].numel() + 64, dtype=states.dtype).npu()
    view = region[:, :-64].unflatten(1, states.shape[1:])
    view.copy_(states)
    return view


def in_float32(states):
    return states.float().npu()


@pytest.mark.parametrize("layout", [torch.Tensor.npu, strided, in_float32])
def test_decodes_change_only_their_blocks(layout):
    tensors, before = inputs(4), pool(6)
    states = layout(before)
    blocks = torch.tensor([4, 0, 2, 0], dtype=torch.int32)  # two rows are padding
    output = FusedGatedDeltaRule.decode(on_npu(tensors, 0.25), states, blocks.npu(), None, None)
    for row, block in ((0, 4), (2, 2)):
        expected, after = golden(*(x[row : row + 1] for x in tensors), before[block])
        close(output[row], expected[0] * 0.25)
        close(states[block], after[0])
    assert torch.equal(states[[0, 1, 3, 5]].bfloat16().cpu(), before[[0, 1, 3, 5]])


@pytest.mark.parametrize("layout", [torch.Tensor.npu, strided, in_float32])
def test_draft_tokens_begin_after_the_accepted_ones(layout):
    """The third request has fewer tokens than were accepted of the last step; the fourth is
    padding."""
    accepted = [2, 1, 3, 7]
    blocks = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 0, 0]], dtype=torch.int32)
    starts = torch.tensor([0, 3, 5, 6, 6], dtype=torch.int32)
    tensors, before = inputs(8), pool(13)
    states = layout(before)
    output = FusedGatedDeltaRule.decode(
        on_npu(tensors, 1.0),
        states,
        blocks.npu(),
        starts.npu(),
        torch.tensor(accepted, dtype=torch.int32).npu(),
    )
    assert len(output) == 8
    for row in range(3):
        part = slice(starts[row], starts[row + 1])
        expected, after = golden(
            *(x[part] for x in tensors), before[blocks[row, accepted[row] - 1]]
        )
        close(output[part], expected)
        for each, state in enumerate(after):
            close(states[blocks[row, each]], state)
    assert torch.equal(states[[0, 10, 11, 12]].bfloat16().cpu(), before[[0, 10, 11, 12]])


def prefill(rule, tensors, before):
    starts = torch.tensor([0, 1, len(tensors[0])], dtype=torch.int32).npu()
    return rule.prefill(on_npu(tensors, 0.25), before.npu(), starts)


@pytest.mark.parametrize("states", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("a_log", [None, 1, 16])
def test_prefills_by_the_operator(a_log, states):
    """Decays of trained weights are far below -1, with exp(A_log) from 1 to 16."""
    tensors, before = inputs(70), pool(2)
    if a_log:
        tensors = (*tensors[:3], -a_log * F.softplus(torch.randn(70, 4)), tensors[4])
    output, after = prefill(FusedGatedDeltaRule, tensors, before.to(states))
    for request, part in enumerate((slice(0, 1), slice(1, 70))):
        expected, states = golden(*(x[part] for x in tensors), before[request])
        close(output[part], expected * 0.25)
        close(after[request], states[-1])


@pytest.mark.parametrize(
    ("changed", "prefill", "decode"),
    [
        ({}, "", ""),
        ({"state_dtype": torch.float32}, "", ""),
        ({"state_dtype": torch.float16}, "states are float16", "states are float16"),
        ({"doubles_strengths": True}, "strengths above 1", ""),
        ({"dtype": torch.float16}, "not float16", "not float16"),
        ({"sizes": (64, 64)}, "64 and 64, npu_chunk_gated_delta_rule takes 128 to 128", ""),
        ({"sizes": (64, 64), "chunk_sizes": range(1, 129)}, "", ""),
        ({"sizes": (128, 520)}, "128 and 520", "npu_recurrent_gated_delta_rule takes 1 to 512"),
        ({"heads": 96}, "96 heads, npu_chunk_gated_delta_rule takes up to 64", ""),
        ({"tokens": 9}, "", "8 draft tokens, npu_recurrent_gated_delta_rule takes up to 7"),
    ],
)
def test_layers_out_of_the_documented_ranges_are_not_supported(changed, prefill, decode):
    for phase, reason in (("prefill", prefill), ("decode", decode)):
        result = FusedGatedDeltaRule.unsupported(phase, **(LAYER | changed))
        assert reason in result
        assert bool(reason) == bool(result)


def model(architecture="Qwen3NextForCausalLM", size=128, states="auto"):
    """The part of vLLM's configuration that the choice reads."""
    settings = {
        "linear_num_value_heads": 32,
        "linear_key_head_dim": size,
        "linear_value_head_dim": size,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            architecture=architecture,
            dtype=torch.bfloat16,
            hf_text_config=SimpleNamespace(**settings),
        ),
        cache_config=SimpleNamespace(mamba_cache_dtype="auto", mamba_ssm_cache_dtype=states),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        speculative_config=None,
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (model(), "fused (ascend-attention "),
        (
            model(states="float16"),
            "built-in PyTorch (states are float16, supported: bfloat16 and float32)",
        ),
        (
            model(size=64),
            (
                "built-in PyTorch prefill (keys and values of 64 and 64, npu_chunk_gated_delta_rule"
                " takes 128 to 128), fused "
            ),
        ),
        (
            model(states="float32"),
            f"fused (ascend-attention {requirements.version('ascend-attention')};"
            " --mamba-ssm-cache-dtype bfloat16 saves casts of states)",
        ),
        (model("Qwen3ForCausalLM"), "None"),
    ],
)
def test_summary_line_says_what_serves_and_why(monkeypatch, given, text):
    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setattr(slots, "_offers", {})
    ascend_attention.register()
    assert str(gated_delta.select(given)).startswith(text)


@pytest.mark.parametrize("states", ["auto", "float32"])
def test_decodes_are_built_in_on_a_chip_without_their_operator(monkeypatch, states):
    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setattr(slots, "_offers", {})
    monkeypatch.setattr(host, "chip", lambda: "Ascend950PR_9599")
    ascend_attention.register()
    rule = gated_delta.select(model(size=64, states=states))
    assert rule.serves("prefill")
    reason = "Ascend950PR_9599 has no npu_recurrent_gated_delta_rule"
    assert str(rule).endswith(f", built-in PyTorch decode ({reason})")
