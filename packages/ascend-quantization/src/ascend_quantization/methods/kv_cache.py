# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Int8 KV cache (ModelSlim's C8), with the checkpoint's scales and offsets."""

from __future__ import annotations

from typing import Any

import torch
from ascend_platform.extension import RefusedError, with_state
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

CACHE_NAMES = {
    f".{kind}_proj.kv_cache_{part}": f".attn.{kind}_cache_{part}"
    for kind in ("k", "v")
    for part in ("scale", "offset")
}
"""Suffixes of names in a checkpoint to those of the attention layer's parameters."""

HEAD_STEP = 32
"""Head sizes for int8 caches are multiples of this (npu_fused_infer_attention_score)."""


class Int8CacheMethod(BaseKVCacheMethod):
    """KV cache method that stores keys and values as int8: round(x / scale + offset).

    An attention implementation that supports it has ``int8_cache`` True. The layer gets
    ``k_cache_scale``, ``k_cache_offset``, ``v_cache_scale`` and ``v_cache_offset``, each
    ``[kv_heads * head_size]`` of the model's dtype; offsets are None if all are 0.

    Args:
        name: of the layer, for errors.
    """

    def __init__(self, name: str, quant_config: Any = None) -> None:
        super().__init__(quant_config)
        self.name = name

    def create_weights(self, layer: Any) -> None:
        """Set the cache's dtype and create the parameters to load.

        Raises:
            RefusedError: the attention does not support an int8 cache, or not for this head size.
        """
        if not getattr(layer.impl, "int8_cache", False):
            title = getattr(layer.impl, "title", type(layer.impl).__name__)
            raise RefusedError(
                f"the model has an int8 KV cache, which {title} does not support and the fused"
                f" attention does; fix: use {with_state('ascend-attention')}"
            )
        if layer.head_size % HEAD_STEP or layer.head_size_v != layer.head_size:
            raise RefusedError(
                f"{self.name} has an int8 KV cache with head size {layer.head_size}; multiples of"
                f" {HEAD_STEP} are supported; fix: quantize the model without kv_cache_type"
            )
        layer.kv_cache_torch_dtype = torch.int8
        size = layer.num_kv_heads * layer.head_size
        for kind in "kv":
            for part, start in (("scale", float("nan")), ("offset", 0.0)):
                own = torch.nn.Parameter(
                    torch.full((size,), start, dtype=torch.float32), requires_grad=False
                )
                own.weight_loader = load_part
                layer.register_parameter(f"{kind}_cache_{part}", own)

    def process_weights_after_loading(self, layer: Any) -> None:
        dtype = layer.dtype
        for kind in "kv":
            scale = getattr(layer, f"{kind}_cache_scale").data
            offset = getattr(layer, f"{kind}_cache_offset").data
            if bool(scale.isnan().any()):
                raise RefusedError(
                    f"no kv_cache_scale for {self.name} ({kind}) in the checkpoint; fix: quantize"
                    " again"
                )
            for part, value in (
                ("scale", scale.to(dtype)),
                ("offset", offset.to(dtype) if bool(offset.any()) else None),
            ):
                delattr(layer, f"{kind}_cache_{part}")
                own = None if value is None else torch.nn.Parameter(value, requires_grad=False)
                layer.register_parameter(f"{kind}_cache_{part}", own)


def load_part(own: torch.nn.Parameter, loaded: torch.Tensor) -> None:
    """Load this rank's part of the scales or offsets of all KV heads, or one value for all."""
    loaded = loaded.flatten()
    if loaded.numel() == 1:
        own.data.fill_(loaded.item())
        return
    if loaded.numel() % own.numel():
        raise RefusedError(
            f"a KV cache scale has {loaded.numel()} elements; supported: one, or a multiple of the"
            f" {own.numel()} of this rank's heads; fix: quantize the KV cache again"
        )
    parts = loaded.numel() // own.numel()
    part = get_tensor_model_parallel_rank() * parts // get_tensor_model_parallel_world_size()
    own.data.copy_(loaded.view(parts, -1)[part])
