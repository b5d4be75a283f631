# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Dense decoder attention with npu_fused_infer_attention_score over the paged KV cache: causal,
sliding-window or cross.

Arguments, dtypes and limits of the kernel are those of ``torch_npu/_op_plugin_docs.py`` in the
torch_npu wheel. The KV cache is written by npu_scatter_pa_kv_cache, documented there for Atlas A2
and A3.
"""

import dataclasses
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
import torch_npu
from ascend_platform import extension
from vllm.config import CUDAGraphMode, get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec, iter_layer_specs

from ascend_attention import dcp, int8, unpaged
from ascend_attention.metadata import BLOCK_SIZE as BLOCK_SIZE
from ascend_attention.metadata import (
    MAX_DECODE_KEYS,
    FusedAttentionMetadata,
    ImageMetadata,
    assign_padding,
    image_spans,
    longest_lengths,
    mask_args,
    pad_queries,
    upper_triangle,
)
from ascend_attention.metadata import to_script_list as to_script_list

MAX_REQUESTS = 4096
"""Requests in one call of the kernel with layout TND (op-plugin's page of
npu_fused_infer_attention_score)."""

MULTI_HEAD_SIZES = (64, 128, 192)
"""Head sizes that the kernel takes in layout TND where each key-value head has one query head; with
grouped queries it takes more. It returns 561002 for others (vllm-ascend, issue 4020)."""


class FusedAttentionMetadataBuilder(AttentionMetadataBuilder[FusedAttentionMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    length_args: ClassVar[tuple[str, str]] = ("actual_seq_lengths", "actual_seq_lengths_kv")
    """The kernel's argument names for the cumulative query lengths and the sequence lengths."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.mask = upper_triangle(torch.int8, device)
        self.softmax_lse = torch.empty(1, dtype=torch.float32, device=device)
        parallel = vllm_config.parallel_config
        self.interleave = (
            parallel.cp_kv_cache_interleave_size if parallel.decode_context_parallel_size > 1 else 0
        )
        self.padded_block_table: torch.Tensor | None = None
        self.uses_pcp = parallel.prefill_context_parallel_size > 1
        # One slot is reserved for a dummy request. A rank has two parts of a prompt with PCP.
        supported = (MAX_REQUESTS - 1) // (2 if self.uses_pcp else 1)
        if (most := vllm_config.scheduler_config.max_num_seqs) > supported:
            raise extension.RefusedError(
                f"{FusedAttentionImpl.title} supports up to {supported} requests in a step,"
                f" not max_num_seqs {most}; fix: --max-num-seqs {supported}"
            )
        self.int8_cache = kv_cache_spec.dtype == torch.int8
        if self.int8_cache and self.interleave:
            raise extension.RefusedError(
                "an int8 KV cache is not supported with decode context parallelism; fix: disable one"
                " of them"
            )
        if self.int8_cache and getattr(kv_cache_spec, "sliding_window", None):
            raise extension.RefusedError(
                "an int8 KV cache is not supported with sliding windows; fix: quantize without"
                " kv_cache_type"
            )
        if self.int8_cache and vllm_config.model_config.is_mm_prefix_lm:
            raise extension.RefusedError(
                "an int8 KV cache is not supported with bidirectional attention between the tokens"
                " of an image; fix: quantize without kv_cache_type"
            )
        self.unpaged = unpaged.is_needed(kv_cache_spec.head_size)
        # int8.py needs the decodes first, and requests of few tokens are read in pages.
        if self.int8_cache or self.unpaged:
            few = 1 if self.int8_cache or self.interleave else unpaged.MAX_SINGLE
            self._init_reorder_batch_threshold(few)
        self.row_tables = torch.empty(0, 0, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """NEVER for decode context parallelism and cross attention, whose kernel calls differ
        between steps.

        With an int8 KV cache only decodes read the cache as it is. Images need a second call, which
        single tokens do not. Where the kernel takes pages only for single tokens, steps of decodes
        are captured with their drafts, but all layers of a graph have the same sequence lengths.
        """
        uses_dcp = vllm_config.parallel_config.decode_context_parallel_size > 1
        if uses_dcp or isinstance(kv_cache_spec, CrossAttentionSpec):
            return AttentionCGSupport.NEVER
        model = vllm_config.model_config
        # The spec may be of a group whose layers have different ones.
        specs: Any = iter_layer_specs(kv_cache_spec)
        is_int8 = any(spec.dtype == torch.int8 for spec in specs)
        if is_int8 or (model and model.is_mm_prefix_lm):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        head_size = max(spec.head_size for spec in specs)
        if not unpaged.is_needed(head_size):
            return cls._cudagraph_support
        layers = vllm_config.compilation_config.static_forward_context.values()
        sizes = {getattr(layer, "head_size", head_size) for layer in layers}
        fits = vllm_config.num_speculative_tokens < unpaged.MAX_SINGLE
        if fits and all(map(unpaged.is_needed, sizes)):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FusedAttentionMetadata:
        """Build the metadata of one step on the host, without synchronizing with the device.

        For a full graph vLLM pads the tokens, and pads the requests with dummy requests that have
        no tokens.
        """
        common = common_attn_metadata
        seq_lens = extension.deferred_host_lengths(common, FusedAttentionImpl.title)
        cu_query_lens = common.query_start_loc_cpu[1 : common.num_reqs + 1].tolist()
        num_tokens, block_table = common.num_actual_tokens, common.block_table_tensor
        share = None
        if self.interleave:
            share = dcp.build_metadata(
                cu_query_lens,
                seq_lens(),
                common.slot_mapping[:num_tokens],
                self.interleave,
                block_table,
                self.unpaged,
            )
        rows = None
        bounds = extension.draft_length_bounds(common)
        if bounds and not self.interleave and not self.int8_cache:
            cu_query_lens, seq_lens, rows = pad_queries(common.seq_lens[: common.num_reqs], *bounds)
        long, single = None, None
        if self.unpaged and not self.interleave and (rows is not None or common.max_query_len > 1):
            causal = bool(common.causal) or rows is not None
            single, long = self._cut(cu_query_lens, seq_lens, block_table, num_tokens, causal)
        if single:
            block_table = single.block_table(block_table, self._row_table(block_table))
        num_dummies = int(common.num_reqs < num_tokens <= self._max_mixed_graph_tokens())
        if num_dummies and not single and not long:
            block_table = self._append_dummy_request(block_table)
        # int8.py slices the lists
        convert = list if self.int8_cache and common.max_query_len > 1 else to_script_list

        def lengths() -> dict[str, Any]:
            ends, lens = cu_query_lens, seq_lens()
            if single:
                ends, lens = single.lengths(lens)
            elif rows is None:
                ends, lens = assign_padding(num_tokens, ends, lens, num_dummies)
            return dict(zip(self.length_args, (convert(ends), convert(lens)), strict=True))

        step = FusedAttentionMetadata(
            compute_lengths=lengths,
            num_tokens=num_tokens,
            block_table=block_table,
            slot_mapping=common.slot_mapping if self.uses_pcp else common.slot_mapping[:num_tokens],
            mask=self.mask,
            softmax_lse=self.softmax_lse,
            causal=bool(common.causal),
            one_query_each=bool(single) or (common.max_query_len == 1 and rows is None),
            dcp=share,
            rows=rows,
            num_rows=cu_query_lens[-1],
            long=long,
            num_single=single.num_tokens if single else 0,
        )
        step.mm_prefix_range = self._images(common, step)
        return step

    def _images(
        self, common: CommonAttentionMetadata, step: FusedAttentionMetadata
    ) -> ImageMetadata | None:
        if not common.mm_req_doc_ranges or common.max_query_len == 1:
            return None
        assert common.seq_lens_cpu_upper_bound is not None
        starts, seq_lens = common.query_start_loc_cpu, common.seq_lens_cpu_upper_bound
        spans = image_spans(common.mm_req_doc_ranges, starts.tolist(), seq_lens.tolist())
        if not spans:
            return None
        requests, rows, lens = zip(*spans, strict=True)
        ends = list(accumulate(map(len, rows)))
        lengths = dict(zip(self.length_args, map(to_script_list, (ends, [*lens])), strict=True))
        # One copy to the device.
        every = torch.tensor([*requests, *(row for each in rows for row in each)], pin_memory=True)
        every = every.to(step.block_table.device, non_blocking=True)
        images = dataclasses.replace(
            step,
            compute_lengths=lambda: lengths,
            num_tokens=ends[-1],
            block_table=common.block_table_tensor.index_select(0, every[: len(requests)]),
            causal=False,
            one_query_each=False,
        )
        if self.unpaged:
            table = images.block_table
            images.long = unpaged.LongRequests(ends, lambda: [*lens], table, self.mask, False)
            images.num_single = 0
        return ImageMetadata(every[len(requests) :], images)

    def _cut(
        self,
        ends: list[int],
        seq_lens: Callable[[], list[int]],
        block_table: torch.Tensor,
        num_tokens: int,
        causal: bool,
    ) -> tuple[unpaged.SingleTokens | None, unpaged.LongRequests | None]:
        """The requests up to the first long one as single tokens, and the others. An int8 KV cache
        has a layout of its own for single tokens."""
        most = 1 if self.int8_cache else unpaged.MAX_SINGLE
        counts = (end - start for start, end in pairwise([0, *ends]))
        first = next((place for place, count in enumerate(counts) if count > most), len(ends))
        long, before = None, ends[first - 1] if first else 0
        if first < len(ends):
            own = [end - before for end in ends[first:]]
            table = block_table[first:]
            long = unpaged.LongRequests(own, lambda: seq_lens()[first:], table, self.mask, causal)
        if self.int8_cache or not first:
            return None, long
        return unpaged.SingleTokens(ends[:first], 0 if long else num_tokens, causal), long

    def _row_table(self, block_table: torch.Tensor) -> torch.Tensor:
        """A buffer at a fixed address for the block tables of a graph's tokens."""
        if not len(self.row_tables):
            config = self.vllm_config
            captured = config.compilation_config.max_cudagraph_capture_size or 0
            most = max(captured, config.scheduler_config.max_num_seqs)
            rows = most * (1 + config.num_speculative_tokens)
            self.row_tables = block_table.new_zeros(rows, block_table.shape[1])
        return self.row_tables

    def _max_mixed_graph_tokens(self) -> int:
        """Tokens of the largest full graph for mixed prefill-decode batches; 0 without
        such graphs."""
        compilation = self.vllm_config.compilation_config
        mixed = compilation.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL
        return compilation.max_cudagraph_capture_size if mixed else 0

    def _append_dummy_request(self, block_table: torch.Tensor) -> torch.Tensor:
        """Copy the block table into a buffer at a fixed address and append a row of null blocks.

        A mixed batch may have no dummy request to which padding tokens can be assigned.
        """
        if self.padded_block_table is None:
            max_num_seqs = self.vllm_config.scheduler_config.max_num_seqs
            self.padded_block_table = block_table.new_zeros(max_num_seqs + 1, block_table.shape[1])
        padded = self.padded_block_table[: len(block_table) + 1]
        padded[:-1].copy_(block_table)
        padded[-1].zero_()
        return padded


class FusedAttentionImpl(extension.AttentionImplBase, AttentionImpl[FusedAttentionMetadata]):
    """Fused attention; see ``extension.AttentionImplBase`` for the constructor."""

    title = "the fused attention of ascend-attention"
    serves = frozenset(
        {extension.AttentionFeature.SLIDING_WINDOW, extension.AttentionFeature.ENCODER_DECODER}
    )
    operators = ("npu_fused_infer_attention_score", "npu_scatter_pa_kv_cache")
    can_return_lse_for_decode = True
    supports_dcp = supports_pcp = True
    int8_cache = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Other layers of the model may have different head sizes.
        if reason := unsupported_heads(self.head_size, self.num_heads, self.num_kv_heads):
            raise extension.RefusedError(
                f"{self.title}: {reason}; fix: VLLM_PLUGINS=ascend, for the built-in attention"
            )

    def reserve(self, layer: Any, query: torch.Tensor) -> None:
        """Allocate what attention without pages, or over an int8 cache, takes."""
        if getattr(layer, "kv_cache_torch_dtype", None) == torch.int8:
            int8.reserve(self, query, BLOCK_SIZE)
        elif unpaged.is_needed(self.head_size):
            unpaged.reserve(self, query)

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        meta: FusedAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """See the base class; ``kv_cache`` has blocks of 128 tokens."""
        (key_cache, value_cache), tokens = kv_cache, slice(meta.num_tokens)
        if self.pcp_world_size > 1:
            # The next layers write keys of padding tokens.
            if len(output) > meta.num_tokens:
                output[meta.num_tokens :].zero_()
            if not meta.num_tokens:
                return
        if len(query) != meta.num_tokens:
            query, output = query[tokens], output[tokens]
        if key_cache.dtype == torch.int8:
            int8.attend(self, layer, query, key_cache, value_cache, meta, output)
        elif meta.dcp:
            assert key is not None
            assert value is not None
            dcp.attend(query, key[tokens], value[tokens], kv_cache, meta, self._head_args(), output)
        elif meta.rows is not None:
            padded = query.new_zeros(meta.num_rows, *query.shape[1:])
            padded.index_copy_(0, meta.rows, query)
            attended = torch.empty_like(padded)
            self._attend_all(padded, key_cache, value_cache, meta, attended)
            output.copy_(attended.index_select(0, meta.rows))
        else:
            self._attend_all(query, key_cache, value_cache, meta, output)
            if images := meta.mm_prefix_range:
                own = query.index_select(0, images.rows)
                attended = torch.empty_like(own)
                self._attend_all(own, key_cache, value_cache, images.step, attended)
                output.index_copy_(0, images.rows, attended)

    def _attend_all(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        meta: FusedAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Write the attention output of a step's requests, with pages where the kernel takes
        them."""
        paged = slice(meta.num_single if meta.long else None)
        if meta.long:
            read, later = unpaged.reader(key_cache, value_cache), slice(meta.num_single, None)
            unpaged.attend(self, query[later], read, meta.long, output[later])
            if not meta.num_single:
                return
        caches = key_cache, value_cache
        self.attend_pages(
            query[paged], *caches, meta.lengths, meta.block_table, meta, output[paged]
        )

    def write(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        meta: FusedAttentionMetadata,
    ) -> None:
        """Write by npu_scatter_pa_kv_cache; see the base class."""
        key_cache, value_cache = kv_cache
        slots = meta.dcp.slot_mapping if meta.dcp else meta.slot_mapping
        key, value = self.gather_new(key, value)
        if meta.dcp:
            key, value = key[meta.dcp.local_token_indices], value[meta.dcp.local_token_indices]
        elif len(key) != len(slots):
            key, value = key[: len(slots)], value[: len(slots)]
        if key_cache.dtype == torch.int8:
            int8.write(layer, key, value, key_cache, value_cache, slots)
        elif len(slots):
            # `value` is a slice of the fused QKV projection, and the kernel requires contiguous
            # tensors.
            new = key.contiguous(), value.contiguous()
            torch_npu.npu_scatter_pa_kv_cache(
                *new, key_cache, value_cache, slots, cache_mode="Norm"
            )

    def attend_pages(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        lengths: dict[str, Any],
        block_table: torch.Tensor,
        meta: FusedAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Write the attention output of these requests; the caches have the query's dtype."""
        attend = {
            "block_table": block_table,
            "block_size": key_cache.shape[1],
            "input_layout": "TND",
            **self._mask_args(meta),
            **self._head_args(),
            **lengths,
        }
        tensors = query.contiguous(), key_cache.flatten(2), value_cache.flatten(2)
        kernel = self.operators[0]
        if extension.is_captured():
            max_workspace = getattr(torch_npu, f"_{kernel}_get_max_workspace")
            attend["workspace"] = max_workspace(*tensors, **longest_lengths(attend))
        with extension.graph_task():
            getattr(torch_npu, kernel).out(*tensors, **attend, out=[output, meta.softmax_lse])

    def _mask_args(self, meta: FusedAttentionMetadata) -> dict[str, Any]:
        """The kernel's mask arguments; none for single query tokens, which take a tenth less without
        (vllm-ascend, pull request 10302). A graph keeps what it is captured with."""
        causal = meta.causal and (bool(self.sliding_window) or not meta.one_query_each)
        return mask_args(self.sliding_window, causal, meta.mask)

    def _head_args(self) -> dict[str, Any]:
        return {
            "num_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "scale": self.scale,
        }


def unsupported_heads(head_size: int, num_heads: int, num_kv_heads: int) -> str:
    """Why the kernel does not take a rank's heads in layout TND; empty if it does."""
    if num_heads != num_kv_heads or head_size in MULTI_HEAD_SIZES:
        return ""
    return f"head_size {head_size} not supported with one query head for each key-value head"


def unsupported_length(model: Any) -> str:
    """Why the kernel does not take decodes of a model's longest sequences; empty if it does."""
    return (
        f"max_model_len above {MAX_DECODE_KEYS} not supported"
        if model.max_model_len > MAX_DECODE_KEYS
        else ""
    )


class FusedAttentionBackend(extension.AttentionBackendBase, AttentionBackend):
    """Fused attention backend (``vllm/v1/attention/backend.py``)."""

    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16]
    impl_cls, builder_cls = FusedAttentionImpl, FusedAttentionMetadataBuilder
    block_sizes: ClassVar = [BLOCK_SIZE]
    head_sizes = range(16, 257, 16)

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, head_size: int, *args: Any, **kwargs: Any) -> list[str]:
        """The reasons why the backend does not support a layer, of vLLM's current configuration."""
        reasons = super().validate_configuration(head_size, *args, **kwargs)
        config = get_current_vllm_config_or_none()
        if config and (model := config.model_config):
            heads = [
                count(config.parallel_config)
                for count in (model.get_num_attention_heads, model.get_num_kv_heads)
            ]
            reasons += filter(
                None, [unsupported_heads(head_size, *heads), unsupported_length(model)]
            )
        return reasons
