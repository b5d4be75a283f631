# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Multi-head latent attention (MLA) with npu_fused_infer_attention_score_v2 over the paged latents.

Queries are "absorbed": they come projected to the latents, so that the kernel reads the KV cache as
it is. It takes at most 16 query tokens of a request, so a longer one is split into several
requests. Long prompts and chunks have their keys and values expanded instead, where the heads have
the widths that the kernel takes (``latent_prefill.py``). Limits of the kernel are those of
``torch_npu/_op_plugin_docs.py`` in the torch_npu wheel, and of op-plugin's page for it.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
import torch_npu
from ascend_platform import extension
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_dcp_group
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MLAAttentionImpl,
)
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from ascend_attention import dcp, latent_prefill
from ascend_attention.context import merge
from ascend_attention.dense import MAX_REQUESTS, unsupported_length
from ascend_attention.latent_prefill import LATENT as LATENT
from ascend_attention.latent_prefill import ROPE as ROPE
from ascend_attention.latent_prefill import Prefills
from ascend_attention.metadata import (
    BLOCK_SIZE,
    assign_padding,
    longest_lengths,
    pad_queries,
    to_script_list,
    upper_triangle,
)

MAX_QUERY_TOKENS = 16
"""Maximum number of query tokens of a request per kernel call."""


@dataclass
class LatentMetadata(AttentionMetadata):
    """Metadata of one step, the same for all layers of a KV cache group.

    Attributes:
        compute_lengths: computes ``lengths``; with draft tokens it may wait for the device.
        num_actual_tokens: query tokens, including padding tokens in full-graph mode.
        num_decodes: requests of vLLM whose queries are absorbed: the first ones, with
            ``num_decode_tokens``.
        prefills: the requests after them; None without.
        block_table: int32 ``[requests of the kernel, blocks]``.
        mask: int8 ``[2048, 2048]``, 1 above the diagonal; None if each request has one query token.
        softmax_lse: float32 ``[1]``, placeholder for the unused softmax_lse output.
        rows: int64 ``[num_actual_tokens]``, row of each query token among ``num_rows``, where the
            host does not know the exact sequence lengths.
    """

    compute_lengths: Callable[[], dict[str, Any]]
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    prefills: Prefills | None
    block_table: torch.Tensor
    mask: torch.Tensor | None
    softmax_lse: torch.Tensor
    rows: torch.Tensor | None
    num_rows: int

    @property
    def num_prefills(self) -> int:
        return len(self.prefills.ends) if self.prefills else 0

    @property
    def decode(self) -> "LatentMetadata":
        return self

    @functools.cached_property
    def lengths(self) -> dict[str, Any]:
        """The kernel's host arguments, which a graph updates at each replay
        (``extension.graph_task``)."""
        return self.compute_lengths()


class LatentMetadataBuilder(AttentionMetadataBuilder[LatentMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

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
        layers = [
            vllm_config.compilation_config.static_forward_context[name] for name in layer_names
        ]
        self.expands = not self.interleave and latent_prefill.serves(layers, kv_cache_spec.dtype)
        if self.expands:
            self._init_reorder_batch_threshold(latent_prefill.MAX_ABSORBED_TOKENS)
            # vLLM's profiling run reserves memory for the keys and values of four times as many
            # tokens, because a chunk has copies of them.
            self.chunk_size = (
                MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config) // 4
            )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """NEVER for decode context parallelism, and where a decode with its draft tokens does not
        fit a call of the kernel."""
        uses_dcp = vllm_config.parallel_config.decode_context_parallel_size > 1
        fits = vllm_config.num_speculative_tokens < MAX_QUERY_TOKENS
        return cls._cudagraph_support if fits and not uses_dcp else AttentionCGSupport.NEVER

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> LatentMetadata:
        """Build the metadata of one step on the host, without synchronizing with the device.

        For a full graph vLLM pads the tokens, and pads the requests with dummy requests that have
        no tokens.
        """
        common = common_attn_metadata
        num_tokens, block_table = common.num_actual_tokens, common.block_table_tensor
        seq_lens = extension.deferred_host_lengths(common, FusedLatentAttentionImpl.title)
        ends = common.query_start_loc_cpu[1 : common.num_reqs + 1].tolist()
        rows, bounds = None, extension.draft_length_bounds(common)
        if bounds and max(bounds[1], default=0) < MAX_QUERY_TOKENS and not self.interleave:
            ends, seq_lens, rows = pad_queries(common.seq_lens[: common.num_reqs], *bounds)
        num_decodes, prefills = (
            self._split(ends, seq_lens, block_table) if rows is None else (len(ends), None)
        )
        if prefills:
            ends, block_table = ends[:num_decodes], block_table[:num_decodes]
            num_tokens = ends[-1] if ends else 0
        # Under DCP a rank's tokens are interleaved, but the kernel's causal mask assumes that they
        # are contiguous.
        parts = cut(ends, 1 if self.interleave else MAX_QUERY_TOKENS)
        if len(parts) > len(ends):
            requests = torch.tensor([part.request for part in parts], pin_memory=True)
            block_table = block_table.index_select(
                0, requests.to(block_table.device, non_blocking=True)
            )
        part_ends = [part.end for part in parts]

        def lengths() -> dict[str, Any]:
            lens = seq_lens()
            kv_lens = [lens[part.request] - part.after for part in parts]
            if self.interleave:
                group = get_dcp_group()
                every = torch.tensor(kv_lens)
                kv_lens = get_dcp_local_seq_lens(
                    every, group.world_size, group.rank_in_group, self.interleave
                ).tolist()
            query_ends = part_ends
            if rows is None:
                query_ends, kv_lens = assign_padding(num_tokens, part_ends, kv_lens, 0)
            return {
                "actual_seq_qlen": to_script_list(query_ends),
                "actual_seq_kvlen": to_script_list(kv_lens),
            }

        longest = (
            max((end - start for start, end in pairwise([0, *ends])), default=0)
            if prefills
            else common.max_query_len
        )
        is_single = rows is None and (longest <= 1 or self.interleave)
        return LatentMetadata(
            compute_lengths=lengths,
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=num_tokens,
            prefills=prefills,
            block_table=block_table,
            mask=None if is_single else self.mask,
            softmax_lse=self.softmax_lse,
            rows=rows,
            num_rows=ends[-1] if ends else 0,
        )

    def _split(
        self, ends: list[int], seq_lens: Callable[[], list[int]], block_table: torch.Tensor
    ) -> tuple[int, Prefills | None]:
        """The number of requests up to the first long one, and the others."""
        lengths = [end - start for start, end in pairwise([0, *ends])]
        longest = latent_prefill.MAX_ABSORBED_TOKENS if self.expands else max(lengths)
        first = next(
            (request for request, length in enumerate(lengths) if length > longest), len(ends)
        )
        if first == len(ends):
            return first, None

        def context_lens() -> list[int]:
            return [
                total - query
                for total, query in zip(seq_lens()[first:], lengths[first:], strict=True)
            ]

        own_ends = list(accumulate(lengths[first:]))
        return first, Prefills(
            own_ends, context_lens, block_table[first:], self.mask, self.chunk_size
        )


@dataclass(frozen=True)
class Part:
    """Consecutive query tokens of a request: the end of their rows, and how many tokens of the
    request come after them."""

    request: int
    end: int
    after: int


def cut(ends: list[int], size: int) -> list[Part]:
    """Cut requests, given by the ends of their rows, into parts of at most ``size`` tokens; one
    without tokens is one part."""
    parts = []
    for request, (start, end) in enumerate(pairwise([0, *ends])):
        bounds = [*range(start + size, end, size), end]
        parts += [Part(request, bound, end - bound) for bound in bounds]
    return parts


class FusedLatentAttentionImpl(extension.LatentAttentionImplBase, MLAAttentionImpl[LatentMetadata]):
    """Fused latent attention; see ``extension.LatentAttentionImplBase`` for the constructor and the
    KV cache."""

    title = "the fused latent attention of ascend-attention"
    operators = ("npu_fused_infer_attention_score_v2", "npu_scatter_pa_kv_cache")
    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.uses_dcp = self.dcp_world_size > 1
        # Disables the exchange between ranks in vLLM's MLAAttention, which needs Triton.
        self.dcp_world_size = 1
        widths = self.kv_lora_rank, self.qk_rope_head_dim
        if widths != (LATENT, ROPE) or self.num_heads > 128:
            raise extension.RefusedError(
                f"{self.title} supports latents of {LATENT} with {ROPE} rotated elements and at"
                f" most 128 heads, not {widths[0]}, {widths[1]} and {self.num_heads}; fix:"
                " VLLM_PLUGINS=ascend, for the built-in attention"
            )

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: Any,
        slot_mapping: torch.Tensor,
        *args: Any,
    ) -> None:
        """Write latents ``[tokens, 512]`` and rotated keys ``[tokens, 1, 64]`` into the
        KV cache."""
        # Other ranks' tokens have slot -1 and are written to the null block.
        slots = slot_mapping.clamp_min(0) if self.uses_dcp else self.valid_slots(slot_mapping)
        write_latents((kv_c_normed, k_pe), kv_cache, slots)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: Any,
        attn_metadata: LatentMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Compute attention of the step's long requests, ``q`` ``[tokens, heads, 192]``, with
        expanded keys and values."""
        assert attn_metadata.prefills
        new, cache, prefills = (kv_c_normed, k_pe), kv_c_and_k_pe_cache, attn_metadata.prefills
        attended = latent_prefill.attend(
            q, *new, cache, prefills, lambda latents: self.kv_b_proj(latents)[0], self.scale
        )
        output.copy_(attended.flatten(1))

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: LatentMetadata, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute attention of absorbed queries.

        Args:
            q: the query's latent and rotated parts, ``[tokens, heads, 512]`` and ``[tokens, heads,
                64]``.
            kv_c_and_k_pe_cache: the layer's latents and rotated keys.

        Returns:
            ``[tokens, heads, 512]``, and no log-sum-exp: the result is complete.
        """
        meta, cache = attn_metadata, kv_c_and_k_pe_cache
        if not self.uses_dcp:
            return self._attend(q, cache, meta)[0], None
        group = get_dcp_group()
        all_heads = group.all_gather(torch.cat(q, -1), dim=1).split((LATENT, ROPE), -1)
        parts, softmax_lse = self._attend(all_heads, cache, meta)
        # tokens without context on this rank
        softmax_lse = softmax_lse.masked_fill(softmax_lse == torch.inf, -torch.inf)
        parts, softmax_lse = (dcp.exchange_heads(each, group) for each in (parts, softmax_lse))
        output, _ = merge([*softmax_lse.flatten(1)], [*parts.flatten(1, 2)])
        return output.to(parts.dtype).view_as(parts[0]), None

    def _attend(
        self, q: Any, kv_cache: Any, meta: LatentMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention output ``[tokens, heads, 512]``, and with decode context parallelism
        log-sum-exp ``[tokens, heads, 1]``."""
        heads = q[0].shape[1]
        calls = [
            self._call(*each, meta)
            for each in _calls([_pad(part, meta) for part in q], kv_cache, meta)
        ]
        output, softmax_lse = (
            calls[0] if len(calls) == 1 else (torch.cat(each) for each in zip(*calls, strict=True))
        )
        if meta.rows is not None:
            output = output.index_select(0, meta.rows)
        return output[:, :heads], softmax_lse[:, :heads] if self.uses_dcp else softmax_lse

    def _call(
        self,
        q: Sequence[torch.Tensor],
        kv_cache: Any,
        block_table: torch.Tensor,
        lengths: dict[str, Any],
        meta: LatentMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the kernel for these requests. The output is a transposed view, because vLLM's next
        matmul reads heads first."""
        query, query_rope = q
        tokens, heads, _ = query.shape
        latents, ropes = (cache.flatten(2) for cache in kv_cache)
        attend = {
            "query_rope": query_rope,
            "key_rope": ropes,
            "block_table": block_table,
            "block_size": latents.shape[1],
            "input_layout": "TND_NTD",
            "return_softmax_lse": self.uses_dcp,
            "num_query_heads": heads,
            "num_key_value_heads": 1,
            "softmax_scale": self.scale,
            **(
                {"sparse_mode": 0}
                if meta.mask is None
                else {"atten_mask": meta.mask, "sparse_mode": 3}
            ),
            **lengths,
        }
        tensors = query, latents, latents
        if extension.is_captured():
            attend["workspace"] = torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace(
                *tensors, **longest_lengths(attend)
            )
        output = query.new_empty(heads, tokens, LATENT)
        softmax_lse = (
            meta.softmax_lse.new_empty(tokens, heads, 1) if self.uses_dcp else meta.softmax_lse
        )
        with extension.graph_task():
            torch_npu.npu_fused_infer_attention_score_v2.out(
                *tensors, **attend, out=[output, softmax_lse]
            )
        return output.transpose(0, 1), softmax_lse


def write_latents(
    new: tuple[torch.Tensor, torch.Tensor], kv_cache: Any, slots: torch.Tensor
) -> None:
    """Write the latents and rotated keys of the first tokens, as many as there are slots, into the
    KV cache."""
    if tokens := len(slots):
        parts = (each[:tokens].reshape(tokens, 1, -1).contiguous() for each in new)
        torch_npu.npu_scatter_pa_kv_cache(*parts, *kv_cache, slots, cache_mode="Norm")


def pad_heads(query: torch.Tensor) -> torch.Tensor:
    """Pad ``[tokens, heads, width]`` to a power of two of heads, as the kernels take them."""
    if missing := (1 << (query.shape[1] - 1).bit_length()) - query.shape[1]:
        return torch.nn.functional.pad(query, (0, 0, 0, missing))
    return query.contiguous()


def _pad(query: torch.Tensor, meta: LatentMetadata) -> torch.Tensor:
    """Pad heads, and tokens to ``meta.rows``."""
    query = pad_heads(query)
    if meta.rows is not None:
        return query.new_zeros(meta.num_rows, *query.shape[1:]).index_copy_(0, meta.rows, query)
    return query


def _calls(
    q: list[torch.Tensor], kv_cache: Any, meta: LatentMetadata
) -> Iterator[tuple[list[torch.Tensor], Any, torch.Tensor, dict[str, Any]]]:
    """Arguments of the kernel's calls: one, unless there are more than MAX_REQUESTS."""
    lengths = meta.lengths
    if len(meta.block_table) <= MAX_REQUESTS:
        yield q, kv_cache, meta.block_table, lengths
        return
    ends, kv_lens = map(list, lengths.values())
    for first in range(0, len(ends), MAX_REQUESTS):
        requests = slice(first, first + MAX_REQUESTS)
        start = ends[first - 1] if first else 0
        rows = slice(start, ends[requests][-1])
        lens_of_call = [end - start for end in ends[requests]], kv_lens[requests]
        yield (
            [part[rows] for part in q],
            kv_cache,
            meta.block_table[requests],
            dict(zip(lengths, lens_of_call, strict=True)),
        )


class FusedLatentAttentionBackend(extension.AttentionBackendBase, AttentionBackend):
    """Fused backend for vLLM's MLAAttention
    (``vllm/model_executor/layers/attention/mla_attention.py``)."""

    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16]
    impl_cls: ClassVar[type[Any]] = FusedLatentAttentionImpl
    builder_cls: ClassVar[type[Any]] = LatentMetadataBuilder
    block_sizes: ClassVar = [BLOCK_SIZE]
    head_sizes = (LATENT + ROPE,)
    # It is captured in piecewise graphs, which need slots for padding tokens.
    forward_includes_kv_cache_update = False

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """The reasons why the backend does not support a layer, of vLLM's current configuration."""
        reasons = super().validate_configuration(*args, **kwargs)
        config = get_current_vllm_config_or_none()
        if config and config.model_config and not cls.is_sparse():
            reasons += filter(None, [unsupported_length(config.model_config)])
        return reasons
