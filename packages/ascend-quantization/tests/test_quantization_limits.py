# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Matrices that a quantization scheme refuses: their groups, sizes and offsets."""

import pytest
import torch
from ascend_quantization import base
from ascend_quantization.methods import fp8
from ascend_quantization.methods.linear import ModelSlimLinearMethod
from ascend_quantization.schemes import SCHEMES
from harness.models.quantize import Spec

IN = 256


@pytest.mark.parametrize(
    ("spec", "groups", "experts", "named"),
    [
        (
            Spec(8, "dynamic"),
            4,
            False,
            (
                "W8A8_DYNAMIC with 4 scales per channel; W8A8_DYNAMIC supports one per channel;"
                " fix: quantize"
            ),
        ),
        (Spec(8), 4, True, "W8A16 supports one per channel in experts"),
        (
            Spec(4),
            16,
            False,
            (
                "16 scales per channel for this rank's 256 inputs; group sizes that are multiples"
                " of 32"
            ),
        ),
    ],
)
def test_unsupported_groups_are_refused(spec, groups, experts, named):
    with pytest.raises(ValueError, match=named):
        SCHEMES[spec.scheme].check_groups(IN, groups, experts, "x")


@pytest.mark.parametrize(
    ("experts", "cure"), [(False, "-size$"), (True, "or set --enable-expert-parallel$")]
)
def test_groups_that_a_rank_has_in_part_are_refused(experts, cure):
    """Qwen3-30B-A3B has 768 inputs in an expert's second matrix: with groups of 128, four ranks
    have one and a half each."""
    named = (
        "groups of 128, which do not divide this rank's 192 inputs; fix: lower"
        f" --tensor-parallel{'-size, ' * experts}{cure}"
    )
    with pytest.raises(ValueError, match=named):
        SCHEMES["W4A16"].count_groups(192, 128, experts, "x")
    assert SCHEMES["W4A16"].count_groups(384, 128, experts, "x") == 3
    assert SCHEMES["W4A16"].count_groups(384, -1, experts, "x") == 1


@pytest.mark.parametrize("method", [ModelSlimLinearMethod, fp8.RequantizedLinearMethod])
@pytest.mark.parametrize(("inputs", "parts"), [(64, [40000, 25536]), (65536, [64])])
def test_too_large_matrices_are_refused_before_loading(method, inputs, parts):
    """Gemma-2-27B has 73,728 outputs in a layer."""
    scheme = SCHEMES["W8A8_DYNAMIC"]
    linear_method = (
        method(scheme, scheme.stored({}, "x"), "x")
        if method is ModelSlimLinearMethod
        else method(None, "x")
    )
    layer, named = (
        torch.nn.Module(),
        (
            rf"x is W8A8_DYNAMIC with {sum(parts)} outputs and {inputs} inputs .* up to 65535 of"
            r" each; fix"
        ),
    )
    with pytest.raises(ValueError, match=named):
        linear_method.create_weights(
            layer=layer,
            input_size_per_partition=inputs,
            output_partition_sizes=parts,
            input_size=inputs,
            output_size=sum(parts),
            params_dtype=torch.float16,
            weight_loader=None,
        )
    assert not list(layer.parameters())


def test_asymmetric_weights_with_quantized_inputs_are_refused():
    parameters = base.Quantized(
        torch.zeros(2, 32, dtype=torch.int8), torch.ones(2, 1), torch.ones(2, 1)
    )
    with pytest.raises(ValueError, match="x is W8A8_DYNAMIC with asymmetric weights"):
        SCHEMES["W8A8_DYNAMIC"].checked(parameters, "x")
