# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``AscendP2PConnector``: vLLM's connector interface, forwarded to the scheduler or the worker
side."""

from __future__ import annotations

from typing import Any

from ascend_platform import extension
from ascend_transfer import engine
from ascend_transfer.mooncake import PORTS_OF_RANK
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.utils.network_utils import get_ip

from ascend_kv_connector import auth
from ascend_kv_connector.config import Options, paged_block_size, sliding_windows
from ascend_kv_connector.metrics import TransferMetrics, TransferStats
from ascend_kv_connector.p2p.scheduler.cache_groups import CacheGroups
from ascend_kv_connector.p2p.scheduler.metadata import Endpoint, P2PMetadata
from ascend_kv_connector.p2p.scheduler.scheduler import P2PScheduler
from ascend_kv_connector.p2p.states import LAST_STATE, draft_blocks
from ascend_kv_connector.p2p.trusted_addresses import TrustedAddresses
from ascend_kv_connector.p2p.worker import P2PWorker
from ascend_kv_connector.versions import of_engine

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # not in vLLM 0.31
    CacheHitSource = None  # type: ignore[assignment, misc]


class AscendP2PConnector(KVConnectorBase_V1, SupportsHMA):
    """Transfers KV cache from prefill instances to decode instances."""

    transfers_states = True
    """For the platform, which refuses other connectors for models with states."""

    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.P2P

    _scheduler: P2PScheduler
    _worker: P2PWorker

    @classmethod
    def check_config(cls, vllm_config: Any) -> None:
        """Validate the configuration; the platform calls it before anything starts.

        Raises:
            RefusedError: an unsupported configuration, in one line.
        """
        options = Options.from_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        engine.check(options.transport, "kv_connector_extra_config.transport")
        host = options.host or get_ip()
        if options.transport == "mooncake" and (ports := options.port_range):
            ranks = vllm_config.parallel_config.world_size
            if len(ports) < PORTS_OF_RANK * ranks:
                extension.logger.warning(
                    "AscendP2PConnector: option ports has %d ports for %d ranks; fix: give it %d a"
                    " rank, so that it can be restarted at once: Mooncake takes random ones, and"
                    " those of before are in use for a minute",
                    len(ports),
                    ranks,
                    PORTS_OF_RANK,
                )
        auth.require_secret(
            auth.read_secret(options.secret_file), options.insecure, host, options.transport
        )
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise extension.RefusedError(
                "AscendP2PConnector does not support decode context parallelism; fix: remove one"
                " of the two"
            )
        if options.mode == "push" and vllm_config.model_config.is_hybrid:
            raise extension.RefusedError(
                "AscendP2PConnector does not transfer the states of linear attention and"
                ' state-space layers layer by layer; fix: remove kv_connector_extra_config.mode "push"'
            )

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        windows = sliding_windows("AscendP2PConnector", groups, states=True)
        self._has_states = LAST_STATE in windows
        transfer = self._kv_transfer_config
        self._options = Options.from_config(transfer.kv_connector_extra_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = P2PScheduler(
                str(transfer.engine_id),
                CacheGroups(paged_block_size(groups), windows, draft_blocks(groups)),
                transfer.is_kv_producer,
                transfer.is_kv_consumer,
                self._options,
                TrustedAddresses.from_options(self._options),
                vllm_config.parallel_config.tensor_parallel_size,
                versions=of_engine(vllm_config),
            )
        else:
            self._worker = P2PWorker(vllm_config, groups, self._options)

    # Scheduler side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], Endpoint]
    ) -> None:
        self._scheduler.set_endpoints(metadata)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Return none for models with recurrent state. vLLM zeroes the new blocks of other groups
        before they are loaded, because a load does not write the rest of the last block, which may
        hold states of another request."""
        return () if self._has_states else super().get_loaded_kv_cache_group_ids(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> P2PMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.update_finished_loads(connector_output.finished_recving or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(
            request, self._scheduler.joined_tables(request, block_ids)
        )

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> Endpoint | None:
        return self._worker.get_handshake_metadata()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, P2PMetadata)
        self._worker.start_transfers(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: a request is scheduled only after all its layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._worker.save_kv_layer(layer_name)

    def wait_for_save(self) -> None:
        """No wait: blocks that consumers still read are kept."""
        self._worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.get_transfer_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.get_block_ids_with_load_errors()

    def shutdown(self) -> None:
        part = self._scheduler if self.role == KVConnectorRole.SCHEDULER else self._worker
        part.shutdown()

    # Metrics

    def get_kv_connector_stats(self) -> TransferStats | None:
        if self.role == KVConnectorRole.SCHEDULER:
            return None
        return self._worker.get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        return TransferStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> TransferMetrics:
        return TransferMetrics(*arguments)
