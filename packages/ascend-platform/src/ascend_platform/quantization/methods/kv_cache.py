"""The int8 KV cache (ModelSlim's C8): keys and values in int8, with scales and offsets that the checkpoint has."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from ascend_platform import extension

CACHE_NAMES = {
    f".{kind}_proj.kv_cache_{part}": f".attn.{kind}_cache_{part}" for kind in ("k", "v") for part in ("scale", "offset")
}
"""From a checkpoint's names to those of the attention's parameters."""

HEAD_STEP = 32
"""Head sizes for int8 caches are multiples of this (npu_fused_infer_attention_score)."""


class Int8CacheMethod(BaseKVCacheMethod):
    """Lets an attention keep keys and values in int8: round(x / scale + offset).

    An attention that can has ``int8_cache`` True. It finds ``k_cache_scale``, ``k_cache_offset``, ``v_cache_scale`` and
    ``v_cache_offset`` on the layer, each ``[kv_heads * head_size]`` of the model's dtype; offsets are None where all are 0.

    Args:
        name: of the layer, for errors.
    """

    def __init__(self, name: str, quant_config: Any = None) -> None:
        super().__init__(quant_config)
        self.name = name

    def create_weights(self, layer: Any) -> None:
        """Change the cache's dtype and prepare to load.

        Raises:
            RefusedError: the attention has no int8 cache, or not for this head size.
        """
        if not getattr(layer.impl, "int8_cache", False):
            title = getattr(layer.impl, "title", type(layer.impl).__name__)
            raise extension.RefusedError(
                f"the model has an int8 KV cache, which the fused attention keeps and {title} does not: install "
                "ascend-attention, or let VLLM_PLUGINS name ascend_attention"
            )
        if layer.head_size % HEAD_STEP or layer.head_size_v != layer.head_size:
            raise extension.RefusedError(
                f"{self.name} has heads of {layer.head_size} for an int8 KV cache; multiples of {HEAD_STEP} are served: quantize "
                "the model without kv_cache_type"
            )
        layer.kv_cache_torch_dtype = torch.int8
        size = layer.num_kv_heads * layer.head_size
        for kind in "kv":
            for part, start in (("scale", float("nan")), ("offset", 0.0)):
                own = torch.nn.Parameter(torch.full((size,), start, dtype=torch.float32), requires_grad=False)
                own.weight_loader = load_part
                layer.register_parameter(f"{kind}_cache_{part}", own)

    def process_weights_after_loading(self, layer: Any) -> None:
        dtype = layer.dtype
        for kind in "kv":
            scale, offset = getattr(layer, f"{kind}_cache_scale").data, getattr(layer, f"{kind}_cache_offset").data
            if bool(scale.isnan().any()):
                raise extension.RefusedError(f"the checkpoint has no kv_cache_scale for {self.name} ({kind}): quantize it again")
            for part, value in (("scale", scale.to(dtype)), ("offset", offset.to(dtype) if bool(offset.any()) else None)):
                delattr(layer, f"{kind}_cache_{part}")
                own = None if value is None else torch.nn.Parameter(value, requires_grad=False)
                layer.register_parameter(f"{kind}_cache_{part}", own)


def load_part(own: torch.nn.Parameter, loaded: torch.Tensor) -> None:
    """Load this rank's key heads' scales or offsets of all, or one for all."""
    loaded = loaded.flatten()
    if loaded.numel() == 1:
        own.data.fill_(loaded.item())
        return
    if loaded.numel() % own.numel():
        raise extension.RefusedError(
            f"a KV cache's scale has {loaded.numel()} elements; one, or a multiple of the {own.numel()} of this rank's heads, is "
            "served"
        )
    parts = loaded.numel() // own.numel()
    part = get_tensor_model_parallel_rank() * parts // get_tensor_model_parallel_world_size()
    own.data.copy_(loaded.view(parts, -1)[part])
