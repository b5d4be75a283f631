# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Layers with adapters that vLLM shards wrongly, does not reach, takes for other tokens, or does
not compute with."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.lora.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    ColumnParallelLinearWithShardedLoRA,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from ascend_platform.errors import RefusedError
from ascend_platform.lora import punica

OF_ONE_ADAPTER = (ColumnParallelLinearWithLoRA, ColumnParallelLinearWithShardedLoRA)
"""Layers with one B for all parts, which vLLM takes for one part, or for two of the same size."""


def install(manager: Any) -> None:
    """Let a WorkerLoRAManager shard adapters as layers are, reach all users of a layer, and refuse
    what it would leave out."""
    known = manager._adapter_manager
    _shard(known)
    _share(known)
    _divide(known)
    _refuse(manager)


def _shard(known: Any) -> None:
    """Slice B as the layer's weight is sharded."""
    for layer in known.modules.values():
        sizes = getattr(layer.base_layer, "output_sizes", None)
        # One of Qwen3-Next's gated delta net, whose rows are in the order of key heads.
        if type(layer) in OF_ONE_ADAPTER and sizes is not None:
            layer.slice_lora_b = _slicer(layer, [(size, True) for size in sizes])
    for mixer in known.model.modules():
        projection: Any = getattr(mixer, "in_proj", None)
        if isinstance(mixer, MambaMixer2) and type(projection) in OF_ONE_ADAPTER:
            # One group of B and C, which each rank has.
            inner, group = (mixer.intermediate_size, True), (mixer.ssm_state_size, False)
            projection.slice_lora_b = _slicer(
                projection, [inner, inner, group, group, (mixer.num_heads, True)]
            )


def _slicer(layer: Any, parts: list[tuple[int, bool]]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that selects a rank's rows of B ``[out, rank]``; parts: their rows, and
    whether they are sharded."""

    def slice_lora_b(lora_b: torch.Tensor) -> torch.Tensor:
        split = lora_b.split([size for size, _ in parts])
        rows = [part.chunk(layer.tp_size)[layer.tp_rank] for part in split]
        each = zip(rows, split, parts, strict=True)
        return torch.cat([row if is_sharded else part for row, part, (_, is_sharded) in each])

    return slice_lora_b


def _share(known: Any) -> None:
    """Replace a layer with adapters under its other names, such as the gate that a shared expert
    multiplies its output by."""
    layers = [each for each in known.modules.values() if isinstance(each.base_layer, LinearBase)]
    wrappers = {id(layer.base_layer): layer for layer in layers}
    for parent in list(known.model.modules()):
        for name, child in parent._modules.items():
            if id(child) in wrappers and not isinstance(parent, BaseLayerWithLoRA):
                setattr(parent, name, wrappers[id(child)])


def _divide(known: Any) -> None:
    """Let Mamba 1's inner projections, which it computes of prefills and then of decodes, take the
    adapters of these tokens."""
    mixers: list[Any] = [
        module for module in known.model.modules() if isinstance(module, MambaMixer)
    ]
    for mixer in mixers:
        mixer._ssm_transform = _divided(mixer, list(known.punica_wrapper_mapping.values()))


def _divided(mixer: Any, wrappers: list[Any]) -> Callable[[torch.Tensor], Any]:
    transform, prefilled = mixer._ssm_transform, False

    def ssm_transform(x: torch.Tensor) -> Any:
        nonlocal prefilled
        metadata: Any = get_forward_context().attn_metadata[mixer.prefix]
        is_mixed = metadata.num_prefill_tokens > 0 and metadata.num_decode_tokens > 0
        prefilled = is_mixed and not prefilled
        with punica.starting_at(metadata.num_decode_tokens if prefilled else 0, *wrappers):
            return transform(x)

    return ssm_transform


def _refuse(manager: Any) -> None:
    """Refuse adapters of layers that vLLM would leave out, before it stores or evicts any.

    vLLM's MLAAttention computes with W_UK and W_UV, copies of ``kv_b_proj``; convolutions are
    computed from their weights; and some layers have no form with adapters. Layers that
    ``--lora-target-modules`` excludes are left out on request.
    """
    known, load = manager._adapter_manager, manager._load_adapter
    attention = (each for each in known.model.modules() if isinstance(each, MLAAttention))
    latent = {id(layer.kv_b_proj) for layer in attention}
    refused = {}
    for name, layer in known.modules.items():
        if id(layer) in latent:
            refused[name] = "which latent attention multiplies into others when the model is loaded"
        elif getattr(getattr(layer.base_layer, "weight", None), "ndim", 0) == 3:
            refused[name] = "a convolution"
    for name, block in known.model.named_modules():
        if getattr(block, "is_sequence_parallel", False):
            inside = [each for each in known.modules if each.startswith(f"{name}.")]
            inner = (known.packed_modules.get(each, [each]) for each in inside)
            why = "whose tokens are divided among ranks (sequence-parallel experts)"
            refused |= dict.fromkeys(itertools.chain(*inner), why)
    wrapped = {id(layer.base_layer) for layer in known.modules.values()}
    for name, module in known.model.named_modules():
        is_left_out = (
            isinstance(module, LinearBase)
            and id(module) not in wrapped
            and known._match_target_modules(name)
        )
        # else of a tower, see --enable-tower-connector-lora
        if is_left_out and known._get_punica_wrapper(name) is not None:
            parent, _, own = name.rpartition(".")
            packed = known.packed_modules_mapping.get(own, ())
            parts = (f"{parent}.{part}".lstrip(".") for part in packed)
            refused |= dict.fromkeys([name, *parts], "for which vLLM has no form with adapters")
    # vLLM takes other names in adapters of pooling models and, from 0.33 on, of text-only models.
    text_names: Any = getattr(known, "_get_text_lora_names", lambda _: [])
    for name, why in list(refused.items()):
        others = [name.removeprefix("model.")] if known.is_pooling_model else []
        refused |= dict.fromkeys([*others, *text_names(name)], why)

    def load_adapter(request: LoRARequest) -> LoRAModel:
        adapter: LoRAModel = load(request)
        if found := sorted(refused.keys() & adapter.loras.keys()):
            raise RefusedError(
                f"LoRA adapter {request.lora_name} in {request.lora_path} adapts {found[0]},"
                f" {refused[found[0]]}; fix: an adapter of other layers, or --lora-target-modules"
                f" without {found[0].rpartition('.')[2]}, which leaves this part of the adapter out"
            )
        return adapter

    manager._load_adapter = load_adapter
