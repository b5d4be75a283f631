# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Scheduler side of AscendP2PConnector: which requests to load from a producer, and whose blocks to
keep for consumers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

from ascend_kv_connector.config import Options
from ascend_kv_connector.p2p.params import TransferParams
from ascend_kv_connector.p2p.scheduler.cache_groups import CacheGroups
from ascend_kv_connector.p2p.scheduler.consumer import ConsumerScheduler
from ascend_kv_connector.p2p.scheduler.metadata import Endpoint, Outbox, P2PMetadata
from ascend_kv_connector.p2p.scheduler.producer import ProducerScheduler, computed_tokens
from ascend_kv_connector.p2p.trusted_addresses import TrustedAddresses
from ascend_kv_connector.versions import Versions


class P2PScheduler:
    """Implements the scheduler methods of ``vllm/distributed/kv_transfer/kv_connector/v1/base.py``.

    A prefill instance gets ``do_remote_decode`` and returns ``do_remote_prefill`` for the decode
    instance. A decode instance that gets ``do_remote_prefill`` with ``metaserver``, a router's URL,
    allocates blocks first and posts there; a prefill instance gets that post as its
    ``kv_transfer_params``, and the prompt is read layer by layer during its prefill. For a request
    that names neither a source nor a router, the configured ``metaserver`` is used, if any.
    """

    def __init__(
        self,
        engine: str,
        groups: CacheGroups,
        is_producer: bool,
        is_consumer: bool,
        options: Options,
        trusted: TrustedAddresses | None = None,
        tp_size: int = 1,
        clock: Callable[[], float] = monotonic,
        versions: Versions | None = None,
    ) -> None:
        trusted, self._outbox, self._groups = trusted or TrustedAddresses(), Outbox(), groups
        self._versions = versions = versions or Versions()
        self.producer = ProducerScheduler(
            engine, groups, is_producer, options, trusted, self._outbox, versions, tp_size
        )
        self.consumer = ConsumerScheduler(
            engine,
            groups,
            (is_producer, is_consumer),
            options,
            trusted,
            self._outbox,
            versions,
            clock,
        )
        self._params: dict[str, TransferParams] = {}

    def set_endpoints(self, endpoints: dict[tuple[int, int], Endpoint]) -> None:
        """Set the workers' endpoints, by (pipeline rank, tensor rank)."""
        ordered = [endpoints[rank] for rank in sorted(endpoints)]
        self.producer.ranks = [(each.host, each.port) for each in ordered]
        self.consumer.ranks = [(each.host, each.consumer_port) for each in ordered]
        if engine := ordered[0].engine:
            self.producer.engine = self.consumer.engine = engine

    def on_new_request(self, request: Any) -> None:
        params = TransferParams.parse(request.kv_transfer_params)
        self._params[request.request_id] = params
        self._versions.on_new_request(request)
        self.producer.add(request, params)
        self.consumer.add(request, params)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        self._params_of(request)
        tokens = self.consumer.remote_tokens(request) - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.producer.track(request, self._params_of(request))
        self.consumer.start_load(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduled: Any) -> P2PMetadata:
        """Metadata of a step; ``scheduled`` is vLLM's SchedulerOutput."""
        self.producer.update(scheduled)
        self.consumer.update()
        metadata = self._outbox.take()
        metadata.ranks = self.producer.ranks
        return metadata

    def update_finished_loads(self, requests: Iterable[str]) -> None:
        self.consumer.finish_loads(requests)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """``block_ids`` are the :meth:`joined_tables`."""
        params = self._params_of(request)
        del self._params[request.request_id]
        if self.consumer.finish(request.request_id):
            self.producer.forget(request.request_id)
            return False, None
        source = self.producer.finish(request, params, block_ids)
        return (True, source.to_dict()) if source else (False, None)

    def joined_tables(self, request: Any, tables: Sequence[Sequence[int]]) -> list[int]:
        """Block tables of the KV cache groups, for the computed tokens of a prompt."""
        return self._groups.join(tables, computed_tokens(request))

    def shutdown(self) -> None:
        self.consumer.close()

    def _params_of(self, request: Any) -> TransferParams:
        if request.request_id not in self._params:
            self.on_new_request(request)
        return self._params[request.request_id]
