"""Rotary embedding on a fused NPU operator, registered by ``CustomOp.register_oot`` on import.

Shapes, dtypes and limits of the operators are those of ``torch_npu/_op_plugin_docs.py`` in the torch_npu wheel.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch_npu
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding


class NPURotaryMixin:
    """Mixin that rotates query and key with one npu_mrope, which indexes the cosine and sine cache by position.

    npu_mrope supports both rotation styles and partial rotary dimensions in multiples of 64 bytes (32 elements of 16-bit types,
    16 of float32). Other sizes fall back to vLLM's PyTorch implementation.
    """

    def forward_oot(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate query and key ``[tokens, heads * head_size]`` by positions ``[tokens]``."""
        if key is None or self.rotary_dim * query.element_size() % 64:
            return self.forward_native(positions, query, key)
        tokens = positions.numel()
        rotated_query, rotated_key = torch_npu.npu_mrope(
            positions.view(-1),
            query.view(tokens, -1),
            key.view(tokens, -1),
            self._match_cos_sin_cache_dtype(query),
            self.head_size,
            mrope_section=[0, 0, 0],
            rotary_mode="half" if self.is_neox_style else "interleave",
        )
        return rotated_query.view(query.shape), rotated_key.view(key.shape)


def _plain_rotary_classes() -> Iterator[type[RotaryEmbedding]]:
    """RotaryEmbedding and its subclasses that differ only in the contents of the cosine and sine cache.

    vLLM looks replacements up by the class's name (``CustomOp.__new__``), so that each subclass needs a registration.
    """
    for cls in vars(rotary_embedding).values():
        if isinstance(cls, type) and issubclass(cls, RotaryEmbedding):
            forwards = ("forward", "forward_native", "forward_static")
            if all(getattr(cls, name) is getattr(RotaryEmbedding, name) for name in forwards):
                yield cls


for _cls in list(_plain_rotary_classes()):
    _cls.register_oot(type(f"NPU{_cls.__name__}", (NPURotaryMixin, _cls), {}))
