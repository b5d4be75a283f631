# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Worker side of AscendP2PConnector: the rank as producer, consumer or both."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any
from uuid import uuid4

from ascend_platform import extension
from ascend_transfer.auth import CurveKeys
from ascend_transfer.checkpoint import loaded_fingerprint
from ascend_transfer.engine import Engine, make_engine
from ascend_transfer.errors import TransferError, printable
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.utils.network_utils import get_ip

from ascend_kv_connector.auth import read_secret, require_secret, warn_of_open_ports
from ascend_kv_connector.config import Options, paged_block_size, sliding_windows
from ascend_kv_connector.metrics import FailureLog, TransferStats
from ascend_kv_connector.p2p.bounded import BoundedDict
from ascend_kv_connector.p2p.consumer.consumer import Consumer
from ascend_kv_connector.p2p.paged_cache import PagedCache, kv_heads_of_rank
from ascend_kv_connector.p2p.producer.leases import PrefillProgress
from ascend_kv_connector.p2p.producer.prefill_notifier import PrefillNotifier
from ascend_kv_connector.p2p.producer.producer import Producer
from ascend_kv_connector.p2p.protocol import PrefillCancelled, PrefillStarted
from ascend_kv_connector.p2p.rank import RankContext, private_stream, record_event
from ascend_kv_connector.p2p.scheduler.metadata import Endpoint, P2PMetadata
from ascend_kv_connector.p2p.states import list_regions
from ascend_kv_connector.p2p.transfers import Failed
from ascend_kv_connector.p2p.trusted_addresses import TrustedAddresses
from ascend_kv_connector.store.identity import computed_with

DEFAULT_KV_PORT = 14579
"""vLLM's default of ``kv_port``: the user has chosen none (``vllm/config/kv_transfer.py``)."""


KEPT_STEPS = 64
"""Steps whose end is remembered for leases; older ones have been executed when a request is found
to have finished."""


GAUGE_SECONDS = 1.0
"""Interval at which a rank reports its state without other statistics."""

SUSPEND_SECONDS = 30.0
"""Seconds to wait, before sleep, for chunks that are being packed."""


class P2PWorker:
    """Implements the worker methods of ``vllm/distributed/kv_transfer/kv_connector/v1/base.py``."""

    def __init__(
        self, vllm_config: Any, groups: list[Any], options: Options, transport: Engine | None = None
    ) -> None:
        """``groups`` are the KVCacheGroupSpecs of vLLM's KVCacheConfig."""
        self._config, self._groups, self._options = vllm_config, groups, options
        self._transport = transport
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._stats = TransferStats()
        self._failed_block_ids: set[int] = set()
        self._failures = FailureLog(lambda line: extension.logger.error("%s", line))
        self._sent_bytes = self._packed_bytes = 0
        self._gauges_reported = 0.0
        self._rank, self._engine = 0, ""
        self._written: BoundedDict[Any] = BoundedDict(KEPT_STEPS)
        self._before_step: Any = None
        self._notifier: PrefillNotifier | None = None
        self._progress: dict[str, PrefillProgress] = {}
        self._step, self._step_tokens = 0, dict[str, int]()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Allocate buffers and start the producer's and the consumer's threads.

        Raises:
            RefusedError: the transport is not available, or the port is in use.
        """
        _workers.add(self)
        transfer, tp, pp = self._config.kv_transfer_config, get_tp_group(), get_pp_group()
        ranks = pp.world_size * tp.world_size
        self._rank = rank = pp.rank_in_group * tp.world_size + tp.rank_in_group
        cache = self._make_cache(kv_caches, tp.rank_in_group, tp.world_size)
        host = self._options.host or get_ip()
        keys, transport = self._open_transport(host)
        if self._options.expose_cache and self._config.model_config.enable_sleep_mode:
            extension.logger.info(
                "KV connector: --enable-sleep-mode frees the KV cache, which is therefore not"
                " exposed to peers"
            )
            self._options = replace(self._options, expose_cache=False)
        self._engine = instance_name(transfer.engine_id, tp, pp)
        context = RankContext(
            self._engine,
            model_fingerprint(self._config),
            rank,
            ranks,
            loaded_fingerprint(self._config.model_config),
            host,
            keys,
            partial(private_stream, cache.device),
            TrustedAddresses.from_options(self._options).allows,
        )
        port: int | range = self._options.port_range or 0
        free = port
        if (first := int(transfer.kv_port)) != DEFAULT_KV_PORT:
            port = first + self._config.parallel_config.data_parallel_index * ranks + rank
        if transfer.is_kv_producer:
            self._producer = Producer(context, cache, transport, self._options, port)
            if rank == 0:
                self._notifier = PrefillNotifier(self._options.answer_timeout, keys)
        if transfer.is_kv_consumer:
            port = free if self._producer else port
            self._consumer = Consumer(context, cache, transport, self._options, port)

    def _make_cache(self, kv_caches: dict[str, Any], rank: int, ranks: int) -> PagedCache:
        """``rank`` of ``ranks`` is the tensor-parallel one."""
        total = total_kv_heads(self._config.model_config)
        heads = kv_heads_of_rank(rank, ranks, total)
        return PagedCache(
            list_regions(kv_caches, heads.num),
            paged_block_size(self._groups),
            heads,
            total,
            {
                layer: number
                for number, group in enumerate(self._groups)
                for layer in group.layer_names
            },
            sliding_windows("AscendP2PConnector", self._groups, states=True),
            (rank, ranks),
        )

    def _open_transport(self, host: str) -> tuple[CurveKeys | None, Engine]:
        options = self._options
        secret = read_secret(options.secret_file)
        require_secret(secret, options.insecure, host, options.transport)
        keys = CurveKeys(secret) if secret else None
        self._transport = self._transport or make_engine(
            options.transport, host, options.protocol, keys, options.port_range
        )
        if self._rank == 0:
            warn_of_open_ports(options.insecure, options.transport, self._transport.session)
        return keys, self._transport

    def get_handshake_metadata(self) -> Endpoint | None:
        port, consumer_port = (
            part.server.port if part else 0 for part in (self._producer, self._consumer)
        )
        if not (port or consumer_port):
            return None
        return Endpoint(self._options.host or get_ip(), port, consumer_port, self._engine)

    def begin_step(self, metadata: P2PMetadata) -> None:
        """Before the forward pass: revoke and update blocks of layer-by-layer prefills, and notify
        their consumers.

        Blocks to load into may still be used by earlier steps, but not by this one.
        """
        self._step = metadata.step
        self._before_step = record_event() if metadata.loads else None
        if self._producer is None:
            return
        leases = self._producer.leases
        for request, reason in metadata.revoked.items():
            leases.revoke(request, reason)
            self._progress.pop(request, None)
        for prefill, reason in metadata.cancelled:
            if self._notifier:
                self._notifier.notify(
                    prefill.reader_ranks, PrefillCancelled(prefill.reader, reason)
                )
        self._step_tokens = {}
        for request, prefill in metadata.layerwise.items():
            progress = self._progress.setdefault(request, PrefillProgress())
            leases.track(request, prefill.blocks, prefill.total, progress)
            self._step_tokens[request] = prefill.tokens
            if self._notifier and not prefill.announced:
                what = PrefillStarted(prefill.reader, self._engine, request, metadata.ranks)
                self._notifier.notify(prefill.reader_ranks, what)
        if metadata.layerwise:
            self._producer.steps.note()

    def save_kv_layer(self, layer: str) -> None:
        """Record that this step's tokens of a layer are ready once the current stream reaches this
        point."""
        self._record_progress([layer])

    def end_step(self) -> None:
        """:meth:`save_kv_layer` for all layers: vLLM does not call it in graphs, nor for the layers
        of a drafter."""
        if self._producer is not None:
            self._record_progress(
                dict.fromkeys(region.layer for region in self._producer.cache.regions)
            )
            if self._step_tokens:
                self._producer.steps.note()
            if self._step:
                self._written[self._step] = record_event()
        self._step, self._step_tokens = 0, {}

    def _record_progress(self, layers: Iterable[str]) -> None:
        if self._step_tokens:
            event = record_event()
            for layer in layers:
                for request, tokens in self._step_tokens.items():
                    self._progress[request].record(layer, tokens, event.query)

    def start_transfers(self, metadata: P2PMetadata) -> None:
        """Apply this step's metadata, after the step's work was enqueued on the current stream."""
        if self._producer:
            for request, (blocks, tokens) in metadata.leases.items():
                written = self._written.get(metadata.written[request])
                ready = written.query if written else lambda: True
                self._producer.leases.grant(request, blocks, tokens, self._options.lease, ready)
                self._progress.pop(request, None)
            for request in metadata.unwanted:
                self._producer.leases.end(request)
        if self._consumer:
            for request, load in metadata.loads.items():
                self._consumer.start(
                    request, load.source, load.blocks, load.start, load.stop, self._before_step
                )
            for source in metadata.renewed:
                self._consumer.renew(source)
            for source in metadata.released:
                self._consumer.release(source)
            for request in metadata.aborted:
                self._consumer.cancel(request, TransferError("aborted", "the request has ended"))
            for request, cause in metadata.failed_loads.items():
                self._consumer.cancel_unstarted(request, cause)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if self._producer:
            ended = self._producer.leases.pop_ended()
            results.finished_sending = set(ended)
            for request, reason in ended.items():
                if "expired" in reason:
                    self._stats.data["expired"] += 1
                    extension.logger.warning(
                        "KV blocks of %s were freed unread: %s", printable(request), reason
                    )
        if self._consumer:
            for outcome in self._consumer.get_finished():
                self._stats.add(outcome)
                if isinstance(outcome, Failed) and outcome.kind == "aborted":
                    extension.logger.info("%s", outcome)
                elif isinstance(outcome, Failed):
                    self._failures.add(outcome)
                    if self._consumer.cache.is_hybrid:
                        results.failed_recving.add(outcome.request)
                    else:
                        self._failed_block_ids.update(outcome.blocks)
                else:
                    extension.logger.debug("%s", outcome)
            results.finished_recving |= self._consumer.pop_settled()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._failed_block_ids = self._failed_block_ids, set()
        return blocks

    def get_kv_connector_stats(self) -> TransferStats | None:
        if self._producer:
            self._stats.data["sent"] = self._producer.sent_bytes - self._sent_bytes
            self._stats.data["packed"] = self._producer.copied_bytes - self._packed_bytes
        now = monotonic()
        if self._stats.is_empty() and now - self._gauges_reported < GAUGE_SECONDS:
            return None
        self._sent_bytes += self._stats.data["sent"]
        self._packed_bytes += self._stats.data["packed"]
        self._gauges_reported = now
        parts = [part for part in (self._producer, self._consumer) if part is not None]
        self._stats.data["gauges"] = {
            str(self._rank): {
                name: value for part in parts for name, value in part.gauges().items()
            }
        }
        stats, self._stats = self._stats, TransferStats()
        return stats

    def set_awake(self, state: bool) -> None:
        """Before the KV cache is freed, end all transfers and leases; after it is restored, admit
        readers again.

        Raises:
            RefusedError: the KV cache is still being read and must not be freed.
        """
        cause = "the instance went to sleep"
        if self._consumer and not state:
            self._consumer.suspend(f"{cause}: this one")
        if self._producer and state:
            self._producer.leases.resume()
        elif self._producer:
            if not self._producer.leases.suspend(
                f"{cause}: the one that computed the prompt", SUSPEND_SECONDS
            ):
                raise extension.RefusedError(
                    f"the KV cache is still being read after {SUSPEND_SECONDS:g} s and cannot be"
                    " put to sleep; fix: call /sleep again, or /wake_up to go on serving"
                )
            self._progress.clear()

    def shutdown(self) -> None:
        for part in (self._notifier, self._producer, self._consumer, self._transport):
            if part is not None:
                part.close()
        self._notifier = self._producer = self._consumer = self._transport = None


_workers: weakref.WeakSet[P2PWorker] = weakref.WeakSet()


def set_awake(state: bool) -> None:
    """False before the KV cache's memory is freed for sleep mode, True when the platform's worker can
    serve, also again."""
    for worker in _workers:
        worker.set_awake(state)


def instance_name(engine_id: str | None, *groups: Any) -> str:
    """Name of this instance for others, the same in all ranks of its process groups, and another
    after a restart: a user may have given several instances one ``engine_id``."""
    name = f"{str(engine_id)[:100]}-{uuid4().hex}"
    for group in reversed(groups):
        name = group.broadcast_object(name, src=0)
    return name


def total_kv_heads(model: Any) -> int:
    """KV heads of the model, which its tensor-parallel ranks share; all ranks have the same
    latents, as one head."""
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def model_fingerprint(vllm_config: Any) -> str:
    """Properties that must be equal in both instances, without the weights: architecture, a digest
    of the model's configuration and of the options that the KV cache depends on, and the order of
    rotated keys if it differs from the model's order."""
    config, order = vllm_config.model_config.hf_config, extension.rope_order(vllm_config)
    values = {
        key: value
        for key, value in config.to_dict().items()
        if not key.startswith(("_", "transformers"))
    }
    values["options"] = computed_with(vllm_config)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[
        :12
    ]
    return f"{'+'.join(config.architectures or ['?'])}/{digest}{'' if order == 'pairs' else f'/rope in {order}'}"
