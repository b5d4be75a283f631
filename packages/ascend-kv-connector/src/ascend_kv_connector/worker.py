"""The connector's part in a worker: the rank as producer, as consumer or as both, on the NPU."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from ascend_platform import extension
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.utils.network_utils import get_ip

from ascend_kv_connector.announcer import Announcer
from ascend_kv_connector.cache import PagedCache, heads_of
from ascend_kv_connector.config import Options, windows_of
from ascend_kv_connector.consumer import Consumer
from ascend_kv_connector.errors import TransferError
from ascend_kv_connector.keys import VARIABLE, Keys, is_loopback, secret
from ascend_kv_connector.leases import Growth
from ascend_kv_connector.metrics import TransferStats
from ascend_kv_connector.producer import Producer
from ascend_kv_connector.protocol import Announce, Dropped
from ascend_kv_connector.scheduler import Endpoint, P2PMetadata
from ascend_kv_connector.transfers import Failed
from ascend_kv_connector.transport import Transport, make

ANY_PORT = 14579
"""vLLM's default of ``kv_port``, which says that nobody has chosen one (``vllm/config/kv_transfer.py``)."""


class P2PWorker:
    """See the methods of the same names in ``vllm/distributed/kv_transfer/kv_connector/v1/base.py``."""

    def __init__(self, vllm_config: Any, groups: list[Any], options: Options, transport: Transport | None = None) -> None:
        """``groups`` are the KVCacheGroupSpecs of vLLM's KVCacheConfig."""
        self._config, self._groups, self._options, self._transport = vllm_config, groups, options, transport
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._stats = TransferStats()
        self._not_loaded: set[int] = set()
        self._written: Any = None
        self._announcer: Announcer | None = None
        self._growths: dict[str, Growth] = {}
        self._step: dict[str, int] = {}

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Make the buffers and start to answer, and to ask.

        Raises:
            RefusedError: the transport cannot serve, or the port is taken.
        """
        groups = {layer: number for number, group in enumerate(self._groups) for layer in group.layer_names}
        regions = [
            (layer, part, cache) for layer, held in kv_caches.items() for part, cache in extension.cache_parts(held).items()
        ]
        transfer, parallel = self._config.kv_transfer_config, self._config.parallel_config
        tp, pp = get_tp_group(), get_pp_group()
        rank, ranks = pp.rank_in_group * tp.world_size + tp.rank_in_group, pp.world_size * tp.world_size
        total = self._config.model_config.get_total_num_kv_heads()
        heads, block_size = heads_of(tp.rank_in_group, tp.world_size, total), self._groups[0].kv_cache_spec.block_size
        cache = PagedCache(regions, block_size, heads, total, groups, windows_of("AscendP2PConnector", self._groups))
        host = self._options.host or get_ip()
        shared = secret(self._options.secret_file)
        if rank == 0 and not shared and not is_loopback(host):
            said = "KV connector: whoever reaches %s can ask for prompts' KV cache: no secret_file is given, and %s is not set"
            extension.logger.warning(said, host, VARIABLE)
        keys = Keys(shared) if shared else None
        transport = self._transport = self._transport or make(self._options.transport, host, self._options.protocol, keys)
        about = {"cache": cache, "transport": transport, "options": self._options, "engine": transfer.engine_id, "keys": keys}
        about["model"] = fingerprint(self._config.model_config)
        port = int(transfer.kv_port)
        port = 0 if port == ANY_PORT else port + parallel.data_parallel_index * ranks + rank
        if transfer.is_kv_producer:
            self._producer = Producer(**about, host=host, port=port, queue=self._queue(cache.device))
            if rank == 0:
                self._announcer = Announcer(self._options.answer_timeout, keys)
        if transfer.is_kv_consumer:
            landing = 0 if self._producer else port
            queue = self._queue(cache.device)
            self._consumer = Consumer(**about, rank=rank, ranks=ranks, device_queue=queue, host=host, port=landing)

    def get_handshake_metadata(self) -> Endpoint | None:
        ports = [part.server.port if part else 0 for part in (self._producer, self._consumer)]
        return Endpoint(self._options.host or get_ip(), *ports) if any(ports) else None

    def begin_step(self, metadata: P2PMetadata) -> None:
        """Before the model runs: blocks that are no longer a prompt's are taken from its readers, new ones are given to them."""
        if self._producer is None:
            return
        leases = self._producer.leases
        for request, how in metadata.withdrawn.items():
            leases.withdraw(request, self._options.answer_timeout, how)
            self._growths.pop(request, None)
        for growing, how in metadata.dropped if self._announcer else ():
            self._announcer.announce(growing.places, Dropped(growing.reader, how))
        self._step = {}
        for request, growing in metadata.growing.items():
            growth = self._growths.setdefault(request, Growth())
            leases.grow(request, growing.blocks, growing.total, growth)
            self._step[request] = growing.tokens
            if self._announcer and not growing.announced:
                what = Announce(growing.reader, self._config.kv_transfer_config.engine_id, request, metadata.ranks)
                self._announcer.announce(growing.places, what)

    def layer_is_enqueued(self, layer: str) -> None:
        """This step's tokens of a layer will be in their blocks when the current stream has come here."""
        self._mark([layer])

    def end_step(self) -> None:
        """As :meth:`layer_is_enqueued` for all layers: in a graph nobody calls that."""
        if self._producer is not None:
            self._mark(dict.fromkeys(region.layer for region in self._producer.cache.regions))
        self._step = {}

    def _mark(self, layers: Iterable[str]) -> None:
        if self._step:
            event = torch.npu.Event()
            event.record()
            for layer in layers:
                for request, tokens in self._step.items():
                    self._growths[request].mark(layer, tokens, event.query)

    def start(self, metadata: P2PMetadata) -> None:
        """Take this step's orders, once the step's own work is enqueued on the current stream."""
        if metadata.leases or metadata.loads:
            self._written = torch.npu.Event()
            self._written.record()
        if self._producer:
            for request, (blocks, tokens) in metadata.leases.items():
                self._producer.leases.grant(request, blocks, tokens, self._options.lease, self._written.query)
                self._growths.pop(request, None)
        if self._consumer:
            for request, load in metadata.loads.items():
                self._consumer.start(request, load.source, load.blocks, load.start, load.stop)
            for source in metadata.declined:
                self._consumer.decline(source)
            for request in metadata.ended:
                self._consumer.end(request, TransferError("aborted", "the request has ended"))
            for request, cause in metadata.lost.items():
                self._consumer.lose(request, cause)

    def get_transfer_results(self) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if self._producer:
            ended = self._producer.leases.ended()
            results.finished_sending = set(ended)
            for request, how in ended.items():
                if "expired" in how:
                    self._stats.data["expired"] += 1
                    extension.logger.warning("KV blocks of %s are freed unread: %s", request, how)
        for outcome in self._consumer.take() if self._consumer else ():
            self._stats.add(outcome)
            results.finished_recving.add(outcome.request)
            if isinstance(outcome, Failed) and outcome.kind == "aborted":
                extension.logger.info("%s", outcome)
            elif isinstance(outcome, Failed):
                extension.logger.error("%s", outcome)
                if self._consumer.cache.windowed:
                    results.failed_recving.add(outcome.request)
                else:
                    self._not_loaded.update(outcome.blocks)
            else:
                extension.logger.debug("%s", outcome)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._not_loaded = self._not_loaded, set()
        return blocks

    def get_kv_connector_stats(self) -> TransferStats | None:
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, TransferStats()
        return stats

    def shutdown(self) -> None:
        for part in (self._announcer, self._producer, self._consumer, self._transport):
            if part is not None:
                part.close()
        self._announcer = self._producer = self._consumer = self._transport = None

    def _queue(self, device: torch.device) -> Callable[[], AbstractContextManager]:
        return lambda: on_stream(device, self._written)


_streams = threading.local()


@contextmanager
def on_stream(device: torch.device, behind: Any) -> Iterator[None]:
    """Work on a stream that is this thread's own, behind an event, if there is one; at the end it is done."""
    torch.npu.set_device(device)
    if not hasattr(_streams, "own"):
        _streams.own = torch.npu.Stream(device)
    with torch.npu.stream(_streams.own):
        if behind is not None:
            _streams.own.wait_event(behind)
        yield
    _streams.own.synchronize()


def fingerprint(model: Any) -> str:
    """The architecture and a digest of the model's configuration: instances must agree in it. It does not see the weights."""
    values = {key: value for key, value in model.hf_config.to_dict().items() if not key.startswith(("_", "transformers"))}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return f"{'+'.join(model.hf_config.architectures or ['?'])}/{digest}"
