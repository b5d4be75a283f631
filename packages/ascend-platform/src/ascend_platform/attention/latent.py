# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Built-in multi-head latent attention (MLA): PyTorch over the paged latents, of any widths.

It serves without ascend-attention, and the models whose widths CANN's kernels do not take. See
``paged.py`` for the computation.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata, MLAAttentionImpl
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from ascend_platform.attention.base import AttentionBackendBase, LatentAttentionImplBase
from ascend_platform.attention.kv_cache import PagedLatent
from ascend_platform.attention.paged import (
    PagedAttentionBackend,
    PagedAttentionImpl,
    PagedAttentionMetadata,
    PagedAttentionMetadataBuilder,
)


@dataclass
class PagedLatentAttentionMetadata(PagedAttentionMetadata):
    """Metadata of one step, with what vLLM's MLAAttention reads: all tokens are for
    ``forward_mqa``.

    Attributes:
        num_actual_tokens: the step's tokens; rows beyond are padding.
    """

    num_actual_tokens: int
    num_prefills: ClassVar[int] = 0

    @property
    def num_decode_tokens(self) -> int:
        return self.num_actual_tokens

    @property
    def decode(self) -> "PagedLatentAttentionMetadata":
        return self


class PagedLatentAttentionMetadataBuilder(PagedAttentionMetadataBuilder):
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedLatentAttentionMetadata:
        paged = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return PagedLatentAttentionMetadata(
            **vars(paged), num_actual_tokens=common_attn_metadata.num_actual_tokens
        )


class PagedLatentAttentionImpl(
    LatentAttentionImplBase, PagedAttentionImpl, MLAAttentionImpl[PagedLatentAttentionMetadata]
):
    """Built-in latent attention in float32; see ``LatentAttentionImplBase`` for the constructor and
    the KV cache."""

    title = "the built-in latent attention of ascend-platform"
    serves = frozenset()

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: Any,
        slot_mapping: torch.Tensor,
        *args: Any,
    ) -> None:
        """Write latents ``[tokens, kv_lora_rank]`` and rotated keys ``[tokens, 1,
        qk_rope_head_dim]`` into the KV cache."""
        slots = self.valid_slots(slot_mapping)
        for cache, new in zip(kv_cache, (kv_c_normed, k_pe), strict=True):
            cache.view(-1, cache.shape[-1])[slots] = new.reshape(len(new), -1)[: len(slots)]

    def forward_mqa(
        self,
        q: Any,
        kv_c_and_k_pe_cache: Any,
        attn_metadata: PagedLatentAttentionMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention of absorbed queries.

        Args:
            q: the query's latent and rotated parts, ``[tokens, heads, kv_lora_rank]`` and
                ``[tokens, heads, qk_rope_head_dim]``.
            kv_c_and_k_pe_cache: the layer's PagedLatent.

        Returns:
            ``[tokens, heads, kv_lora_rank]``, and no log-sum-exp.
        """
        query, meta = torch.cat(q, -1), attn_metadata
        output = q[0].new_empty(*query.shape[:2], self.kv_lora_rank)
        if meta.num_decodes:
            self._decode(query, kv_c_and_k_pe_cache, meta, output)
        for request in range(meta.num_decodes, len(meta.seq_lens)):
            self._prefill(request, query, kv_c_and_k_pe_cache, meta, output)
        return output, None

    def _gather(
        self, kv_cache: PagedLatent, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latents, ropes = super()._gather(kv_cache, blocks)
        return torch.cat((latents, ropes), -1), latents


class PagedLatentAttentionBackend(AttentionBackendBase, AttentionBackend):
    """Built-in backend for vLLM's MLAAttention
    (``vllm/model_executor/layers/attention/mla_attention.py``)."""

    supported_dtypes: ClassVar = PagedAttentionBackend.supported_dtypes
    impl_cls, builder_cls = PagedLatentAttentionImpl, PagedLatentAttentionMetadataBuilder
    block_sizes: ClassVar = PagedAttentionBackend.block_sizes
    get_preferred_block_size = PagedAttentionBackend.get_preferred_block_size
    forward_includes_kv_cache_update = False

    @classmethod
    def is_mla(cls) -> bool:
        return True


class NoPrefillBackend(MLAPrefillBackend):
    """vLLM makes one of these for each layer, for ``MLACommonImpl.forward_mha``, which our
    implementations do not have."""

    @staticmethod
    def get_name() -> str:
        return "NONE"

    def run_prefill_new_tokens(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            "the latent attention of Ascend NPUs has no separate prefill backend"
        )

    run_prefill_context_chunk = run_prefill_new_tokens
