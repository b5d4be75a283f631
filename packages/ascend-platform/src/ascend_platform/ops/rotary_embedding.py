# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Rotary embeddings on fused NPU operators, registered by ``CustomOp.register_oot`` on import.

Shapes, dtypes and limits of the operators are those of ``torch_npu/_op_plugin_docs.py`` in the
torch_npu wheel.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch_npu
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.rotary_embedding import (
    DeepseekScalingRotaryEmbedding,
    MRotaryEmbedding,
    RotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

MROPE_SECTIONS = {(16, 24, 24), (24, 20, 20), (8, 12, 12)}
"""Sections that npu_mrope supports with three rows of positions (op-plugin,
``docs/zh/custom_APIs``): those of Qwen2-VL and Qwen2.5-VL, Qwen3-VL, and GLM-4V."""

ONE_ROW = [0, 0, 0]
"""The section of npu_mrope for one row of positions."""

MAX_HEADS = 999
"""Batch size and heads of npu_rotary_mul; interleaved, one multiplied by the other."""


def _is_supported(layer: Any, query: torch.Tensor, head_size: int = 0) -> bool:
    """Whether npu_mrope supports the head size and the rotary dimensions: multiples of 64 bytes
    (op-plugin's page)."""
    sizes = (layer.rotary_dim, head_size or layer.head_size)
    return all(size * query.element_size() % 64 == 0 for size in sizes)


def _rotate(
    layer: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    section: Sequence[int],
    cache_mode: str,
    head_size: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key with one npu_mrope, which indexes the cosine and sine cache by position.

    Args:
        positions: ``[tokens]``, or ``[3, tokens]`` with a section.
        section: frequencies of each row of positions, zeros for one row.
        cache_mode: how the rows share the frequencies, default (one range each) or interleave.
        head_size: elements of a head, if not those of the layer.
    """
    tokens, two_dims = positions.shape[-1], query.dim() == key.dim() == 2
    rotated_query, rotated_key = torch_npu.npu_mrope(
        positions,
        query if two_dims else query.reshape(tokens, -1),  # latent attention passes slices
        key if two_dims else key.reshape(tokens, -1),
        layer._match_cos_sin_cache_dtype(query),
        head_size or layer.head_size,
        mrope_section=section,
        rotary_mode="half" if layer.is_neox_style else "interleave",
        cache_mode=cache_mode,
    )
    if two_dims:
        return rotated_query, rotated_key
    return rotated_query.view(query.shape), rotated_key.view(key.shape)


class NPURotaryMixin:
    """Mixin that rotates query and key with npu_mrope.

    npu_mrope supports both rotation styles, and heads and partial rotary dimensions in multiples of
    64 bytes (32 elements of 16-bit types, 16 of float32). Other sizes fall back to vLLM's PyTorch
    implementation.
    """

    def forward_oot(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate query and key ``[tokens, heads * head_size]`` by positions ``[tokens]``."""
        if key is None or not _is_supported(self, query):
            return self.forward_native(positions, query, key)
        return _rotate(self, positions.view(-1), query, key, ONE_ROW, "default")

    def rotate_first(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rotate the first elements of heads that are wider than in the layer; None if npu_mrope
        does not support the width."""
        if not _is_supported(self, query, head_size):
            return None
        return _rotate(self, positions.view(-1), query, key, ONE_ROW, "default", head_size)


@MRotaryEmbedding.register_oot
class NPUMRotaryEmbedding(MRotaryEmbedding):
    """M-RoPE by npu_mrope; sections that it does not support fall back to vLLM's PyTorch
    implementation."""

    def forward_oot(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rotate query and key ``[tokens, heads * head_size]`` by positions ``[tokens]`` or ``[3,
        tokens]``."""
        section, cache_mode = ONE_ROW, "default"
        if positions.dim() == 2:
            section = self.mrope_section or section
            cache_mode = "interleave" if self.mrope_interleaved else "default"
        sections = tuple(section) in MROPE_SECTIONS or positions.dim() == 1
        if key is None or offsets is not None or not sections or not _is_supported(self, query):
            return self.forward_native(positions, query, key, offsets)
        return _rotate(self, positions, query, key, section, cache_mode)


@ApplyRotaryEmb.register_oot
class NPUApplyRotaryEmb(ApplyRotaryEmb):
    """Rotation of vision encoders by npu_rotary_mul, with a cosine and a sine for each element of a
    head."""

    def forward_oot(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x ``[batch, tokens, heads, head_size]``, batch optional, by cos and sin ``[tokens,
        head_size / 2]``."""
        batch, heads = (x.shape[0] if x.dim() == 4 else 1), x.shape[-2]
        most = max(batch, heads) if self.is_neox_style else batch * heads
        if (
            most > MAX_HEADS
            or 2 * cos.shape[-1] != x.shape[-1]
            or cos.dim() != 2
            or x.shape[-1] >= 896
        ):
            return self.forward_native(x, cos, sin)
        inputs, cos, sin, shape, dtype = self._pre_process(x, cos, sin)
        factors = [self._for_each_element(each.to(inputs.dtype)) for each in (cos, sin)]
        mode = "half" if self.is_neox_style else "interleave"
        rotated = torch_npu.npu_rotary_mul(inputs, *factors, mode)
        return self._post_process(rotated, shape, dtype)

    def _for_each_element(self, half: torch.Tensor) -> torch.Tensor:
        """Expand ``[tokens, head_size / 2]`` to ``[1, tokens, 1, head_size]``."""
        both = torch.cat((half, half), -1) if self.is_neox_style else half.repeat_interleave(2, -1)
        return both[None, :, None]


def _plain_rotary_classes() -> Iterator[type[RotaryEmbeddingBase]]:
    """RotaryEmbedding and the classes that differ only in the contents of the cosine and sine
    cache.

    vLLM looks replacements up by the class's name (``CustomOp.__new__``), so that each subclass
    needs a registration.
    """
    yield DeepseekScalingRotaryEmbedding  # its own forward_native computes the same
    for cls in vars(rotary_embedding).values():
        if isinstance(cls, type) and issubclass(cls, RotaryEmbedding):
            forwards = ("forward", "forward_native", "forward_static")
            if all(getattr(cls, name) is getattr(RotaryEmbedding, name) for name in forwards):
                yield cls


for _cls in list(_plain_rotary_classes()):
    _cls.register_oot(type(f"NPU{_cls.__name__}", (NPURotaryMixin, _cls), {}))
