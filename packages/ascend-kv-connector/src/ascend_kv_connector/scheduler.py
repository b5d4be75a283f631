"""The connector's part in vLLM's scheduler: which requests are read from elsewhere, and whose blocks are kept for others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from ascend_platform import extension
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata
from vllm.v1.request import RequestStatus

from ascend_kv_connector.metaserver import MetaserverClient, external_request_id
from ascend_kv_connector.paged_cache import group_block_table
from ascend_kv_connector.transfers import Source


@dataclass
class Endpoint(KVConnectorHandshakeMetadata):
    """Where a worker answers, which it tells the scheduler once: ``port`` as producer, ``consumer_port`` as consumer; 0 if not."""

    host: str
    port: int
    consumer_port: int = 0


@dataclass
class Load:
    """Tokens ``start`` to ``stop`` are to come into ``blocks``, of which the first holds token ``start``; from a source that
    announces itself, if it is None."""

    source: Source | None
    blocks: list[int]
    start: int
    stop: int


@dataclass
class LayerwisePrefill:
    """A prompt of ``total`` tokens that is computed for a reader which waits at ``places``, under the name ``reader``; after this
    step its first ``tokens`` are in ``blocks``."""

    reader: str
    reader_ranks: tuple[tuple[str, int], ...]
    total: int
    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    announced: bool = False


@dataclass
class P2PMetadata(KVConnectorMetadata):
    """What one step's scheduling means for the workers: by request loads to start, blocks to keep with the tokens they hold,
    sources whose blocks are not wanted, prompts that this step computes for readers, those whose blocks are taken back (with the
    cause, or "" for a preemption), loads whose request has ended, those that no prefill instance will take, with the cause,
    prompts that are not computed although a reader waits for them, and where all ranks answer."""

    loads: dict[str, Load] = field(default_factory=dict)
    leases: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    declined: list[Source] = field(default_factory=list)
    layerwise: dict[str, LayerwisePrefill] = field(default_factory=dict)
    revoked: dict[str, str] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    failed_loads: dict[str, str] = field(default_factory=dict)
    cancelled: list[tuple[LayerwisePrefill, str]] = field(default_factory=list)
    ranks: list[tuple[str, int]] = field(default_factory=list)


class P2PScheduler:
    """See the methods of the same names in ``vllm/distributed/kv_transfer/kv_connector/v1/base.py``.

    The keys of ``kv_transfer_params`` are vLLM's own connectors': a prefill instance gets ``do_remote_decode`` and answers with
    ``do_remote_prefill``, which a decode instance gets. A decode instance that gets ``do_remote_prefill`` with ``metaserver``
    instead, a router's URL, takes blocks first and posts there; what it posts a prefill instance gets as its
    ``kv_transfer_params``, and the prompt is read layer by layer while it is computed. For a request that names neither a source
    nor a router ``metaserver`` is asked, if there is one.
    """

    def __init__(
        self,
        engine: str,
        block_size: int,
        is_producer: bool,
        is_consumer: bool,
        seconds: float = 120.0,
        metaserver: str = "",
        windows: tuple[int, ...] = (0,),
    ) -> None:
        self._windows, self._is_hybrid = windows, windows != (0,)
        self._engine, self._block_size, self._is_producer, self._is_consumer = engine, block_size, is_producer, is_consumer
        self._metaserver = metaserver
        self._ranks: list[tuple[str, int]] = []
        self._consumer_ranks: list[tuple[str, int]] = []
        self._metadata = P2PMetadata()
        self._layerwise: dict[str, LayerwisePrefill] = {}
        self._loading: set[str] = set()
        self._failed_loads: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._metaserver_client = MetaserverClient(seconds, lambda request, cause: self._failed_loads.put((request, cause)))

    def set_endpoints(self, endpoints: dict[tuple[int, int], Endpoint]) -> None:
        """Endpoints by (pipeline rank, tensor rank)."""
        ordered = [endpoints[rank] for rank in sorted(endpoints)]
        self._ranks = [(each.host, each.port) for each in ordered]
        self._consumer_ranks = [(each.host, each.consumer_port) for each in ordered]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = (self._remote_tokens(request) or 0) - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._track_prefill(request)
        stop = self._remote_tokens(request)
        if stop is None:
            return
        params, name = request.kv_transfer_params, request.request_id
        source = None if "metaserver" in params else _source(params)
        params["do_remote_prefill"] = False  # once: after a preemption it is computed here
        if not num_external_tokens:
            if source is not None:
                self._metadata.declined.append(source)
            return
        start = stop - num_external_tokens
        columns = slice(start // self._block_size, -(-stop // self._block_size))
        wanted = [block for table in blocks.get_block_ids() for block in table[columns]]
        self._metadata.loads[name] = Load(source, wanted, start, stop)
        self._loading.add(name)
        if source is None:
            self._metaserver_client.post(name, params["metaserver"], self._prefill_params(name, start))

    def build_connector_meta(self, scheduled: Any) -> P2PMetadata:
        """``scheduled`` is vLLM's SchedulerOutput of the step."""
        self._update_progress(scheduled)
        while not self._failed_loads.empty():
            request, cause = self._failed_loads.get()
            self._metadata.failed_loads[request] = cause
        built, self._metadata = self._metadata, P2PMetadata(ranks=self._ranks)
        return built

    def update_finished_loads(self, requests: Iterable[str]) -> None:
        """These requests' loads have ended in all ranks."""
        self._loading.difference_update(requests)

    def close(self) -> None:
        self._metaserver_client.close()

    def _prefill_params(self, name: str, start: int) -> dict[str, Any]:
        """What a prefill instance gets; the keys are vllm-ascend's, but for remote_ranks and remote_reader."""
        host, port = self._consumer_ranks[0]
        return {
            "request_id": external_request_id(name),
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_engine_id": self._engine,
            "remote_host": host,
            "remote_port": port,
            "remote_ranks": [list(rank) for rank in self._consumer_ranks],
            "remote_reader": name,
            "remote_cached_tokens": start,
        }

    def _track_prefill(self, request: Any) -> None:
        """A prompt that a reader waits for begins to be computed here, perhaps anew."""
        name = request.request_id
        if not self._is_hybrid and name not in self._layerwise and (layerwise := self._waiting_reader(request)):
            self._layerwise[name] = layerwise

    def _waiting_reader(self, request: Any) -> LayerwisePrefill | None:
        """What is to be known of the reader that waits for a prompt; None if there is none."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode") or "remote_reader" not in params or not self._is_producer:
            return None
        if wrong := _invalid_params(params, {"remote_reader": str, "remote_ranks": list}):
            extension.logger.warning("request %s: do_remote_decode %s; nobody reads it", request.request_id, wrong)
            return None
        reader_ranks = tuple((host, port) for host, port in params["remote_ranks"])
        return LayerwisePrefill(params["remote_reader"], reader_ranks, request.num_prompt_tokens)

    def _update_progress(self, scheduled: Any) -> None:
        """Note which tokens of layerwise prompts this step computes, and where."""
        if not self._layerwise:
            return
        for name in scheduled.preempted_req_ids or ():
            if name in self._layerwise:
                self._layerwise[name].blocks, self._layerwise[name].tokens = [], 0
                self._metadata.revoked[name] = ""
        steps = [(new.req_id, new.block_ids, new.num_computed_tokens, True) for new in scheduled.scheduled_new_reqs]
        old = scheduled.scheduled_cached_reqs
        for name, more, computed in zip(old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True):
            steps.append((name, more, computed, name in old.resumed_req_ids))
        for name, blocks, computed, anew in steps:
            layerwise = self._layerwise.get(name)
            if layerwise is None or (layerwise.tokens >= layerwise.total and not anew):
                continue
            (own,) = blocks or ([],)
            layerwise.blocks = list(own) if anew else layerwise.blocks + own
            layerwise.tokens = min(layerwise.total, computed + scheduled.num_scheduled_tokens[name])
            self._metadata.layerwise[name] = replace(layerwise)
            layerwise.announced = True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        params, name = request.kv_transfer_params or {}, request.request_id
        if self._remote_tokens(request) is not None:  # it never got blocks here, for example because the client has left
            if "metaserver" not in params:
                self._metadata.declined.append(_source(params))
            params["do_remote_prefill"] = False
            return False, None
        if name in self._loading:  # its client has left meanwhile
            self._loading.discard(name)
            self._metadata.aborted.append(name)
        ended = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        prefill = self._layerwise.pop(name, None)
        if not params.get("do_remote_decode") or not ended or not block_ids:
            reason = f"the request has ended there before its prompt was computed ({request.status.name})"
            if prefill is not None:
                self._metadata.revoked[name] = reason
            if (waited := prefill or self._waiting_reader(request)) and not waited.announced:
                self._metadata.cancelled.append((waited, reason))
            return False, None
        if not self._is_producer:
            extension.logger.warning(
                "request %s: do_remote_decode needs kv_role kv_producer or kv_both; its blocks are not kept", request.request_id
            )
            return False, None
        if self._is_hybrid and (waited := self._waiting_reader(request)):
            self._metadata.cancelled.append((waited, NO_LAYERWISE_WINDOWS))
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if not self._windows_complete(block_ids, tokens):
            return False, None
        self._metadata.leases[request.request_id] = (list(block_ids), tokens)
        host, port = self._ranks[0]
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
            "remote_host": host,
            "remote_port": port,
            "remote_ranks": [list(rank) for rank in self._ranks],
            "remote_num_tokens": tokens,
        }

    def _remote_tokens(self, request: Any) -> int | None:
        """How many of the prompt's tokens another instance has computed for this request, as far as they are wanted; None if
        there is no such instance, or if it is told wrongly."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return None
        if self._metaserver and not params.keys() & {"metaserver", *REMOTE_PARAMS}:
            params["metaserver"] = self._metaserver
        wrong = _invalid_params(params, {"metaserver": str} if "metaserver" in params else REMOTE_PARAMS)
        if self._is_hybrid and "metaserver" in params:
            wrong = f"comes with metaserver: {NO_LAYERWISE_WINDOWS}"
        if not self._is_consumer:
            wrong = "needs kv_role kv_consumer or kv_both"
        if wrong:
            extension.logger.warning("request %s: do_remote_prefill %s; its prompt is computed here", request.request_id, wrong)
            params["do_remote_prefill"] = False
            return None
        # The last token of a prompt is computed here, and looks a window back: vLLM keeps that only if it is not among the read.
        most = request.num_prompt_tokens - self._is_hybrid
        return min(params.get("remote_num_tokens", most), most)

    def _windows_complete(self, blocks: list[int], tokens: int) -> bool:
        """Whether the windows hold what a reader needs, who computes the last token.

        vLLM has given back what the token after it does not see, which is a block more wherever one ends there.
        """
        tables = [group_block_table(blocks, group, len(self._windows)) for group in range(len(self._windows))]
        return all(
            not window or table[max(0, tokens - window) // self._block_size]
            for table, window in zip(tables, self._windows, strict=True)
        )


NO_LAYERWISE_WINDOWS = "of a model with windows a prompt is not read layer by layer; --disable-hybrid-kv-cache-manager allows it"

REMOTE_PARAMS = {"remote_engine_id": str, "remote_request_id": str, "remote_num_tokens": int, "remote_ranks": list}
"""What a decode instance needs to know of a prompt that has been computed elsewhere."""


def _invalid_params(params: dict[str, Any], forms: dict[str, type]) -> str:
    """What is missing from a router's parameters, or is not of its form; "" if nothing."""
    for key, form in forms.items():
        if not isinstance(params.get(key), form):
            return f"comes with {key} {params.get(key)!r}, which is not what AscendP2PConnector answers with"
    if "remote_ranks" not in forms:
        return ""
    ranks = params["remote_ranks"]
    if not ranks or not all(isinstance(rank, (list, tuple)) and list(map(type, rank)) == [str, int] for rank in ranks):
        return f"comes with remote_ranks {ranks!r}, which are no hosts and ports"
    return ""


def _source(params: dict[str, Any]) -> Source:
    ranks = tuple((host, port) for host, port in params["remote_ranks"])
    return Source(params["remote_engine_id"], params["remote_request_id"], ranks)
