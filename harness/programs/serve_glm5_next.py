# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by the tests of ascend-models: serve_family.py for GLM-5-next, with mutations of its own.

python harness/programs/serve_glm5_next.py FILE
"""

import functools
from typing import Any

import harness.engines.imports  # noqa: F401
import serve_family as program
import torch


def layers(model: Any) -> Any:
    return model.language_model.model.layers


def indexers(model: Any) -> list[Any]:
    return [each.self_attn.indexer for each in layers(model) if each.layer_kind == "mla"]


def _group(model: Any) -> None:
    """The last token of a selected group is left out."""

    def without_last(self: Any, groups: Any, positions: Any) -> Any:
        tokens = type(self).tokens(self, groups, positions)
        is_last = tokens % self.group == self.group - 1
        return torch.where(is_last & (tokens != positions.unsqueeze(1)), -1, tokens)

    for indexer in indexers(model):
        indexer.tokens = functools.partial(without_last, indexer)


def _tail(model: Any) -> None:
    """Only the last token of the group that goes on is seen."""

    def own_only(self: Any, groups: Any, positions: Any) -> Any:
        tokens = type(self).tokens(self, groups, positions)
        last = positions.unsqueeze(1)
        is_tail = tokens >= (last + 1) // self.group * self.group
        return torch.where(is_tail & (tokens != last), -1, tokens)

    for indexer in indexers(model):
        indexer.tokens = functools.partial(own_only, indexer)


def _topk(model: Any) -> None:
    for indexer in indexers(model):
        indexer.topk -= 1


def _selection(model: Any) -> None:
    for indexer in indexers(model):
        indexer.wk_weights_proj.weight.data[indexer.head_dim :].neg_()


def _gates_of_keys(model: Any) -> None:
    for indexer in indexers(model):
        indexer.index_kpool_compress_gate.data.zero_()


def _bias_of_positions(model: Any) -> None:
    for indexer in indexers(model):
        indexer.index_kpool_compress_ape.data.zero_()


def _decay(model: Any) -> None:
    for layer in layers(model):
        if layer.layer_kind == "kda":
            layer.self_attn.kda_lower_bound = -4.0


def _convolution(model: Any) -> None:
    for layer in layers(model):
        if layer.layer_kind == "kda":
            layer.self_attn._merged_conv_weight = layer.self_attn._merged_conv_weight.roll(1, 1)


def _sinkhorn_steps(model: Any) -> None:
    for layer in layers(model):
        layer.mhc_sinkhorn_iterations -= 1


def _expansion(model: Any) -> None:
    for layer in layers(model):
        layer.mhc_post_mult_value = 1.9


def _swiglu_limit(model: Any) -> None:
    for layer in layers(model):
        getattr(layer.mlp, "shared_experts", layer.mlp).act_fn.swiglu_limit *= 2


MUTATIONS: program.Mutations = {
    "group": _group,
    "tail": _tail,
    "top-k": _topk,
    "selection": _selection,
    "gates of keys": _gates_of_keys,
    "bias of positions": _bias_of_positions,
    "decay": _decay,
    "convolution": _convolution,
    "Sinkhorn steps": _sinkhorn_steps,
    "expansion": _expansion,
    "limit of SwiGLU": _swiglu_limit,
}
"""Changes of the engine's model."""

if __name__ == "__main__":
    program.main(MUTATIONS)
