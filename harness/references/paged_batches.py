# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Random batches over a paged KV cache, and their attention in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None = None,
    slopes: torch.Tensor | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    images: Sequence[tuple[int, int]] = (),
    sqrt: bool = False,
) -> torch.Tensor:
    """query ``[tokens, heads, d]`` at the end of key and value ``[length, kv_heads, d]``; float64.
    Tokens between the first and last positions of an image attend to each other in both
    directions."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("thd,lhd->htl", query, key) * scale
    if cap:
        scores = cap * (scores / cap).tanh()
    after = torch.arange(len(key)) - torch.arange(len(key) - len(query), len(key))[:, None]
    if slopes is not None:
        bias = -(-after.double()).clamp(min=0).sqrt() if sqrt else after
        scores = scores + slopes.double().view(-1, 1, 1) * bias
    if causal:
        image = torch.zeros(len(key), dtype=torch.long)
        for number, (low, high) in enumerate(images, 1):
            image[low : high + 1] = number
        image_of_query = image[len(key) - len(query) :, None]
        hidden = (after > 0) & ((image_of_query != image) | (image_of_query == 0)) | (
            after <= -(window or len(key))
        )
        scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)], -1)
    return torch.einsum("htl,lhd->thd", scores.softmax(-1)[..., : len(key)], value)


def pairs(kind: str, rng: random.Random, requests: int, longest: int) -> list[tuple[int, int]]:
    """(new tokens, tokens in the cache before) of each request: decodes, prefills, or chunks and
    decodes mixed."""
    draw: dict[str, Callable[[], tuple[int, int]]] = {
        "decode": lambda: (1, rng.randint(0, longest)),
        "prefill": lambda: (rng.randint(1, longest), 0),
        "mixed": lambda: (
            rng.choice([1, rng.randint(2, longest // 2)]),
            rng.choice([0, rng.randint(1, longest // 2)]),
        ),
    }
    return [draw[kind]() for _ in range(requests)]


KINDS = ("decode", "prefill", "mixed")


@dataclass
class Sizes:
    """Sizes of cache and heads; ``fill`` is the content of unused pages, so that a wrong read
    shows."""

    blocks: int
    block_size: int
    heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    fill: float


class PagedBatch:
    """A batch of requests, each with new tokens after cached ones, in randomly chosen pages.

    Attributes:
        queries, keys, values: of each request, ``[tokens, heads, head_size]`` on the host; keys and
            values also of tokens before.
        cache: the pages ``[2, blocks, block_size, kv_heads, head_size]`` on the NPU, with the
            tokens before.
    """

    def __init__(
        self, sizes: Sizes, requests: Sequence[tuple[int, int]], rng: random.Random
    ) -> None:
        self.sizes, self.requests = sizes, requests
        self.lengths = [new + before for new, before in requests]
        free, size = rng.sample(range(sizes.blocks), sizes.blocks), sizes.block_size
        self._table = [[free.pop() for _ in range(-(-length // size))] for length in self.lengths]
        self._slots = [
            [row[place // size] * size + place % size for place in range(length)]
            for row, length in zip(self._table, self.lengths, strict=True)
        ]
        shape = sizes.kv_heads, sizes.head_size
        self.keys, self.values = (
            [torch.randn(n, *shape, dtype=sizes.dtype) for n in self.lengths] for _ in range(2)
        )
        self.queries = [
            torch.randn(new, sizes.heads, sizes.head_size, dtype=sizes.dtype) for new, _ in requests
        ]
        pages = torch.full((2, sizes.blocks * size, *shape), sizes.fill, dtype=sizes.dtype)
        for part, rows in zip(pages, (self.keys, self.values), strict=True):
            for slots, row_values, (_, before) in zip(self._slots, rows, requests, strict=True):
                part[slots[:before]] = row_values[:before]
        self.cache = pages.view(2, sizes.blocks, size, *shape).npu()

    def new(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """Keys or values of the new tokens, ``[tokens, kv_heads, head_size]``."""
        return torch.cat(
            [slots[before:] for slots, (_, before) in zip(rows, self.requests, strict=True)]
        )

    def common(self, images: dict[int, list[tuple[int, int]]] | None = None) -> Any:
        """vLLM's CommonAttentionMetadata of the batch, with images of its requests."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, *(new for new, _ in self.requests)]).cumsum(0, dtype=torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        slots = [
            slot
            for row_slots, (_, before) in zip(self._slots, self.requests, strict=True)
            for slot in row_slots[before:]
        ]
        longest = max(map(len, self._table))
        table = [[*row, *[0] * (longest + 1 - len(row))] for row in self._table]
        return CommonAttentionMetadata(
            query_start_loc=starts.npu(),
            query_start_loc_cpu=starts,
            seq_lens=lengths.npu(),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(self.requests),
            num_actual_tokens=int(starts[-1]),
            max_query_len=max(new for new, _ in self.requests),
            max_seq_len=max(self.lengths),
            block_table_tensor=torch.tensor(table, dtype=torch.int32).npu(),
            slot_mapping=torch.tensor(slots).npu(),
            mm_req_doc_ranges=images,
        )

    def run(
        self, backend: Any, joined: bool = False, common: Any = None, **beyond: Any
    ) -> torch.Tensor:
        """Output of a backend, ``[tokens, heads, head_size]`` on the host; the backend writes the
        new tokens to the cache first.

        ``joined``: keys and values are slices of one tensor, as a model's joint projection has
        them. ``common`` replaces the batch's own metadata. ``beyond``: arguments of the
        implementation's constructor.
        """
        from vllm.config import VllmConfig
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        of = self.sizes
        spec = FullAttentionSpec(
            block_size=of.block_size,
            num_kv_heads=of.kv_heads,
            head_size=of.head_size,
            dtype=of.dtype,
        )
        builder = backend.get_builder_cls()(spec, ["layer"], VllmConfig(), torch.device("npu"))
        placed = {name: x.npu() if isinstance(x, torch.Tensor) else x for name, x in beyond.items()}
        layer = backend.get_impl_cls()(
            of.heads, of.head_size, of.head_size**-0.5, of.kv_heads, **placed
        )
        query = torch.cat(self.queries).npu()
        key, value = (self.new(rows).npu() for rows in (self.keys, self.values))
        if joined:
            key, value = torch.cat([key, value], dim=1).split(of.kv_heads, dim=1)
        output = torch.full_like(query, torch.nan)
        layer.forward(
            None, query, key, value, self.held(), builder.build(0, common or self.common()), output
        )
        return output.cpu()

    def held(self) -> Any:
        """The cache as the platform gives it to attention."""
        from ascend_platform.attention.kv_cache import KVCachePair

        return KVCachePair(*self.cache)

    def expected(
        self, images: dict[int, list[tuple[int, int]]] | None = None, **options: Any
    ) -> torch.Tensor:
        """The result of :func:`reference`, with its options."""
        scale, each = (
            self.sizes.head_size**-0.5,
            zip(self.queries, self.keys, self.values, strict=True),
        )
        return torch.cat(
            [
                reference(*key, scale, images=(images or {}).get(request, ()), **options)
                for request, key in enumerate(each)
            ]
        )


IMAGES: dict[int, list[tuple[int, int]]] = {
    0: [(0, 5)],
    1: [(3, 30), (31, 60), (200, 260)],
    2: [(40, 90), (92, 92)],
    3: [(10, 20), (70, 120)],
}
"""First and last positions of images in requests of IMAGE_REQUESTS."""
IMAGE_REQUESTS = [(1, 80), (130, 0), (60, 50), (100, 40)]
"""A decode, a whole image and a prompt that ends before one, the rest of an image of which the
first tokens are cached, and images in a chunk and before it."""
