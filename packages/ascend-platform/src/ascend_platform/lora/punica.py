# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""LoRA (vLLM's Punica wrapper): shrink and expand for all tokens and adapters of a batch in a few
matmuls.

vLLM keeps a layer's adapters in slots, A ``[slots, 1, rank, in]`` and B ``[slots, 1, out, rank]``.
The shrink multiplies by A of all slots, a mask sets the results of other adapters to zero, and the
expand multiplies by B of all slots and adds the result to the output: one launch for A of all
slices, one for the mask, and one per slice for B. Rows are not reordered and no shape depends on
the adapters in use, so there is no synchronization with the device. ``docs/lora.md`` compares it
with grouped matmuls.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class NPUPunicaWrapper(PunicaWrapperCPU):
    """Punica wrapper on the NPU (``vllm/lora/punica_wrapper/punica_base.py``).

    It extends vLLM's PyTorch wrapper, which handles full classifier weights.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: Any,
        *,
        lora_config: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        slots, dtype = lora_config.max_loras, lora_config.lora_dtype
        self._slots = torch.arange(slots, device=device)
        # [rows, slots]: 1 where a token, or a sampled row, uses the adapter of the slot.
        self._token_mask = torch.zeros(max_num_batched_tokens, slots, dtype=dtype, device=device)
        self._sampler_mask = torch.zeros_like(self._token_mask)
        # Mask of a layer's rows, where they are a part of the step's tokens.
        self._first_token: int | None = None

    def update_metadata(
        self,
        mapping: Any,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Update the adapter of each token, without synchronizing with the device."""
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        self.no_lora = not any(mapping.index_mapping)
        masks = self._token_mask, self._sampler_mask
        every = self.token_lora_indices, self.sampler_indices
        for mask, indices in zip(masks, every, strict=True):
            mask[: len(indices)] = indices.unsqueeze(1) == self._slots

    def token_mask(self, tokens: int) -> torch.Tensor:
        """``[tokens, slots]`` for the first tokens of the batch: 1 at the slot of a token's
        adapter."""
        return self._token_mask[:tokens]

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add ``x A B`` of each slice to y ``[tokens, sum of output_slices]``; x is ``[tokens,
        in]``."""
        if self.no_lora:
            return
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        shrunk = _shrink(x, lora_a_stacked, scale) * self._slot_mask(x)
        self._expand(y, shrunk, lora_b_stacked, output_slices)

    def add_shrink(
        self,
        y: Any,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Write ``x A`` of each slice into y ``[slices, tokens, rank]``; zeros for tokens without
        an adapter."""
        if self.no_lora:
            return
        x = x.view(-1, x.shape[-1])
        shrunk = (_shrink(x, lora_a_stacked, scale) * self._slot_mask(x)).sum(2)
        for index in range(len(lora_a_stacked)):
            y[index].copy_(shrunk[:, index])

    def add_expand(
        self,
        y: torch.Tensor,
        x: Any,
        lora_b_stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Add ``x[slice] B`` to each slice of y ``[tokens, ...]`` from ``offset_start`` on; x is
        ``[slices, tokens, rank]``."""
        if self.no_lora:
            return
        x = torch.stack(tuple(x), 1).to(lora_b_stacked[0].dtype)
        y, x = y.view(-1, y.shape[-1]), x.unsqueeze(2) * self._slot_mask(x)
        self._expand(y, x, lora_b_stacked, output_slices, offset_start)

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Add ``x B`` to y ``[tokens, hidden]``; x ``[tokens, rank]`` has the rows of A of each
        token's adapter."""
        if not self.no_lora:
            x = x[:, None, None] * self._slot_mask(x)
            self._expand(y, x, (lora_b_stacked,), (y.shape[-1],))

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Add ``x A B`` to the logits y ``[rows, vocab_size or more]`` of the sampled rows, or see
        :func:`of_tokens`."""
        if self.no_lora:
            return
        first = self._first_token
        mask = self._sampler_mask if first is None else self._token_mask[first:]
        shrunk = _shrink(x, (lora_a_stacked,), scale) * mask[: x.shape[0], None, :, None]
        self._expand(y, shrunk, (lora_b_stacked,), (min(y.shape[-1], lora_b_stacked.shape[2]),))

    def _slot_mask(self, x: torch.Tensor) -> torch.Tensor:
        return self._token_mask[self._first_token or 0 :][: x.shape[0], None, :, None]

    @staticmethod
    def _expand(
        y: torch.Tensor,
        x: torch.Tensor,
        stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        start: int = 0,
    ) -> None:
        """Multiply x ``[tokens, slices, slots, rank]`` by B of all slots, and add the result to the
        slices of y."""
        for index, (b, width) in enumerate(zip(stacked, output_slices, strict=True)):
            weight, part = _flatten_lora_b(b)[:width], y[:, start : start + width]
            if y.dtype == b.dtype:
                part.addmm_(x[:, index].flatten(1), weight.T)
            else:
                part += x[:, index].flatten(1) @ weight.T
            start += width


def _shrink(x: torch.Tensor, stacked: tuple[torch.Tensor, ...], scale: float) -> torch.Tensor:
    """Multiply x by A of all slices and slots; returns ``[tokens, slices, slots, rank]``."""
    slots, _, rank, width = stacked[0].shape
    shrunk = x.to(stacked[0].dtype) @ _stack_lora_a(stacked).view(-1, width).T
    shrunk = shrunk.view(x.shape[0], len(stacked), slots, rank)
    return shrunk if scale == 1 else shrunk * scale


def _stack_lora_a(stacked: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return A of all slices as one tensor; on first use they become views of it."""
    first = stacked[0]
    if len(stacked) == 1:
        return first
    size = first.numel() * first.element_size()
    if any(a.data_ptr() != first.data_ptr() + index * size for index, a in enumerate(stacked)):
        # Adapters are loaded into slots outside of inference mode too.
        with torch.inference_mode(False):
            for a, part in zip(stacked, torch.stack(stacked), strict=True):
                a.data = part
    return first.as_strided((len(stacked), *first.shape), (first.numel(), *first.stride()))


def _flatten_lora_b(b: torch.Tensor) -> torch.Tensor:
    """Return B ``[slots, 1, out, rank]`` as ``[out, slots * rank]``; on first use it is stored in
    this order."""
    slots, _, out, rank = b.shape
    if b.stride(2) != slots * rank:
        with torch.inference_mode(False):
            b.data = b.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    return b[:, 0].transpose(0, 1).reshape(out, slots * rank)


def of_tokens(
    manager: Any, compute_logits: Callable[..., Any], hidden_states: torch.Tensor
) -> Callable[..., Any]:
    """Return ``compute_logits`` for slices of a step's hidden states ``[tokens, hidden]``, each
    with its tokens' adapters.

    vLLM computes the logits of prompts so (``prompt_logprobs``), and lets the wrapper know the
    adapters of sampled rows only.
    """
    wrappers = manager._adapter_manager.punica_wrapper_mapping.values()

    def compute(rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        elements = rows.storage_offset() - hidden_states.storage_offset()
        with starting_at(elements // hidden_states.stride(0), *wrappers):
            return compute_logits(rows, *args, **kwargs)

    return compute


@contextlib.contextmanager
def starting_at(first: int, *wrappers: Any) -> Iterator[None]:
    """Let layers compute rows of the step's tokens from ``first`` on."""
    for wrapper in wrappers:
        wrapper._first_token = first
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper._first_token = None
