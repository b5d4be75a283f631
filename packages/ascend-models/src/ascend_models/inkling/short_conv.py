# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Inkling's short convolutions: over the last tokens of keys, values, and the outputs of attention
and experts, whose inputs are kept in a KV cache layer with a window of the kernel's size."""

import math
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.models.inkling.nvidia import short_conv

from ascend_models.common.rows import RowCache, RowsMetadata, page_bytes


def row_width(heads: int, head_dim: int, hidden_size: int) -> int:
    """Elements of a row of a layer's inputs on a rank, rounded up to a power of 2 so that pages of
    all layers have one size."""
    ranks = get_tensor_model_parallel_world_size()
    return 1 << (2 * (heads * head_dim + hidden_size) // ranks - 1).bit_length()


def model_page_bytes() -> int:
    """Bytes of the pages of all KV cache layers of the current model."""
    model = get_current_vllm_config().model_config
    text, dtype = model.hf_text_config, model.dtype
    assert isinstance(dtype, torch.dtype)
    widths = (
        row_width(text.num_key_value_heads, text.head_dim, text.hidden_size),
        row_width(text.swa_num_key_value_heads, text.swa_head_dim, text.hidden_size),
    )
    return page_bytes(max(widths), dtype)


class ConvInputs(RowCache):
    """The inputs of the four convolutions of a layer, instead of vLLM's InklingConvState."""

    def __init__(
        self, *, num_kv_heads: int, head_dim: int, hidden_size: int, kernel_size: int, prefix: str
    ) -> None:
        dtype: Any = get_current_vllm_config().model_config.dtype
        super().__init__(
            prefix,
            row_width(num_kv_heads, head_dim, hidden_size),
            dtype,
            model_page_bytes(),
            window=kernel_size,
        )
        ranks = get_tensor_model_parallel_world_size()
        kv, hidden = num_kv_heads * head_dim // ranks, hidden_size // ranks
        self.part = math.gcd(kv, hidden, self.width)
        """Elements of a part. A convolution's inputs are whole parts of a row: written and read as
        rows of their own they need no view that is not contiguous, which CANN would copy."""
        of_kv, of_hidden = kv // self.part, hidden // self.part
        self.stream_ranges = (
            (0, of_kv),
            (of_kv, of_kv),
            (2 * of_kv, of_hidden),
            (2 * of_kv + of_hidden, of_hidden),
        )
        """First parts, and their number, of keys, values, and outputs of attention and experts."""

    def parts(self, slots: torch.Tensor, stream: int) -> torch.Tensor:
        """Numbers of the parts that a convolution has of rows, int64 ``[..., number]``."""
        first, count = self.stream_ranges[stream]
        numbers = torch.arange(first, first + count, device=slots.device)
        return slots.unsqueeze(-1) * (self.width // self.part) + numbers


class ShortConv(short_conv.InklingShortConv):
    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Convolve each channel over the last tokens of a request, and add the input.

        Args:
            x: ``[tokens, dim]``.
            positions: int64 ``[tokens]``.

        Returns:
            ``[tokens, dim]``, computed in float32; rows of padding, and of a run without metadata,
            are those of ``x``.
        """
        metadata: Any = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return x
        meta: RowsMetadata = metadata[self.owner.prefix]
        tokens, owner = meta.num_tokens, self.owner
        assert isinstance(owner, ConvInputs)
        stream, some = self.stream_idx, x[:tokens]
        inputs = owner.rows.view(-1, owner.part)
        named = f"{owner.part} {owner.stream_ranges[stream]}"
        stored = meta.once(f"parts {named}", lambda: owner.parts(meta.slot_mapping, stream))
        inputs.index_copy_(0, stored.flatten(), some.reshape(-1, owner.part))
        at = positions[:tokens]
        slots = meta.once("taps", lambda: meta.last(at, self.kernel_size).flip(1))
        read = meta.once(f"taps {named}", lambda: owner.parts(slots.clamp_min(0), stream))
        taps = inputs[read].flatten(2).float().masked_fill((slots < 0).unsqueeze(-1), 0)
        convolved = ((taps * self.weight.squeeze(1).t()).sum(1) + some.float()).to(x.dtype)
        return torch.cat((convolved, x[tokens:])) if tokens < len(x) else convolved
