"""Dense attention of decoders by npu_fused_infer_attention_score over the paged cache: causal, windowed, or to an encoder.

Its arguments, dtypes and limits are those of ``torch_npu/_op_plugin_docs.py`` in the torch_npu wheel; the cache is
written by npu_scatter_pa_kv_cache, documented there for Atlas A2 and A3.
"""

from typing import Any, ClassVar

import torch
import torch_npu
from ascend_platform import extension
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec

from ascend_attention import dcp, int8
from ascend_attention.metadata import FusedAttentionMetadata

TITLE = "the fused attention of ascend-attention"
BLOCK_SIZE = 128
"""Tokens per page: what the kernel takes for prefill and decode alike, and the size its documentation recommends."""

CAUSAL_MASK_SIZE = 2048
"""Edge of the one mask that sparse_mode 3 wants for lengths of any size."""


class FusedAttentionMetadataBuilder(AttentionMetadataBuilder[FusedAttentionMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    names: ClassVar[tuple[str, str]] = ("actual_seq_lengths", "actual_seq_lengths_kv")
    """What the kernel calls the lengths."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        ones = torch.ones(CAUSAL_MASK_SIZE, CAUSAL_MASK_SIZE, dtype=torch.int8)
        self.mask = ones.triu_(1).to(device)
        self.log_sums = torch.empty(1, dtype=torch.float32, device=device)
        parallel = vllm_config.parallel_config
        self.interleave = parallel.cp_kv_cache_interleave_size if parallel.decode_context_parallel_size > 1 else 0
        self.longer_table: torch.Tensor | None = None
        self.small = kv_cache_spec.dtype == torch.int8
        if self.small and self.interleave:
            raise NotImplementedError("a KV cache in int8 is not served with decode context parallelism; leave one of them out")
        if self.small and getattr(kv_cache_spec, "sliding_window", None):
            raise NotImplementedError("a KV cache in int8 is not served with sliding windows; quantize without kv_cache_type")
        if self.small:
            self._init_reorder_batch_threshold(1)  # int8.py wants requests of one token first

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """None where each step has calls of its own: under decode context parallelism, with a cache in int8, to an encoder."""
        own = vllm_config.parallel_config.decode_context_parallel_size > 1 or kv_cache_spec.dtype == torch.int8
        return AttentionCGSupport.NEVER if own or isinstance(kv_cache_spec, CrossAttentionSpec) else cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FusedAttentionMetadata:
        """Lay out one step, on the host, without waiting for the device.

        A full graph has a number of tokens and of requests of its own: vLLM pads both, with requests that have no tokens.
        """
        common, kv_lens = common_attn_metadata, extension.host_lengths(common_attn_metadata, TITLE)
        query_ends = common.query_start_loc_cpu[1 : common.num_reqs + 1].tolist()
        tokens, table = common.num_actual_tokens, common.block_table_tensor
        part = None
        if self.interleave:
            part = dcp.spread(query_ends, kv_lens, common.slot_mapping[:tokens], self.interleave)
        if common.num_reqs < tokens <= self._largest_mixed_graph():
            table = self._with_another_row(table)
            query_ends.append(query_ends[-1])
            kv_lens.append(0)
        if padding := tokens - query_ends[-1]:
            _give_away(padding, query_ends, kv_lens)
        convert = list if self.small else _converted  # int8.py looks at them
        return FusedAttentionMetadata(
            lengths=dict(zip(self.names, (convert(query_ends), convert(kv_lens)), strict=True)),
            tokens=tokens,
            block_table=table,
            slot_mapping=common.slot_mapping[:tokens],
            mask=self.mask,
            log_sums=self.log_sums,
            causal=bool(common.causal),
            spread=part,
        )

    def _largest_mixed_graph(self) -> int:
        """Tokens of the largest full graph for prefill and decode together; 0 without them."""
        compilation = self.vllm_config.compilation_config
        mixed = compilation.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL
        return compilation.max_cudagraph_capture_size if mixed else 0

    def _with_another_row(self, table: torch.Tensor) -> torch.Tensor:
        """The block table and a row of null blocks, at one address: all of a mixed batch's requests can be real ones."""
        if self.longer_table is None:
            requests = self.vllm_config.scheduler_config.max_num_seqs
            self.longer_table = table.new_zeros(requests + 1, table.shape[1])
        longer = self.longer_table[: len(table) + 1]
        longer[:-1].copy_(table)
        longer[-1].zero_()
        return longer


def _converted(lengths: list[int]) -> Any:
    """A list as operators take it, converted once and not by each layer: most of what a call with 256 requests takes."""
    return torch._C.ScriptList(lengths)


def _give_away(padding: int, query_ends: list[int], kv_lens: list[int]) -> None:
    """Give a graph's tokens of no request to the requests that there are not, which come last and have no tokens.

    The kernel wants every token to be some request's, and no request to have more tokens than its cache.
    """
    free = kv_lens.index(0)
    each, more = divmod(padding, len(kv_lens) - free)
    for request in range(free, len(kv_lens)):
        kv_lens[request] = each + (request - free < more)
        query_ends[request] = (query_ends[request - 1] if request else 0) + kv_lens[request]


class FusedAttentionImpl(extension.AttentionImplBase, AttentionImpl[FusedAttentionMetadata]):
    """The computation, by the kernel; the constructor is ``extension.AttentionImplBase``'s."""

    title = TITLE
    serves = frozenset({extension.AttentionFeature.SLIDING_WINDOW, extension.AttentionFeature.ENCODER_DECODER})
    can_return_lse_for_decode = True
    supports_dcp = True
    int8_cache = True

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        attn_metadata: FusedAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write this step's keys and values into their pages and attend.

        Args:
            query: ``[tokens, heads, head_size]``; output has its shape and is written.
            key, value: ``[tokens, kv_heads, head_size]``; of an encoder, its new tokens, or None.
            kv_cache: keys and values, each ``[blocks, 128, kv_heads, head_size]``, contiguous.
            attn_metadata: None while vLLM profiles memory, when there is no cache; the output is then zero.
        """
        if attn_metadata is None:
            return output.zero_()
        meta, (keys, values) = attn_metadata, kv_cache
        tokens, small = meta.tokens, keys.dtype == torch.int8
        if self.writes_cache and key is not None and value is not None:
            self._write(layer, key, value, keys, values, meta)
        if small:
            int8.attend(self, layer, query, keys, values, meta, output)
        elif meta.spread:
            dcp.attend(query[:tokens], key[:tokens], value[:tokens], kv_cache, meta, self._heads(), output[:tokens])
        else:
            self.attend(query[:tokens], keys, values, meta.lengths, meta.block_table, meta, output[:tokens])
        return output

    def _write(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        meta: FusedAttentionMetadata,
    ) -> None:
        slots = meta.spread.slots if meta.spread else meta.slot_mapping
        kept = meta.spread.mine if meta.spread else slice(len(slots))
        if keys.dtype == torch.int8:
            int8.write(layer, key[kept], value[kept], keys, values, slots)
        elif len(slots):
            # vLLM cuts value out of the joint projection of query, key and value; the kernel wants it contiguous
            new = key[kept].contiguous(), value[kept].contiguous()
            torch_npu.npu_scatter_pa_kv_cache(*new, keys, values, slots, cache_mode="Norm")

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        lengths: dict[str, Any],
        block_table: torch.Tensor,
        meta: FusedAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        """Write attention's output for these requests; keys and values are pages of the query's dtype."""
        attend = {
            "block_table": block_table,
            "block_size": keys.shape[1],
            "input_layout": "TND",
            **self._seen(meta),
            **self._heads(),
            **lengths,
        }
        tensors = query.contiguous(), keys.view(*keys.shape[:2], -1), values.view(*values.shape[:2], -1)
        if extension.is_captured():  # what the kernel takes for the longest lengths: a graph's memory stays as it is
            attend["workspace"] = torch_npu._npu_fused_infer_attention_score_get_max_workspace(*tensors, **attend)
        with extension.graph_task():
            torch_npu.npu_fused_infer_attention_score.out(*tensors, **attend, out=[output, meta.log_sums])

    def _seen(self, meta: FusedAttentionMetadata) -> dict[str, Any]:
        """Which keys a token sees: all of an encoder's, or those up to it, or so many of these."""
        if not meta.causal:
            return {"sparse_mode": 0}
        if self.sliding_window:
            return {"atten_mask": meta.mask, "sparse_mode": 4, "pre_tokens": self.sliding_window - 1, "next_tokens": 0}
        return {"atten_mask": meta.mask, "sparse_mode": 3}

    def _heads(self) -> dict[str, Any]:
        return {"num_heads": self.num_heads, "num_key_value_heads": self.num_kv_heads, "scale": self.scale}


class FusedAttentionBackend(extension.AttentionBackendBase, AttentionBackend):
    """What vLLM asks about the fused attention (``vllm/v1/attention/backend.py``)."""

    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16]
    impl_cls, builder_cls = FusedAttentionImpl, FusedAttentionMetadataBuilder
    block_sizes: ClassVar = [BLOCK_SIZE]
    head_sizes = range(16, 257, 16)
