# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by the tests of ascend-models: serve prompts with Inkling, and compare with transformers in
float32; see serve_family.py.

    python harness/programs/serve_inkling.py FILE
"""

from typing import Any

import serve_family as program
import torch
from transformers import InklingForCausalLM


def load(weights: str) -> Any:
    """transformers' text model in float32."""
    return InklingForCausalLM.from_pretrained(
        weights, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def layers(model: Any, *, is_local: bool | None = None) -> list[Any]:
    every = model.model.layers
    return [each for each in every if is_local is None or each.attn.is_local == is_local]


def _biases(model: Any) -> None:
    """Biases of the next distance."""
    for layer in layers(model):
        proj = layer.attn.rel_logits_proj.proj.data
        proj.copy_(proj.roll(1, 1))


def _extent(model: Any) -> None:
    """The last distance has no bias."""
    for layer in layers(model, is_local=False):
        layer.attn.rel_logits_proj.proj.data[:, -1] = 0


def _window(model: Any) -> None:
    for layer in layers(model, is_local=True):
        layer.attn.local_extent -= 1


def _log_scaling(model: Any) -> None:
    model.model.config.log_scaling_alpha = 0.05


def _taps(model: Any) -> None:
    for layer in layers(model):
        for conv in (layer.attn.k_sconv, layer.attn.v_sconv, layer.attn_sconv, layer.mlp_sconv):
            conv.weight.data.copy_(conv.weight.data.roll(1, 2))


def _value_taps(model: Any) -> None:
    """The last tap of the values' convolution."""
    for layer in layers(model):
        layer.attn.v_sconv.weight.data[..., 0] = 0


def _router_bias(model: Any) -> None:
    for layer in layers(model)[1:]:
        layer.mlp.gate.bias.data.zero_()


def _shared_experts(model: Any) -> None:
    """The shared experts in another order."""
    for layer in layers(model)[1:]:
        weight = layer.mlp.sink_experts.w13_weight.data
        weight.copy_(weight.roll(1, 0))


def _scale_of_dense_layers(model: Any) -> None:
    layers(model)[0].mlp.global_scale.data.mul_(1.05)


def _width_multiplier(model: Any) -> None:
    model.logits_processor.logits_mup_width_multiplier *= 1.01


MUTATIONS: program.Mutations = {
    "biases": _biases,
    "extent": _extent,
    "window": _window,
    "log scaling": _log_scaling,
    "taps": _taps,
    "taps of values": _value_taps,
    "router bias": _router_bias,
    "shared experts": _shared_experts,
    "scale of dense layers": _scale_of_dense_layers,
    "width multiplier": _width_multiplier,
}
"""Changes of the engine's model."""

if __name__ == "__main__":
    program.main(MUTATIONS, load)
