# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fusion of RMSNorm and dynamic quantization in an FX graph."""

import operator

import pytest
import torch
from ascend_platform.graph import fusion_passes
from torch import fx

HIDDEN, EPSILON = 256, 1e-5


def traced(
    kept: tuple[int, ...], parts: tuple[int, ...] = (0, 2), **options: str
) -> fx.GraphModule:
    """RMSNorm and dynamic quantization as traced by Dynamo; ``kept``: outputs of the norm that the
    graph returns."""
    graph = fx.Graph()
    given = {name: graph.placeholder(name) for name in ("x", "residual", "weight")}
    norm = graph.call_function(torch.ops.npu.npu_add_rms_norm, (*given.values(), EPSILON))
    normed = {place: graph.call_function(operator.getitem, (norm, place)) for place in parts}
    shaped = graph.call_method("reshape", (normed[0], -1, HIDDEN))
    quantized = graph.call_function(
        torch.ops.npu.npu_dynamic_quant,
        (shaped,),
        {key: given[value] for key, value in options.items()},
    )
    results = [graph.call_function(operator.getitem, (quantized, place)) for place in (0, 1)]
    graph.output((*results, *(normed[place] for place in kept)))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kept", [(2,), ()])
def test_rms_norm_and_dynamic_quant_are_fused(kept, dtype):
    module = traced(kept, parts=(0, *kept))
    torch.manual_seed(0)
    x, residual, weight = (
        torch.randn(shape, dtype=dtype).npu() for shape in ((9, HIDDEN), (9, HIDDEN), (HIDDEN,))
    )
    before = module(x, residual, weight)
    assert fusion_passes.fuse_norm_quant(module.graph) == 1
    module.recompile()
    module.graph.lint()
    targets = [node.target for node in module.graph.nodes]
    assert torch.ops.npu.npu_add_rms_norm_dynamic_quant in targets
    assert torch.ops.npu.npu_dynamic_quant not in targets
    values, scale, *sums = module(x, residual, weight)
    assert len(sums) == len(before) - 2
    assert all(map(torch.equal, sums, before[2:]))
    total = (x + residual).cpu().double()  # rounded, as both operators have it
    exact = (
        total * (total.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.cpu().double()
    )
    steps = exact.abs().amax(-1) / 127
    torch.testing.assert_close(scale.cpu().double(), steps, rtol=1e-2, atol=0)
    assert (
        float(
            (values.cpu() * scale.cpu().double().unsqueeze(1) - exact)
            .abs()
            .div(steps.unsqueeze(1))
            .max()
        )
        < 0.75
    )
    assert int((values.cpu().int() - before[0].cpu().int()).abs().max()) <= 1


@pytest.mark.parametrize(
    "module",
    [traced((0, 2)), traced((2,), smooth_scales="weight"), traced((1, 2), parts=(0, 1, 2))],
    ids=["also used as it is", "with a scale for each channel", "with its deviation"],
)
def test_other_patterns_are_not_fused(module):
    before = str(module.graph)
    assert fusion_passes.fuse_norm_quant(module.graph) == 0
    assert str(module.graph) == before
