# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""KV cache layer of attention that selects by pooled keys.

A page has a latent for each of its tokens, after them a key for each group of tokens, and after
these the states of one group, since only the last group of a request goes on and pages are whole
groups. So a layer is of one KV cache group, and prefixes, preemption and copies of blocks need
nothing of their own.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from ascend_models.common.rows import RowCache, RowsBackend, RowsMetadata, RowsMetadataBuilder


@dataclass(frozen=True)
class Page:
    """Division of a page; sizes are in elements.

    Attributes:
        tokens: of the page.
        latent: size of a latent.
        key: size of a pooled key.
        group: tokens of a group.
    """

    tokens: int
    latent: int
    key: int
    group: int

    @property
    def state(self) -> int:
        """Size of a token's state, its key and gate."""
        return 2 * self.key

    @property
    def keys(self) -> int:
        """Where the keys begin, as a multiple of their size."""
        return -(-self.tokens * self.latent // self.key)

    @property
    def states(self) -> int:
        """Where the states begin, as a multiple of their size."""
        return -(-(self.keys + self.tokens // self.group) * self.key // self.state)

    @property
    def of_token(self) -> int:
        """Size of a page by its tokens. The page is a multiple of latents and of states, so that
        each are rows of the whole layer."""
        used = (self.states + self.group) * self.state
        step = math.lcm(self.latent, self.state) // math.gcd(
            math.lcm(self.latent, self.state), self.tokens
        )
        return -(-used // (self.tokens * step)) * step

    @property
    def size(self) -> int:
        return self.tokens * self.of_token


@dataclass(kw_only=True)
class PooledMetadata(RowsMetadata):
    """Metadata of one step; :meth:`slots` are those of pooled keys.

    Attributes:
        page: division of the pages.
        starts: int ``[requests + 1]``, the first token of each request.
        tails: int64, the step's tokens of groups that go on; of those that a graph computes all.
    """

    page: Page
    starts: torch.Tensor
    tails: torch.Tensor

    def slots(self, rows: torch.Tensor, requests: torch.Tensor | None = None) -> torch.Tensor:
        """As :meth:`RowsMetadata.slots`, for groups of tokens."""
        page, of_page = self.page, self.page.tokens // self.page.group
        owners = self.requests[: len(rows)] if requests is None else requests
        return self._place(rows, owners, of_page, of_page, page.size // page.key, page.keys)

    def latents(self, tokens: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """The slots of latents of tokens of these requests, int64 ``[requests, n]``, -1 where the
        token is negative."""
        page = self.page
        stride = page.size // page.latent
        return self._place(tokens, requests, page.tokens, page.tokens, stride, 0)

    def states(self, tokens: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """The slots of the states of tokens of these requests, int64 ``[requests, n]``."""
        page = self.page
        stride = page.size // page.state
        return self._place(tokens, requests, page.tokens, page.group, stride, page.states)

    @property
    def own_latents(self) -> torch.Tensor:
        """The slots of the latents of the step's tokens."""
        page, blocks = self.page, self.slot_mapping // self.page.tokens
        return self.slot_mapping + blocks * (page.size // page.latent - page.tokens)

    @property
    def own_states(self) -> torch.Tensor:
        """The slots of the states of the step's tokens."""
        page, blocks = self.page, self.slot_mapping // self.page.tokens
        return blocks * (page.size // page.state) + page.states + self.slot_mapping % page.group

    def _place(
        self,
        rows: torch.Tensor,
        requests: torch.Tensor,
        of_page: int,
        kept: int,
        stride: int,
        first: int,
    ) -> torch.Tensor:
        """The slots of rows of requests. A page has ``of_page`` rows, in turn in the ``kept`` slots
        from ``first`` on; pages are ``stride`` slots apart."""
        named = rows.long().clamp_min(0)
        blocks = named // of_page
        slots = self.block_table[requests.unsqueeze(1), blocks].long() * stride + first
        place = named - blocks * of_page if kept == of_page else named % kept
        return torch.where(rows < 0, -1, slots + place)


class PooledMetadataBuilder(RowsMetadataBuilder):
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._page = layer.page(kv_cache_spec.block_size)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PooledMetadata:
        common = common_attn_metadata
        rows = super().build(common_prefix_len, common, fast_build)
        tails = rows.ends
        if not rows.is_static:
            starts, lengths = rows.query_start_loc, rows.seq_lens
            tails = self._on_device(group_tails(starts, lengths, self._page.group))
        starts_on_device = common.query_start_loc[: common.num_reqs + 1]
        return PooledMetadata(**vars(rows), page=self._page, starts=starts_on_device, tails=tails)


def group_tails(starts: list[int], seq_lens: list[int], group: int) -> Any:
    """The tokens of a step, in order, of groups of their request that do not end in it."""
    found = [numpy.zeros(0, dtype=numpy.int64)]
    for (start, end), length in zip(pairwise(starts), seq_lens, strict=True):
        found.append(numpy.arange(max(start, end - length % group), end))
    return numpy.concatenate(found)


class PooledBackend(RowsBackend):
    @staticmethod
    def get_builder_cls() -> type[RowsMetadataBuilder]:
        return PooledMetadataBuilder


class PooledCache(RowCache):
    """KV cache layer of latents, pooled keys and states.

    Args:
        prefix: name of the layer.
        latent: elements of a latent.
        key: elements of a pooled key.
        group: tokens of a group, a divisor of the tokens of a page.
        dtype: of all.
    """

    def __init__(self, prefix: str, latent: int, key: int, group: int, dtype: torch.dtype) -> None:
        super().__init__(prefix, latent, dtype, 0, group=group)
        self.key = key

    def page(self, tokens: int) -> Page:
        """The division of a page of this many tokens."""
        return Page(tokens, self.width, self.key, self.group)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PooledBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        tokens = vllm_config.cache_config.block_size
        return MLAAttentionSpec(
            block_size=tokens,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=self.page(tokens).of_token,
            dtype=self.dtype,
        )

    @property
    def keys(self) -> torch.Tensor:
        """The layer as rows of the size of a pooled key."""
        return self.kv_cache.rows.view(-1, self.key)

    @property
    def states(self) -> torch.Tensor:
        """The layer as rows of the size of a state."""
        return self.kv_cache.rows.view(-1, 2 * self.key)
