# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Runs: contiguous bytes of a peer's memory, and where they belong here, for reads of paged KV
cache without staging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy
from ascend_transfer.engine import Runs

Ints = numpy.ndarray


def token_slots(
    blocks: Sequence[int], block_size: int, start: int, stop: int, first_column: int = 0
) -> Ints:
    """Slots of tokens ``start`` to ``stop``, indices into ``[blocks, block_size]``; ``blocks``
    begins with that column of the request's block table."""
    tokens = numpy.arange(start, stop)
    return (
        numpy.array(blocks, dtype=numpy.int64)[tokens // block_size - first_column] * block_size
        + tokens % block_size
    )


class Placement(NamedTuple):
    """Addresses of tokens in several regions.

    Token i is in slot ``slots[i]``; a region is ``(address, block_bytes)`` and has slot s in block
    ``s // block_tokens``. A buffer that is filled without padding is one block.
    """

    regions: Sequence[tuple[int, int]]
    block_tokens: int
    slots: Ints

    @classmethod
    def packed(cls, address: int, tokens: int, token_bytes: Sequence[int]) -> Placement:
        """Regions one behind the other from an address on, as in a
        :class:`~ascend_kv_connector.p2p.protocol.Chunk`."""
        starts = numpy.cumsum([0, *(tokens * each for each in token_bytes)])[:-1]
        return cls(
            [(address + int(start), 0) for start in starts], max(tokens, 1), numpy.arange(tokens)
        )

    def piece(self, start: int, stop: int) -> Placement:
        return self._replace(slots=self.slots[start:stop])

    def is_dense(self, region: int, token_bytes: int) -> bool:
        """Whether a region's blocks follow each other without a gap."""
        return self.regions[region][1] == self.block_tokens * token_bytes

    def addresses(self, region: int, token_bytes: int, tokens: Ints) -> Ints:
        address, block_bytes = self.regions[region]
        slots = self.slots[tokens]
        return (
            address
            + slots // self.block_tokens * block_bytes
            + slots % self.block_tokens * token_bytes
        )

    def ends_run(self, dense: bool) -> Ints:
        """Of each token but the last whether the next one is elsewhere."""
        apart = numpy.diff(self.slots) != 1
        return apart if dense else apart | (self.slots[1:] % self.block_tokens == 0)


def plan_runs(remote: Placement, local: Placement, token_bytes: Sequence[int]) -> Runs:
    """The runs of the same tokens in both regions; ``token_bytes`` are the bytes of a token in each
    region."""
    runs, known = Runs([], [], []), dict[tuple[bool, bool], tuple[Ints, Ints]]()
    for region, size in enumerate(token_bytes):
        key = remote.is_dense(region, size), local.is_dense(region, size)
        if key not in known:
            cuts = numpy.flatnonzero(remote.ends_run(key[0]) | local.ends_run(key[1])) + 1
            firsts = numpy.concatenate([[0], cuts])
            known[key] = firsts, numpy.diff(firsts, append=len(local.slots))
        firsts, counts = known[key]
        runs.remote.extend(remote.addresses(region, size, firsts).tolist())
        runs.local.extend(local.addresses(region, size, firsts).tolist())
        runs.size.extend((counts * size).tolist())
    return runs
