# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Paged KV cache of a rank as a list of regions; packs tokens of a request into a buffer and
unpacks them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy
import torch
from ascend_transfer.engine import Engine
from ascend_transfer.errors import TransferError, printable

from ascend_kv_connector.config import Options
from ascend_kv_connector.p2p.protocol import CacheInfo, CacheRegion
from ascend_kv_connector.p2p.runs import Placement, token_slots
from ascend_kv_connector.p2p.states import LAST_STATE

MIN_RUN_BYTES = 32 << 10
"""Average bytes per contiguous run above which runs are copied directly instead of gathered on the
device."""


class Heads(NamedTuple):
    """``num`` KV heads of the model from ``first`` on."""

    first: int
    num: int

    def intersection(self, other: Heads) -> Heads:
        first, stop = max(self.first, other.first), min(sum(self), sum(other))
        return Heads(first, max(0, stop - first))


def kv_heads_of_rank(rank: int, ranks: int, total: int) -> Heads:
    """KV heads of a tensor-parallel rank, as vLLM shards them
    (``vllm/model_executor/layers/linear.py``, QKVParallelLinear): evenly, or replicated if there
    are fewer heads than ranks."""
    return Heads(rank * total // ranks, max(1, total // ranks))


class PagedCache:
    """Regions of one rank: ``caches[i]`` of ``regions[i]`` is ``[blocks, block_size, heads,
    size]``.

    Sizes may differ, as those of latents and their rotary keys do.

    ``block_size`` is that of the scheduler. An attention backend may split blocks into several
    kernel blocks, which are contiguous (``vllm/v1/worker/utils.py``,
    ``prepare_kernel_block_sizes``), so that a token's slot is the same.

    KV cache groups have block tables of their own: ``windows`` has the tokens that each group
    retains, 0 meaning all, and ``groups`` the group of each layer. A request's ``blocks`` are the
    tables of all groups concatenated, equally long; in a sliding-window table block 0, vLLM's null
    block, stands for blocks that are not retained. With ``LAST_STATE`` as its window a group has
    states (see :mod:`~ascend_kv_connector.p2p.states`), which differ between tensor-parallel ranks:
    ``tp`` is this one's number and how many there are.
    """

    def __init__(
        self,
        regions: Sequence[tuple[str, str, torch.Tensor]],
        block_size: int,
        heads: Heads,
        total_heads: int,
        groups: Mapping[str, int] | None = None,
        windows: Sequence[int] = (0,),
        tp: tuple[int, int] = (0, 1),
    ) -> None:
        """Take (layer, part, cache) of each region.

        Raises:
            ValueError: block size, dtype or number of heads differ between regions.
        """
        self.caches = [cache for _, _, cache in regions]
        self.regions = [CacheRegion(layer, part, cache.shape[3]) for layer, part, cache in regions]
        self.heads, self.total_heads = heads, total_heads
        self.region_groups = [(groups or {}).get(layer, 0) for layer, _, _ in regions]
        self.windows, self.tp = tuple(windows), tp
        self._registered: list[Engine] = []
        paged = [
            cache
            for cache, group in zip(self.caches, self.region_groups, strict=True)
            if windows[group] != LAST_STATE
        ]
        kinds = {(cache.shape[1], cache.shape[2], cache.dtype) for cache in paged}
        if len(kinds) != 1:
            raise ValueError(
                "the layers' KV caches differ in block size, heads or dtype:"
                f" {sorted(map(str, kinds))}"
            )
        ((tokens, held, self.dtype),) = kinds
        # States, which may be the first region, have no tokens.
        self.blocks = min(cache.shape[0] for cache in paged) * tokens // block_size
        self.block_size, self.block_tokens = block_size, tokens
        if block_size % tokens:
            raise ValueError(
                f"the scheduler's block size {block_size} is not a multiple of the cache's,"
                f" {tokens}"
            )
        if held != heads.num:
            raise ValueError(
                f"the KV caches have {held} heads; this rank should have {heads.num} of"
                f" {total_heads}"
            )

    @property
    def device(self) -> torch.device:
        return self.caches[0].device

    def token_bytes(self, regions: Sequence[int], heads: int) -> int:
        """Bytes of one token in these regions."""
        return sum(self.token_sizes(regions, heads))

    @property
    def is_hybrid(self) -> bool:
        """Whether there are several KV cache groups, or a sliding window."""
        return self.windows != (0,)

    def first_needed_token(self, start: int, stop: int, group: int) -> int:
        """First of tokens ``start`` to ``stop`` that the group needs to compute tokens from
        ``stop`` on.

        It is the first of its block: vLLM's prefix cache offers the block to requests whose window
        reaches further back.
        """
        window = self.windows[group]
        if window == LAST_STATE:
            return stop - 1
        return (
            max(start, (stop + 1 - window) // self.block_size * self.block_size)
            if window
            else start
        )

    def memory(self) -> list[tuple[int, int]]:
        """Address and bytes of a block of each region; empty if tokens are not contiguous within a
        block of some region."""
        if not all(cache[0].is_contiguous() for cache in self.caches):
            return []
        return [(cache.data_ptr(), cache.stride(0) * cache.element_size()) for cache in self.caches]

    def register(self, transport: Engine) -> None:
        """Register the regions' memory with a transport, once for all users of this cache."""
        if transport in self._registered:
            return
        self._registered.append(transport)
        storages = {
            cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in self.caches
        }
        for storage in storages.values():
            transport.register(torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage))

    def token_sizes(self, regions: Sequence[int], heads: int) -> list[int]:
        """Bytes of a token in each of these regions."""
        return [self.regions[index].size * heads * self.dtype.itemsize for index in regions]

    def slot_mapping(
        self, blocks: Sequence[int], start: int, stop: int, group: int = 0
    ) -> torch.Tensor:
        """int64 ``[stop - start]`` on the host: the tokens' slots, indices into ``[blocks *
        block_size]``; of states ``[1]``, the block.

        Raises:
            TransferError: code ``lease``; a token has left the group's window.
        """
        table = group_block_table(blocks, group, len(self.windows))
        if self.windows[group] == LAST_STATE:
            return torch.tensor([table[(stop - 1) // self.block_size]])
        slots = token_slots(table, self.block_size, start, stop)
        if self.windows[group] and (slots < self.block_size).any():
            raise TransferError(
                "lease",
                f"some of tokens {start} to {stop} have left the window of {self.windows[group]}",
            )
        return torch.from_numpy(slots)

    def placement(
        self,
        memory: Sequence[tuple[int, int]],
        block_tokens: int,
        block_size: int,
        blocks: Sequence[int],
        tokens: range,
        group: int,
    ) -> Placement:
        """Where a peer has ``tokens`` of a group; ``blocks`` begin with that of the first one."""
        if self.windows[group] == LAST_STATE:
            return Placement(memory, 1, numpy.array(blocks))
        slots = token_slots(
            blocks, block_size, tokens.start, tokens.stop, tokens.start // block_size
        )
        return Placement(memory, block_tokens, slots)

    def pack(
        self, slots: torch.Tensor, regions: Sequence[int], heads: Heads, buffer: torch.Tensor
    ) -> int:
        """Copy tokens to the beginning of a buffer, uint8 ``[bytes]``, in the layout of
        :class:`~ascend_kv_connector.p2p.protocol.Chunk`.

        Device work is enqueued on the current stream. Returns the number of bytes.
        """
        size = len(slots) * self.token_bytes(regions, heads.num)
        values = buffer[:size].view(self.dtype)
        if runs := self._contiguous_runs(slots, regions, heads):
            for index, part in self._region_views(values, regions, len(slots), heads):
                for at, first, count in runs:
                    part[at : at + count].copy_(
                        self._token_rows(index)[first : first + count], non_blocking=True
                    )
            return size
        slots = slots.to(self.device)
        gathered = (
            values if values.device == self.device else torch.empty_like(values, device=self.device)
        )
        for index, part in self._region_views(gathered, regions, len(slots), heads):
            torch.index_select(
                self._token_rows(index)[:, self._head_slice(heads)], 0, slots, out=part
            )
        if gathered is not values:
            values.copy_(gathered, non_blocking=True)
        return size

    def unpack(
        self, slots: torch.Tensor, regions: Sequence[int], heads: Heads, data: torch.Tensor
    ) -> None:
        """Inverse of :meth:`pack`: copy uint8 ``[bytes]`` to the given heads of the cache."""
        if runs := self._contiguous_runs(slots, regions, heads):
            for index, part in self._region_views(
                data.view(self.dtype), regions, len(slots), heads
            ):
                for at, first, count in runs:
                    self._token_rows(index)[first : first + count].copy_(
                        part[at : at + count], non_blocking=True
                    )
            return
        values, slots = (
            data.to(self.device, non_blocking=True).view(self.dtype),
            slots.to(self.device),
        )
        for index, part in self._region_views(values, regions, len(slots), heads):
            if heads.num == self.heads.num:
                self._token_rows(index).index_copy_(0, slots, part)
            else:
                self._token_rows(index)[slots, self._head_slice(heads)] = part

    def _head_slice(self, heads: Heads) -> slice:
        return slice(heads.first - self.heads.first, heads.first - self.heads.first + heads.num)

    def _contiguous_runs(
        self, slots: torch.Tensor, regions: Sequence[int], heads: Heads
    ) -> list[tuple[int, int, int]]:
        """Runs of tokens with contiguous slots as (token, slot, length); empty if they are too
        short to be copied without a gather."""
        if heads.num != self.heads.num:
            return []
        cuts = [0, *(torch.nonzero(slots.diff() != 1).flatten() + 1).tolist(), len(slots)]
        token = self.token_bytes(regions, heads.num) / len(regions)
        if len(slots) * token < MIN_RUN_BYTES * (len(cuts) - 1):
            return []
        return [(at, int(slots[at]), stop - at) for at, stop in pairwise(cuts)]

    def _region_views(
        self, values: torch.Tensor, regions: Sequence[int], tokens: int, heads: Heads
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Each region's part of a packed buffer, ``[tokens, heads, size]``."""
        at = 0
        for index in regions:
            size = self.regions[index].size
            count = tokens * heads.num * size
            yield index, values[at : at + count].view(tokens, heads.num, size)
            at += count

    def _token_rows(self, index: int) -> torch.Tensor:
        return self.caches[index].flatten(0, 1)


def group_block_table(blocks: Sequence[int], group: int, groups: int) -> Sequence[int]:
    """A group's part of concatenated block tables."""
    each = len(blocks) // groups
    return blocks[group * each : (group + 1) * each]


class FetchPlan(NamedTuple):
    """A fetch from one rank: regions of one group, as pairs of remote and local indices, and
    heads."""

    rank: int
    remote: list[int]
    local: list[int]
    heads: Heads
    group: int = 0


def plan_fetches(cache: PagedCache, peers: Sequence[CacheInfo], rank: int) -> list[FetchPlan]:
    """Plan which of the producer's ranks this rank, number ``rank`` of its instance, fetches from.

    If several ranks hold the same heads, the consumer's ranks choose different ones.

    Raises:
        TransferError: code ``mismatch``; the producer does not have all tokens that this rank
            needs.
    """
    wanted = {(region.layer, region.part): index for index, region in enumerate(cache.regions)}
    dtype = str(cache.dtype).removeprefix("torch.")
    for peer in peers:
        if (peer.dtype, peer.total_heads) != (dtype, cache.total_heads):
            raise TransferError(
                "mismatch",
                f"the peer's KV cache is {printable(peer.dtype)} with {peer.total_heads} heads, this one"
                f" {dtype} with {cache.total_heads}",
            )
    plans: list[FetchPlan] = []
    missing = {
        (index, head)
        for index in wanted.values()
        for head in range(cache.heads.first, sum(cache.heads))
    }
    rank_order = [(rank + offset) % len(peers) for offset in range(len(peers))]
    for number in rank_order:
        peer = peers[number]
        common = cache.heads.intersection(Heads(peer.first_head, peer.heads))
        by_group: dict[int, FetchPlan] = {}
        for remote, region in enumerate(peer.regions):
            local = wanted.get((region.layer, region.part))
            if local is None or (local, common.first) not in missing or not common.num:
                continue
            if cache.windows[cache.region_groups[local]] == LAST_STATE and peer.tp != cache.tp:
                continue
            if region.size != cache.regions[local].size:
                raise TransferError(
                    "mismatch",
                    f"the head size of {region.layer}'s {region.part} is {region.size} on the peer",
                )
            plan = by_group.setdefault(
                cache.region_groups[local],
                FetchPlan(number, [], [], common, cache.region_groups[local]),
            )
            plan.remote.append(remote)
            plan.local.append(local)
            missing -= {(local, head) for head in range(common.first, sum(common))}
        plans += by_group.values()
    if missing:
        tp = {peer.tp[1] for peer in peers}
        if cache.windows[cache.region_groups[min(missing)[0]]] == LAST_STATE and tp != {
            cache.tp[1]
        }:
            raise TransferError(
                "mismatch",
                f"the peer's tensor parallel size is {min(tp)}, this one's {cache.tp[1]}; states need"
                " the same size",
            )
        layer = cache.regions[min(missing)[0]].layer
        raise TransferError("mismatch", f"none of the peer's {len(peers)} ranks has all of {layer}")
    return plans


def in_chunks(plans: Iterable[FetchPlan], cache: PagedCache, size: int) -> list[FetchPlan]:
    """The plans, those of states divided by layers into chunks of up to ``size`` bytes."""
    chunks: list[FetchPlan] = []
    for plan in plans:
        if cache.windows[plan.group] != LAST_STATE:
            chunks.append(plan)
            continue
        left = 0
        for remote, local in zip(plan.remote, plan.local, strict=True):
            needed = cache.token_bytes([local], plan.heads.num)
            if needed > left:
                chunks.append(plan._replace(remote=[], local=[]))
                left = size
            chunks[-1].remote.append(remote)
            chunks[-1].local.append(local)
            left -= needed
    return chunks


def checksum(data: torch.Tensor) -> int:
    """CRC-32 of uint8 ``[bytes]``; device memory is copied to the host."""
    return zlib.crc32(data.cpu().numpy().data)


def expose(cache: PagedCache, transport: Engine, options: Options) -> list[tuple[int, int]]:
    """Register a rank's KV cache with its transport; its memory, or an empty list if it is not
    exposed.

    It is not with checksums, which are of packed bytes, nor to a transport that cannot access its
    memory.
    """
    if (
        options.verify
        or not options.expose_cache
        or transport.on_device != (cache.device.type != "cpu")
    ):
        return []
    if memory := cache.memory():
        cache.register(transport)
    return memory
