# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Metadata of gated delta nets: that of vLLM, and the indices that its layers share in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)


@dataclass
class PackedRows:
    """Rows of packed requests for a convolution, each with its history, then its tokens.

    The source has the step's tokens; the ``kept`` inputs before each request, unless all requests
    are new; and one row of zeros.

    Attributes:
        order: rows of the source in packed order, ``[tokens + requests * kept]``.
        outputs: of the step's tokens among the convolved rows, ``[tokens]``.
        last: rows of the source with the last ``kept`` inputs of each request.
        all_new: whether no request has a state.
        new_prefills: requests without a state among the prefills; None without such.
    """

    order: torch.Tensor
    outputs: torch.Tensor
    last: torch.Tensor
    all_new: bool
    new_prefills: torch.Tensor | None

    @classmethod
    def of(
        cls, starts: torch.Tensor, is_new: torch.Tensor, kept: int, decodes: int, device: Any
    ) -> PackedRows:
        """Compute them on the host.

        Args:
            starts: ``[requests + 1]``, the first token of each request.
            is_new: ``[requests]``; the first ``decodes`` of them are decodes.
        """
        starts = starts.long()
        sizes, tokens, requests = starts.diff(), int(starts[-1]), len(starts) - 1
        each, all_new = torch.arange(requests), bool(is_new.all())
        outputs = torch.arange(tokens) + each.repeat_interleave(sizes) * kept
        begins = (starts[:-1] + each * kept)[:, None] + torch.arange(kept)
        order = torch.empty(tokens + requests * kept, dtype=torch.long)
        order[outputs + kept] = torch.arange(tokens)
        history = tokens + torch.arange(requests * kept).view(requests, kept)
        zero = tokens if all_new else tokens + requests * kept
        order[begins] = history.masked_fill_(is_new[:, None], zero)
        last = order[(begins + sizes[:, None]).flatten()]
        new = is_new[decodes:].nonzero().flatten()
        indices = async_tensor_h2d(torch.cat((order, outputs, last, new)), device=device)
        order, outputs, last, new = indices.split([len(x) for x in (order, outputs, last, new)])
        return cls(order, outputs, last, all_new, new if len(new) and not all_new else None)


class NPUGDNAttentionMetadata(GDNAttentionMetadata):
    """vLLM's metadata with what layers share.

    Attributes:
        rows: of a step with prefills and without drafts.
        padding: ``[requests, 1]``, which requests of a graph's batch are padding.
    """

    rows: PackedRows | None = None
    padding: torch.Tensor | None = None


class NPUGDNAttentionMetadataBuilder(GDNAttentionMetadataBuilder):
    """vLLM's builder, which gives a prefill the indices of new requests."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        states = self.non_spec_state_indices_tensor
        self._padding = states.new_zeros(len(states), 1, dtype=torch.bool)
        config = self.vllm_config.model_config.hf_text_config
        self._kept = config.linear_conv_kernel_dim - 1

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> GDNAttentionMetadata:
        """With draft tokens vLLM's layers clear the states of ``~prefill_has_initial_state``. With a
        mask torch_npu waits for the device in each layer; the complement of indices is the
        complement of their bits."""
        built = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        built.__class__ = NPUGDNAttentionMetadata
        assert isinstance(built, NPUGDNAttentionMetadata)
        if built.num_prefills:
            self._describe_prefills(built, common_attn_metadata)
        elif self._stage_decode(0, built.num_decodes, built.num_spec_decodes):
            # The graph reads this memory, which each step writes before its replay.
            indices = built.non_spec_state_indices_tensor
            assert indices is not None
            built.padding = self._padding[: len(indices)]
            torch.le(indices[:, None], 0, out=built.padding)
        return built

    def _build_chunk_metadata(self, *_: Any) -> tuple[None, None]:
        """No indices of a Triton kernel's chunks."""
        return None, None

    def _describe_prefills(self, built: NPUGDNAttentionMetadata, common: Any) -> None:
        starts = common.query_start_loc_cpu
        is_new = common.seq_lens_cpu_upper_bound <= starts.diff()
        if built.spec_sequence_masks_cpu is None:
            built.rows = PackedRows.of(starts, is_new, self._kept, built.num_decodes, self.device)
            return
        assert built.prefill_state_indices is not None
        is_new = is_new[~built.spec_sequence_masks_cpu]
        rows = is_new[-len(built.prefill_state_indices) :].nonzero().flatten()
        built.prefill_has_initial_state = async_tensor_h2d(~rows, device=self.device)


class NPUGDNAttentionBackend(GDNAttentionBackend):
    """vLLM's backend with the builder above."""

    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        """Its builder."""
        return NPUGDNAttentionMetadataBuilder
