# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Random batches over a paged cache of latents (MLA), and their attention in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from harness.references.paged_batches import PagedBatch, Sizes, reference


class LatentBatch(PagedBatch):
    """A batch of absorbed queries. A key is a latent with its rotated part, and the value the
    latent.

    Attributes:
        widths: elements of a latent and of the rotated part.
    """

    def __init__(
        self,
        heads: int,
        widths: tuple[int, int],
        dtype: torch.dtype,
        requests: Sequence[tuple[int, int]],
        rng: random.Random,
    ) -> None:
        blocks = sum(-(-sum(request) // 128) for request in requests) + 2
        super().__init__(Sizes(blocks, 128, heads, 1, sum(widths), dtype, 1e4), requests, rng)
        self.widths = widths

    def held(self) -> Any:
        from ascend_platform.attention.kv_cache import PagedLatent

        return PagedLatent(*(part.contiguous() for part in self.cache[0].split(self.widths, -1)))

    def run(
        self, backend: Any, joined: bool = False, common: Any = None, **beyond: Any
    ) -> torch.Tensor:
        """Output of a backend, ``[tokens, heads, latent]``; the new tokens are written to the cache
        first."""
        from vllm.config import VllmConfig
        from vllm.forward_context import set_forward_context
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        of, config = self.sizes, VllmConfig()
        latent, rope = self.widths
        spec = MLAAttentionSpec(
            block_size=of.block_size, num_kv_heads=1, head_size=of.head_size, dtype=of.dtype
        )
        meta = backend.get_builder_cls()(spec, [], config, torch.device("npu")).build(
            0, common or self.common()
        )
        names = {
            "kv_lora_rank": latent,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "kv_b_proj": None,
        }
        layer = backend.get_impl_cls()(
            of.heads, of.head_size, of.head_size**-0.5, 1, **names, **beyond
        )
        cache, new = self.held(), self.new(self.keys).npu()
        common = common or self.common()
        with set_forward_context(meta, config):
            layer.do_kv_cache_update(
                new[:, 0, :latent], new[..., latent:], cache, common.slot_mapping, "auto", None
            )
            # vLLM sends all tokens to forward_mqa
            assert (meta.num_prefills, meta.num_decode_tokens) == (0, len(new))
            query = torch.cat(self.queries).npu().split(self.widths, -1)
            output, softmax_lse = layer.forward_mqa(query, cache, meta, None)
        assert softmax_lse is None
        return output.cpu()

    def expected(self, **options: Any) -> torch.Tensor:
        each = zip(self.queries, self.keys, strict=True)
        scale = self.sizes.head_size**-0.5
        return torch.cat(
            [
                reference(query, key, key[..., : self.widths[0]], scale, **options)
                for query, key in each
            ]
        )


class SparseLatentBatch(LatentBatch):
    """A batch with an indexer: each token attends to the ``count`` keys of the largest scores.

    Attributes:
        index: of each request, the indexer's queries ``[new, heads, width]``, weights ``[new,
            heads]``, keys ``[length, width]``.
    """

    def __init__(self, *batch: Any, count: int, indexer: tuple[int, int] = (16, 128)) -> None:
        super().__init__(*batch)
        (heads, width), dtype = indexer, self.sizes.dtype
        self.count, self.indexer = count, indexer
        self.index = [
            (
                torch.randn(new, heads, width, dtype=dtype),
                torch.randn(new, heads, dtype=dtype),
                torch.randn(n, width, dtype=dtype),
            )
            for (new, _), n in zip(self.requests, self.lengths, strict=True)
        ]

    def quantize_index(self) -> None:
        """Replace the indexer's queries and keys by what int8 with a float16 scale each keeps."""

        def quantize(x: torch.Tensor) -> torch.Tensor:
            scale = x.float().abs().amax(-1, keepdim=True) / 127
            return (x.float() / scale).round() * scale.half().float()

        self.index = [
            (quantize(query), weights.half(), quantize(key)) for query, weights, key in self.index
        ]

    def quantize_latents(self) -> None:
        """Replace the latents of the keys by what int8 with a scale for each 128 keeps."""
        latent, _ = self.widths

        def quantize(x: torch.Tensor) -> torch.Tensor:
            tiles = x.float().unflatten(-1, (-1, 128))
            scale = tiles.abs().amax(-1, keepdim=True) / 127
            return ((tiles / scale).round() * scale).flatten(-2).to(x.dtype)

        self.keys = [
            torch.cat((quantize(key[..., :latent]), key[..., latent:]), -1) for key in self.keys
        ]

    def run_sparse(
        self, backend: Any, padding: int = 0, int8: bool = False, int8_latents: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The selected tokens, ``[tokens, count]``, and the backend's output, ``[tokens, heads,
        latent]``.

        ``padding``: tokens after those of the batch, which belong to no request, as in a full
        graph. ``int8``: keys of the indexer in the cache. ``int8_latents``: those of the keys.
        """
        from types import SimpleNamespace

        from ascend_platform.attention import kv_cache
        from vllm.config import VllmConfig
        from vllm.forward_context import set_forward_context
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        of, config, common, (latent, rope) = self.sizes, VllmConfig(), self.common(), self.widths
        tokens, (heads, width) = common.num_actual_tokens, self.indexer
        free = next(
            block for block in range(of.blocks) if all(block not in row for row in self._table)
        )
        slots = torch.cat(
            [common.slot_mapping, common.slot_mapping.new_full((padding,), free * of.block_size)]
        )
        common.slot_mapping, common.num_actual_tokens = slots, tokens + padding
        spec = MLAAttentionSpec(
            block_size=of.block_size, num_kv_heads=1, head_size=of.head_size, dtype=of.dtype
        )
        meta = backend.get_builder_cls()(spec, ["layer"], config, torch.device("npu")).build(
            0, common
        )
        names = {
            "kv_lora_rank": latent,
            "qk_rope_head_dim": rope,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "kv_b_proj": None,
        }
        chosen = torch.full((tokens + padding, self.count), 7, dtype=torch.int32, device="npu")
        indexer = SimpleNamespace(
            n_head=heads, head_dim=width, topk_tokens=self.count, topk_indices_buffer=chosen
        )
        layer = backend.get_impl_cls()(
            of.heads, of.head_size, of.head_size**-0.5, 1, indexer=indexer, **names
        )

        def padded(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, x.new_zeros(padding, *x.shape[1:])]).npu()

        pages = (of.blocks, of.block_size, 1)
        index_cache: Any = torch.full((*pages, width), of.fill, dtype=of.dtype).npu()
        if int8:
            scales = torch.full(pages, of.fill, dtype=torch.float16).npu()
            index_cache = kv_cache.QuantizedIndex(
                torch.full((*pages, width), 99, dtype=torch.int8).npu(), scales
            )
        for request_query, (_, _, keys), (_, before) in zip(
            self._slots, self.index, self.requests, strict=True
        ):
            if before:
                held: Any = SimpleNamespace(slot_mapping=torch.tensor(request_query[:before]).npu())
                layer.write_index(keys[:before].npu(), index_cache, held)
        cache: Any = self.held()
        if int8_latents:
            cache = kv_cache.QuantizedLatent(
                torch.full((*pages, latent + rope * 2 + latent // 32), 99, dtype=torch.int8).npu()
            )
        queries, weights, keys = (torch.cat(each) for each in zip(*self.index, strict=True))
        keys = torch.cat(
            [
                request_query[before:]
                for (*_, request_query), (_, before) in zip(self.index, self.requests, strict=True)
            ]
        )
        new = padded(self.new(self.keys))
        with set_forward_context(meta, config):
            writes = [(new, slots)]
            if int8_latents:
                each = zip(self._slots, self.keys, self.requests, strict=True)
                writes += [
                    (key[:before].npu(), torch.tensor(request_query[:before]).npu())
                    for request_query, key, (_, before) in each
                ]
            for rows, places in writes:
                layer.do_kv_cache_update(
                    rows[:, 0, :latent], rows[..., latent:], cache, places, "auto", None
                )
            layer.write_index(padded(keys), index_cache, meta)
            layer.select(padded(queries), padded(weights), index_cache, meta, chosen)
            output, softmax_lse = layer.forward_mqa(
                padded(torch.cat(self.queries)).split(self.widths, -1), cache, meta, None
            )
        assert softmax_lse is None
        return chosen[:tokens].cpu(), output[:tokens].cpu()

    def check_selected(self, chosen: torch.Tensor, bound: float) -> None:
        """Each row names the keys of the largest scores in float64, up to ``bound`` at the last
        place, then -1."""
        token = 0
        for (queries, weights, keys), (new, before) in zip(self.index, self.requests, strict=True):
            scores = torch.einsum(
                "th,thl->tl", weights.double(), (queries.double() @ keys.double().t()).relu()
            )
            for visible in range(before + 1, before + new + 1):
                token_scores, row, count = (
                    scores[visible - before - 1, :visible],
                    chosen[token],
                    min(self.count, visible),
                )
                named, token = row[:count].long(), token + 1
                assert len(set(named.tolist())) == count
                assert (row[count:] == -1).all()
                assert 0 <= named.min() <= named.max() < visible
                assert token_scores[named].min() >= token_scores.topk(count).values[-1] - bound

    def expected_of(self, chosen: torch.Tensor) -> torch.Tensor:
        """Attention in float64 to the tokens that each row names."""
        out, token = [], 0
        for queries, keys in zip(self.queries, self.keys, strict=True):
            for query in queries:
                named = chosen[token][chosen[token] >= 0].long()
                selected_keys = keys[named].double().squeeze(1)
                weights = (query.double() @ selected_keys.t() * self.sizes.head_size**-0.5).softmax(
                    -1
                )
                out.append(weights @ selected_keys[:, : self.widths[0]])
                token += 1
        return torch.stack(out)
