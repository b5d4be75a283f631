# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The part of a consumer that the fetching and push-receiving threads use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from ascend_transfer.engine import Engine
from ascend_transfer.memory import ReceiveBuffers

from ascend_kv_connector.config import Options
from ascend_kv_connector.p2p.consumer.push_stop import PushStop
from ascend_kv_connector.p2p.paged_cache import PagedCache
from ascend_kv_connector.p2p.peers import CircuitBreaker
from ascend_kv_connector.p2p.protocol import Finish, Release
from ascend_kv_connector.p2p.rank import RankContext
from ascend_kv_connector.p2p.transfers import Source, Transfer


class ConsumerView(Protocol):
    """See :class:`~ascend_kv_connector.p2p.consumer.consumer.Consumer`."""

    rank: RankContext
    cache: PagedCache
    memory: list[tuple[int, int]]
    transport: Engine
    options: Options
    zmq_context: Any
    buffers: ReceiveBuffers
    unpackers: ThreadPoolExecutor

    def breaker(self, source: Source) -> CircuitBreaker: ...

    def finish_message(self, source: Source) -> Finish: ...

    def release_message(self, transfer: Transfer, *tickets: int) -> Release: ...

    def try_later(self, transfer: Transfer) -> bool: ...

    def ask_again(self, stop: PushStop) -> None: ...

    def may_write_directly(self) -> bool: ...
