"""LoRA: what adapters add to a layer's output, for all tokens and adapters of a batch in a few matrix products.

vLLM keeps the adapters of a layer in slots, A ``[slots, 1, rank, in]`` and B ``[slots, 1, out, rank]``. All slots' A are
multiplied at once, what is not of a token's own adapter is set to zero, and the product with all slots' B is added to the output:
one launch for A of all slices of a layer, one for the zeros, and one for B of each slice. No row is moved and nothing depends on
which adapters there are, so that the host waits for nothing. ``docs/lora.md`` compares it with grouped products.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class NPUPunicaWrapper(PunicaWrapperCPU):
    """vLLM's interface to what layers with LoRA compute (``vllm/lora/punica_wrapper/punica_base.py``).

    A classifier's full weights are added as in vLLM's wrapper in PyTorch, which this one extends.
    """

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, *, lora_config: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        slots, dtype = lora_config.max_loras, lora_config.lora_dtype
        self._slots = torch.arange(slots, device=device)
        # 1 where a token, or a row that is sampled from, has the adapter of a slot
        self._of_tokens = torch.zeros(max_num_batched_tokens, slots, dtype=dtype, device=device)
        self._of_samples = torch.zeros_like(self._of_tokens)

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Take which adapter each token has; nothing is read back from the device."""
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        self.no_lora = not any(mapping.index_mapping)
        for chosen, indices in ((self._of_tokens, self.token_lora_indices), (self._of_samples, self.sampler_indices)):
            chosen[: len(indices)] = indices.unsqueeze(1) == self._slots

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
        """Add to y ``[tokens, sum of output_slices]`` what the adapters make of x ``[tokens, in]``, in each slice."""
        if self.no_lora:
            return
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        self._expand(y, _shrink(x, lora_a_stacked, scale) * self._chosen(x), lora_b_stacked, output_slices)

    def add_shrink(self, y: Any, x: torch.Tensor, lora_a_stacked: tuple[torch.Tensor, ...], scale: float, **kwargs: Any) -> None:
        """Write ``x A`` of each slice into y, ``[slices, tokens, rank]``, where a token has an adapter, else zeros."""
        if self.no_lora:
            return
        x = x.view(-1, x.shape[-1])
        own = (_shrink(x, lora_a_stacked, scale) * self._chosen(x)).sum(2)
        for index in range(len(lora_a_stacked)):
            y[index].copy_(own[:, index])

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
        """Add ``x[slice] B`` to each slice of y ``[tokens, ...]``, from ``offset_start`` on; x ``[slices, tokens, rank]``."""
        if self.no_lora:
            return
        x = torch.stack(tuple(x), 1).to(lora_b_stacked[0].dtype)
        self._expand(y.view(-1, y.shape[-1]), x.unsqueeze(2) * self._chosen(x), lora_b_stacked, output_slices, offset_start)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """Add ``x B`` to y ``[tokens, hidden]``; x ``[tokens, rank]`` is each token's row of its adapter's A."""
        if not self.no_lora:
            self._expand(y, x[:, None, None] * self._chosen(x), (lora_b_stacked,), (y.shape[-1],))

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
        """Add ``x A B`` to the logits y ``[rows, vocabulary or more]`` of the rows that are sampled from."""
        if self.no_lora:
            return
        chosen = self._of_samples[: x.shape[0], None, :, None]
        shares = _shrink(x, (lora_a_stacked,), scale) * chosen
        self._expand(y, shares, (lora_b_stacked,), (min(y.shape[-1], lora_b_stacked.shape[2]),))

    def _chosen(self, x: torch.Tensor) -> torch.Tensor:
        return self._of_tokens[: x.shape[0], None, :, None]

    @staticmethod
    def _expand(
        y: torch.Tensor,
        x: torch.Tensor,
        stacked: tuple[torch.Tensor, ...],
        output_slices: tuple[int, ...],
        start: int = 0,
    ) -> None:
        """Add to y, slice by slice, the product of x ``[tokens, slices, slots, rank]`` with B of all slots."""
        for index, (b, width) in enumerate(zip(stacked, output_slices, strict=True)):
            weight, part = _by_output(b)[:width], y[:, start : start + width]
            if y.dtype == b.dtype:
                part.addmm_(x[:, index].flatten(1), weight.T)
            else:
                part += x[:, index].flatten(1) @ weight.T
            start += width


def _shrink(x: torch.Tensor, stacked: tuple[torch.Tensor, ...], scale: float) -> torch.Tensor:
    """x times A of all slices and slots: ``[tokens, slices, slots, rank]``."""
    slots, _, rank, width = stacked[0].shape
    made = x.to(stacked[0].dtype) @ _side_by_side(stacked).view(-1, width).T
    made = made.view(x.shape[0], len(stacked), slots, rank)
    return made if scale == 1 else made * scale


def _side_by_side(stacked: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A of a layer's slices as one tensor, which they become views of when they are first used."""
    first = stacked[0]
    if len(stacked) == 1:
        return first
    size = first.numel() * first.element_size()
    if any(a.data_ptr() != first.data_ptr() + index * size for index, a in enumerate(stacked)):
        with torch.inference_mode(False):  # adapters are put into slots outside of inference mode too
            for a, part in zip(stacked, torch.stack(stacked), strict=True):
                a.data = part
    return first.as_strided((len(stacked), *first.shape), (first.numel(), *first.stride()))


def _by_output(b: torch.Tensor) -> torch.Tensor:
    """B ``[slots, 1, out, rank]`` as ``[out, slots * rank]``, the order in memory that it gets when it is first used."""
    slots, _, out, rank = b.shape
    if b.stride(2) != slots * rank:
        with torch.inference_mode(False):
            b.data = b.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
    return b[:, 0].transpose(0, 1).reshape(out, slots * rank)
