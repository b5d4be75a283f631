# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by the tests of ascend-models: serve_family.py for DeepSeek-V4, with its mutations.

python harness/programs/serve_deepseek_v4.py FILE
"""

import functools
from typing import Any

import serve_family as program
import torch


def attentions(model: Any, ratio: int) -> list[Any]:
    return [layer.attn for layer in model.model.layers if layer.attn.ratio == ratio]


def _sink(model: Any) -> None:
    for layer in model.model.layers:
        layer.attn.sinks.data.fill_(-torch.inf)


def _window(model: Any) -> None:
    for layer in model.model.layers:
        layer.attn.window -= 1


def _ratio(model: Any) -> None:
    for attention in attentions(model, 128):
        attention.ratio = 256


def _overlap(model: Any) -> None:
    def own_only(self: Any, each: Any) -> Any:
        overlapping = each.split(self.ratio, 1)[1]
        return torch.cat((overlapping[..., : self.head_dim], overlapping[..., self.head_dim :]), 1)

    for attention in attentions(model, 4):
        compressor = attention.compressor
        compressor._halves = functools.partial(own_only, compressor)


def _position_bias(model: Any) -> None:
    for attention in attentions(model, 128):
        attention.compressor.ape.data.zero_()


def _selection(model: Any) -> None:
    for attention in attentions(model, 4):
        attention.indexer.weights_proj.weight.data.neg_()


def _rotation_back(model: Any) -> None:
    from ascend_models.deepseek_v4 import attention

    rotate = attention.rotate
    attention.rotate = lambda x, cos_sin, inverse=False: x if inverse else rotate(x, cos_sin)


def _sinkhorn_steps(model: Any) -> None:
    for layer in model.model.layers:
        layer.hc_sinkhorn_iters -= 1


def _hash_table(model: Any) -> None:
    table = model.model.layers[0].ffn.gate.tid2eid
    table.data.copy_(table.data.roll(1, 0))


def _swiglu_limit(model: Any) -> None:
    for layer in model.model.layers:
        layer.ffn.shared_experts.act_fn.swiglu_limit *= 2


def _output_groups(model: Any) -> None:
    for layer in model.model.layers:
        weight = layer.attn.wo_a.weight.data
        weight.copy_(weight.roll(len(weight) // layer.attn.groups, 0))


MUTATIONS: program.Mutations = {
    "sink": _sink,
    "window": _window,
    "ratio": _ratio,
    "overlap": _overlap,
    "position bias": _position_bias,
    "selection": _selection,
    "Sinkhorn steps": _sinkhorn_steps,
    "hash table": _hash_table,
    "limit of SwiGLU": _swiglu_limit,
    "output groups": _output_groups,
    "rotation back": _rotation_back,
}
"""Changes of the engine's model; the last one is of a module."""

if __name__ == "__main__":
    program.main(MUTATIONS)
