# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""KV cache layers of rows: one vector for each token, or for each group of tokens, in pages.

Windows, compressed entries and states of compressors are such layers. All of a model have pages of
one size in bytes, so that vLLM's KV cache groups share their memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy
import torch
from ascend_platform import extension
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

PAGE_ROWS = 16
"""Rows of a page of the widest cache in the model's dtype: npu_sparse_flash_attention reads pages
of a multiple of 16 rows."""


@dataclass
class RowsMetadata(AttentionMetadata):
    """Metadata of one step for the layers of a KV cache group.

    Attributes:
        block_table: int32 ``[requests, blocks]``.
        block_rows: rows of a block.
        slot_mapping: int64 ``[tokens]``, the row of each token, where each token has a row.
        requests: int64 ``[tokens]``, the request of each token.
        query_start_loc: first token of each request, on the host, ``requests + 1`` entries.
        seq_lens: tokens of each request after this step, on the host; none for windows.
        ends: int64, the step's tokens that end a group of tokens, for compressors; in a graph all,
            since any may.
        longest: a sequence length that none of the step exceeds.
        is_static: the step is computed in a graph, or as in one: the number of tokens is the
            same for each request, padding included, and the host knows no sequence length.
        shared: of :meth:`once`.
    """

    block_table: torch.Tensor
    block_rows: int
    slot_mapping: torch.Tensor
    requests: torch.Tensor
    query_start_loc: list[int]
    seq_lens: list[int]
    ends: torch.Tensor
    longest: int
    is_static: bool = False
    shared: dict[tuple[str, bool], torch.Tensor] = field(default_factory=dict)

    def once(self, name: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor that depends only on the step, computed by the first layer of the group.

        Values of a run before the capture are not those of the graph.
        """
        key = name, extension.is_captured()
        if key not in self.shared:
            self.shared[key] = compute()
        return self.shared[key]

    @property
    def num_tokens(self) -> int:
        """The step's tokens; those beyond are padding."""
        return self.query_start_loc[-1]

    @property
    def is_real(self) -> torch.Tensor:
        """Whether a token is none of padding, bool ``[tokens]``: padding is in the null block."""
        return self.slot_mapping >= self.block_rows

    def slots(self, rows: torch.Tensor, requests: torch.Tensor | None = None) -> torch.Tensor:
        """Find rows of requests in the cache.

        Args:
            rows: integers ``[tokens, n]``, numbers of rows of each token's request; negative ones
                are no rows.
            requests: int64 ``[tokens]``, by default those of the step's tokens.

        Returns:
            int64 ``[tokens, n]``, with -1 where there is no row.
        """
        owners = self.requests[: len(rows)] if requests is None else requests
        named = rows.long().clamp_min(0)
        blocks = named // self.block_rows
        found = self.block_table[owners.unsqueeze(1), blocks].long() * self.block_rows
        return torch.where(rows < 0, -1, found + named - blocks * self.block_rows)

    def last(self, positions: torch.Tensor, count: int) -> torch.Tensor:
        """The rows of the last tokens up to each token of the step, the latest first.

        Args:
            positions: int64 ``[tokens]``.
            count: tokens of each.

        Returns:
            int64 ``[tokens, count]``, with -1 before the first token of a request.
        """
        offsets = torch.arange(count, device=positions.device)
        return self.slots(positions.unsqueeze(1) - offsets)

    def groups(
        self, states: "RowsMetadata", ends: torch.Tensor, last: torch.Tensor, group: int
    ) -> torch.Tensor:
        """The rows of groups of tokens, int64 ``[groups]``.

        A graph also computes groups that go on, and padding. Their rows go to the null block.

        Args:
            states: metadata of the layer of the tokens' states.
            ends: int64 ``[groups]``, the last token of each, a token of the step.
            last: int64 ``[groups]``, the position of that token.
            group: tokens of a group.
        """
        slots = self.slots((last // group).unsqueeze(1), states.requests[ends]).squeeze(1)
        if not self.is_static:
            return slots
        is_whole = ((last + 1) % group == 0) & states.is_real[ends]
        return torch.where(is_whole, slots, 0)


class RowsMetadataBuilder(AttentionMetadataBuilder[RowsMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        first = layers[layer_names[0]]
        self._group, self._is_window = first.group, first.window is not None and not first.group
        self._block_rows = int(kv_cache_spec.block_size // kv_cache_spec.tokens_per_state)
        self._most = vllm_config.model_config.max_model_len
        scheduler = vllm_config.scheduler_config
        most = max(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        drafts = vllm_config.speculative_config
        self._decode = 1 + (drafts.num_speculative_tokens if drafts is not None else 0)
        each = torch.arange(most * self._decode, dtype=torch.int64)
        self._each, self._owners = each.to(device), (each // self._decode).to(device)
        self._has_graphs = not vllm_config.model_config.enforce_eager

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RowsMetadata:
        common = common_attn_metadata
        is_uniform = common.num_actual_tokens == common.num_reqs * self._decode
        is_decode = common.max_query_len == self._decode and (self._decode == 1 or is_uniform)
        if self._has_graphs and is_decode:
            return self._static(common)
        seq_lens: list[int] = []
        if not self._is_window:  # The host may wait for it.
            seq_lens = extension.host_lengths(common, "attention to compressed keys")
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        owners = numpy.repeat(numpy.arange(common.num_reqs), numpy.diff(starts))
        ends = self._each[:0]
        if self._group:
            ends = self._on_device(group_ends(starts, seq_lens, self._group))
        return RowsMetadata(
            block_table=common.block_table_tensor,
            block_rows=self._block_rows,
            slot_mapping=common.slot_mapping[: starts[-1]],
            requests=self._on_device(owners),
            query_start_loc=starts,
            seq_lens=seq_lens,
            ends=ends,
            longest=max(seq_lens, default=0),
        )

    def _static(self, common: CommonAttentionMetadata) -> RowsMetadata:
        """Metadata of decodes, in tensors that stay where they are while the model is served."""
        tokens = common.num_actual_tokens
        return RowsMetadata(
            block_table=common.block_table_tensor,
            block_rows=self._block_rows,
            slot_mapping=common.slot_mapping[:tokens],
            requests=self._owners[:tokens],
            query_start_loc=[*range(0, tokens + 1, self._decode)],
            seq_lens=[],
            ends=self._each[:tokens],
            longest=self._most,
            is_static=True,
        )

    def _on_device(self, numbers: Any) -> torch.Tensor:
        on_host = torch.from_numpy(numpy.ascontiguousarray(numbers, dtype=numpy.int64))
        return on_host.pin_memory().to(self.device, non_blocking=True)


def group_ends(starts: list[int], seq_lens: list[int], group: int) -> Any:
    """The tokens of a step, in order, that end a group of ``group`` tokens of their request."""
    found = [numpy.zeros(0, dtype=numpy.int64)]
    for (start, end), length in zip(pairwise(starts), seq_lens, strict=True):
        first = length - (end - start)  # position of the request's first token
        found.append(numpy.arange(start + group - 1 - first % group, end, group))
    return numpy.concatenate(found)


class RowsBackend(AttentionBackend):
    """Methods that vLLM calls on the attention backend of a KV cache layer."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_builder_cls() -> type[RowsMetadataBuilder]:
        return RowsMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        return extension.AttentionBackendBase.supported_kv_cache_layouts()


class PagedRows(NamedTuple):
    """Rows of one layer.

    Attributes:
        rows: ``[blocks, rows of a block, width]``, contiguous.
    """

    rows: torch.Tensor

    @property
    def device(self) -> torch.device:
        """By which vLLM's V2 runner tells the caches on the NPU."""
        return self.rows.device


class RowCache(torch.nn.Module, AttentionLayerBase):
    """KV cache layer of rows.

    With ``window`` each token has a row, and those before the window are freed. Without, each
    ``ratio`` tokens have a row.

    Args:
        prefix: name of the layer.
        width: elements of a row.
        dtype: of the rows.
        page_bytes: bytes of a page, those of all layers of the model.
        ratio: tokens of a row.
        window: tokens that are kept, or None for all.
        group: tokens of a group that a compressor makes a row of, 0 for other layers.
    """

    def __init__(
        self,
        prefix: str,
        width: int,
        dtype: torch.dtype,
        page_bytes: int,
        *,
        ratio: int = 1,
        window: int | None = None,
        group: int = 0,
    ) -> None:
        super().__init__()
        self.prefix, self.width, self.dtype = prefix, width, dtype
        self.page_bytes, self.ratio, self.window, self.group = page_bytes, ratio, window, group
        self.kv_cache: Any = torch.tensor([])
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in layers:
            raise ValueError(f"two layers have the name {prefix}")
        layers[prefix] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return RowsBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        rows = self.page_bytes // (self.width * self.dtype.itemsize)
        named: dict[str, Any] = {
            "block_size": rows * self.ratio,
            "num_kv_heads": 1,
            "max_tp_shards": 1,
            "head_size": self.width,
            "dtype": self.dtype,
            "model_version": "deepseek_v4",
        }
        if self.window is not None:
            return SlidingWindowMLASpec(sliding_window=self.window, **named)
        return MLAAttentionSpec(tokens_per_state=self.ratio, **named)

    def split_kv_cache(self) -> PagedRows:
        """The layer's cache as ascend-platform binds it: ``[blocks, 1, rows, width]`` without the
        dimension of heads."""
        return PagedRows(self.kv_cache.squeeze(1))

    @property
    def rows(self) -> torch.Tensor:
        """All rows of the layer, ``[slots, width]``."""
        return self.kv_cache.rows.view(-1, self.width)


def page_bytes(width: int, dtype: torch.dtype) -> int:
    """Bytes of the pages of a model whose widest rows in its dtype have this width."""
    return PAGE_ROWS * width * dtype.itemsize
