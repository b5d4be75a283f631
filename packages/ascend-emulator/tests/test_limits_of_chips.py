# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Calls that some chips take and others refuse."""

import json
import sys
from pathlib import Path

import pytest
from ascend_emulator import chips

PROGRAM = Path(__file__).with_name("chip_calls.py")
A2, A3, OLD, NEW = "Ascend910B1", "Ascend910_93", "Ascend310P3", "Ascend950PR_9599"


@pytest.fixture(scope="module")
def outputs_of(run):
    """Output of the calls of chip_calls.py on a chip."""
    known = {}

    def on(chip, *options):
        if (chip, options) not in known:
            done = run("run", "--soc", chip, *options, "--", sys.executable, str(PROGRAM))
            assert done.returncode == 0, done.stderr
            known[chip, options] = json.loads(done.stdout)
        return known[chip, options]

    return on


@pytest.mark.parametrize(
    ("form", "strides"),
    [("contiguous", "[200, 1] and x2 [136, 1]"), ("left", "[1, 8] and x2 [1, 200]")],
)
def test_int8_matrices_of_310p_are_transposed_views_or_in_nz(outputs_of, form, strides):
    assert outputs_of(OLD)["int8 view"] is True
    refused = outputs_of(OLD)[f"int8 {form}"]
    assert f"x1 has strides {strides} for shape [200, 136]; Ascend310P3 takes x2 as a" in refused
    assert (
        "(rule quant_matmul.transposed-310p, seen on hardware: vllm-ascend, issue 1736" in refused
    )
    assert outputs_of(OLD, "--allow", "quant_matmul.transposed-310p")[f"int8 {form}"] is True
    assert outputs_of(A2)[f"int8 {form}"] is True


@pytest.mark.parametrize(
    ("part", "shapes"),
    [("Pre", [[2, 64], [2, 4], [2, 4, 4]]), ("Post", [2, 4, 64]), ("Sinkhorn", [2, 4, 4])],
)
@pytest.mark.parametrize("chip", [A2, A3, OLD, NEW])
def test_hyper_connections_are_of_950(outputs_of, chip, part, shapes):
    outcome, soc = outputs_of(chip)[f"Mhc{part}"], chips.chip(chip).name
    if chip == NEW:
        assert outcome == shapes
        return
    assert outcome.startswith(f"aclnnMhc{part}")
    assert f"is not an operator of {soc}, by torch_npu's" in outcome


def test_operators_of_other_chips_are_in_the_table():
    lacks = {name: set(chip.lacks) for name, chip in chips.chips().items()}
    assert {"aclnnMhcPreV2", "aclnnFFNToAttention"} <= lacks["Ascend910B3"]
    assert "aclnnFFNToAttention" not in lacks[A3]
    assert "aclnnFusedInferAttentionScoreV5" in lacks[OLD] - lacks[A3]
    assert not any("Mhc" in name for name in lacks[NEW])


@pytest.mark.parametrize(
    ("chip", "call", "outcome"),
    [
        (NEW, "float32 64", ["torch.float32", True]),
        (NEW, "bfloat16 128", ["torch.bfloat16", True]),
        (A3, "bfloat16 128", ["torch.bfloat16", True]),
        (A3, "float32 128", "rule chunk_gated_delta_rule.state-dtype, documented: op-plugin"),
        (A2, "bfloat16 64", "rule chunk_gated_delta_rule.head-size, documented: op-plugin 26.1.0"),
        (OLD, "bfloat16 128", "does not compute in bfloat16"),
    ],
)
def test_chunk_rule_by_chip(outputs_of, chip, call, outcome):
    result = outputs_of(chip)[f"chunk {call}"]
    assert result == outcome or (isinstance(outcome, str) and outcome in result)


def test_clamped_swiglu_of_a3_is_refused(outputs_of):
    """CANN 9.2.0-beta.2 takes the mode and computes another."""
    assert (
        outputs_of(A3)["swiglu 0"]
        == outputs_of(A2)["swiglu 0"]
        == outputs_of(A2)["swiglu 1"]
        == [4, 512]
    )
    refused = "(rule dequant_swiglu_quant.swiglu-mode-a3, seen on hardware: vllm-ascend"
    assert refused in outputs_of(A3)["swiglu 1"]


SLOTS = """
import torch, torch_npu
pages = torch.zeros(4, 16, 2, 64).half().npu()
rows, slots = torch.ones(4, 2, 64).half().npu(), torch.tensor([3, -1, 5, -1]).npu()
torch_npu.npu_scatter_pa_kv_cache(rows, rows, pages, pages.clone(), slots, cache_mode="Norm")
print(pages.flatten(0, 1)[:, 0, 0].nonzero().flatten().tolist())
"""


def test_negative_slots_are_left_out_if_they_are_allowed(run):
    """As vllm-ascend's graphs give them for padding."""
    program = ("--", sys.executable, "-c", SLOTS)
    refused = run("run", *program).stderr
    message = "slot -1 is negative; allowed: 0 or more (rule scatter_pa_kv_cache.slots, documented"
    assert message in refused
    assert run("run", "--allow", "scatter_pa_kv_cache.slots", *program).stdout == "[3, 5]\n"
