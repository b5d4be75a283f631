# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by the tests of ascend-models: serve prompts with MiniMax-M3, and compare with transformers
in float32; see serve_family.py.

    python harness/programs/serve_minimax_m3.py FILE
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import serve_family as program
import torch
from harness.models import minimax_m3


def layers(model: Any) -> list[Any]:
    """Those with selected blocks, which are also those with experts."""
    every = model.language_model.model.layers
    return [layer for layer in every if hasattr(layer.self_attn, "indexer")]


def selections(model: Any, **changed: int) -> None:
    for layer in layers(model):
        impl = layer.self_attn.indexer.impl
        impl.selection = dataclasses.replace(impl.selection, **changed)


def indexers(model: Any, change: Callable[..., Any]) -> None:
    """Replace the indexers' functions by others of the function and its arguments."""
    for layer in layers(model):
        impl = layer.self_attn.indexer.impl
        impl.forward = lambda *given, select=impl.forward: change(select, *given)


def _boundaries(model: Any) -> None:
    """As with blocks that begin 64 tokens later."""
    indexers(model, lambda select, query, key, at: select(query, key, (at - 64).clamp_min(0)))


def _heads(model: Any) -> None:
    """All heads attend to the blocks of the first."""

    def of_first(select: Any, *given: Any) -> Any:
        chosen = select(*given)
        return chosen[:, :1].expand_as(chosen).contiguous()

    indexers(model, of_first)


def _selection(model: Any) -> None:
    """The blocks with the least scores."""
    indexers(model, lambda select, query, key, at: select(-query, key, at))


def _index_rotation(model: Any) -> None:
    """Index keys that are rotated twice."""

    def turned(select: Any, query: Any, key: Any, at: Any) -> Any:
        return select(query, layers(model)[0].self_attn.rotary_emb(at, key, key)[0], at)

    indexers(model, turned)


def _index_norm(model: Any) -> None:
    for layer in layers(model):
        layer.self_attn.index_k_norm.weight.data.neg_()


def _swiglu_limit(model: Any) -> None:
    for layer in layers(model):
        layer.block_sparse_moe.shared_experts.act_fn.swiglu_limit *= 2


def _router_bias(model: Any) -> None:
    for layer in layers(model):
        layer.block_sparse_moe.e_score_correction_bias.data.zero_()


MUTATIONS: program.Mutations = {
    "number of blocks": lambda model: selections(model, topk=2),
    "local block": lambda model: selections(model, local=0),
    "first block": lambda model: selections(model, first=1),
    "block boundaries": _boundaries,
    "selection": _selection,
    "heads": _heads,
    "index rotation": _index_rotation,
    "index norm": _index_norm,
    "limit of SwiGLU": _swiglu_limit,
    "router bias": _router_bias,
}
"""Changes of the engine's model."""

if __name__ == "__main__":
    program.main(MUTATIONS, lambda weights: minimax_m3.reference(Path(weights), torch.float32))
