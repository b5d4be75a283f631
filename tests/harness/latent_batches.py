"""Random batches over a paged cache of latents (MLA), and their attention in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from harness.paged_batches import PagedBatch, Sizes, reference


class LatentBatch(PagedBatch):
    """A batch of absorbed queries. A key is a latent with its rotated part, and the value the latent.

    Attributes:
        widths: elements of a latent and of the rotated part.
    """

    def __init__(
        self, heads: int, widths: tuple[int, int], dtype: torch.dtype, requests: Sequence[tuple[int, int]], rng: random.Random
    ) -> None:
        blocks = sum(-(-sum(request) // 128) for request in requests) + 2
        super().__init__(Sizes(blocks, 128, heads, 1, sum(widths), dtype, 1e4), requests, rng)
        self.widths = widths

    def held(self) -> Any:
        from ascend_platform.attention.kv_cache import PagedLatent

        return PagedLatent(*(part.contiguous() for part in self.cache[0].split(self.widths, -1)))

    def run(self, backend: Any, joined: bool = False, common: Any = None, **beyond: Any) -> torch.Tensor:
        """Output of a backend, ``[tokens, heads, latent]``; the new tokens are written to the cache first."""
        from vllm.config import VllmConfig
        from vllm.forward_context import set_forward_context
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        of, config = self.sizes, VllmConfig()
        latent, rope = self.widths
        spec = MLAAttentionSpec(block_size=of.block_size, num_kv_heads=1, head_size=of.head_size, dtype=of.dtype)
        meta = backend.get_builder_cls()(spec, [], config, torch.device("npu")).build(0, common or self.common())
        names = {"kv_lora_rank": latent, "qk_rope_head_dim": rope, "qk_nope_head_dim": 128, "v_head_dim": 128, "kv_b_proj": None}
        layer = backend.get_impl_cls()(of.heads, of.head_size, of.head_size**-0.5, 1, **names, **beyond)
        cache, new = self.held(), self.new(self.keys).npu()
        common = common or self.common()
        with set_forward_context(meta, config):
            layer.do_kv_cache_update(new[:, 0, :latent], new[..., latent:], cache, common.slot_mapping, "auto", None)
            assert (meta.num_prefills, meta.num_decode_tokens) == (0, len(new))  # vLLM sends all tokens to forward_mqa
            query = torch.cat(self.queries).npu().split(self.widths, -1)
            output, softmax_lse = layer.forward_mqa(query, cache, meta, None)
        assert softmax_lse is None
        return output.cpu()

    def expected(self, **options: Any) -> torch.Tensor:
        each = zip(self.queries, self.keys, strict=True)
        scale = self.sizes.head_size**-0.5
        return torch.cat([reference(query, key, key[..., : self.widths[0]], scale, **options) for query, key in each])
