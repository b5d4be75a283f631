# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Reads of a producer's exposed KV cache, without a copy in its memory."""

from __future__ import annotations

from ascend_transfer.errors import TransferError

from ascend_kv_connector.p2p.consumer.connections import Connections, Part
from ascend_kv_connector.p2p.consumer.receiving import Receiving
from ascend_kv_connector.p2p.consumer.view import ConsumerView
from ascend_kv_connector.p2p.paged_cache import Heads
from ascend_kv_connector.p2p.protocol import MAX_BLOCKS, Ack, Confirm, Locate, Located
from ascend_kv_connector.p2p.runs import Placement, plan_runs

DIRECT_BYTES = 128 << 20
"""Bytes of a read of exposed KV cache; each is confirmed, and then counts if a later one fails."""


class DirectReader:
    """Direct reads of one thread."""

    def __init__(
        self, consumer: ConsumerView, connections: Connections, receiving: Receiving
    ) -> None:
        self._consumer, self._connections, self._receiving = consumer, connections, receiving

    def can_read(self, part: Part) -> bool:
        peer = part.peer
        return (
            bool(peer.memory)
            and part.plan.heads == Heads(peer.first_head, peer.heads)
            and not self._consumer.options.verify
            and (part.transfer.stop - part.begin) // peer.block_size < MAX_BLOCKS
        )

    def read(self, part: Part) -> bool:
        """Read all tokens of a part, piece by piece; False if they are in too many runs and
        should be packed.

        What was read counts once the peer confirms that the blocks were the request's all the time.
        """
        consumer, stop, begin = self._consumer, part.transfer.stop, part.begin
        located = self._locate(part)
        sizes = consumer.cache.token_sizes(part.plan.local, part.plan.heads.num)
        remote = self._remote_placement(part, located.blocks)
        local = self._receiving.placement(part, begin, stop)
        each = (DIRECT_BYTES if local else consumer.options.chunk_bytes) // sum(sizes)
        if not each:
            return False
        for first in range(begin, stop, each):
            tokens = range(first, min(first + each, stop))
            piece = slice(tokens.start - begin, tokens.stop - begin)
            target = (
                local.piece(piece.start, piece.stop)
                if local
                else Placement.packed(0, len(tokens), sizes)
            )
            runs = plan_runs(remote.piece(piece.start, piece.stop), target, sizes)
            if first == begin and len(runs.size) > consumer.transport.most_runs * len(sizes):
                return False
            confirm = Confirm(part.source.request, located.lease, runs.total)
            if local:
                self._receiving.read_into_cache(part, runs, part.transfer.deadline)
                self._connections.ask(part, confirm, Ack)
                part.transfer.count(part.number, runs.total, tokens.stop)
                continue
            buffer = self._receiving.read_into_buffer(part, runs, part.transfer.deadline)
            try:
                self._connections.ask(part, confirm, Ack)
                self._receiving.unpack_later(part, tokens, buffer, runs.total)
            except Exception:
                self._receiving.release(buffer)
                raise
        return True

    def _locate(self, part: Part) -> Located:
        reader, stop = self._consumer.rank.engine, part.transfer.stop
        self._connections.client(part)
        located = self._connections.ask(
            part, Locate(part.source.request, reader, part.begin, stop, part.plan.remote), Located
        )
        size = part.peer.block_size
        if len(located.blocks) != (wanted := -(-stop // size) - part.begin // size):
            raise TransferError(
                "mismatch", f"the peer sent {len(located.blocks)} blocks instead of {wanted}"
            )
        return located

    def _remote_placement(self, part: Part, blocks: list[int]) -> Placement:
        peer, plan = part.peer, part.plan
        return self._consumer.cache.placement(
            [peer.memory[index] for index in plan.remote],
            peer.block_tokens,
            peer.block_size,
            blocks,
            range(part.begin, part.transfer.stop),
            plan.group,
        )
