# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Scheduler side of AscendP2PConnector: which requests to load from a producer, and whose blocks to
keep for consumers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from time import monotonic
from typing import Any

from ascend_platform import extension
from ascend_platform.transfer.errors import printable
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)
from vllm.v1.request import RequestStatus

from ascend_kv_connector.p2p.leases import BoundedDict
from ascend_kv_connector.p2p.metaserver import MetaserverClient, external_request_id
from ascend_kv_connector.p2p.paged_cache import group_block_table
from ascend_kv_connector.p2p.prompt_digest import prompt_digest
from ascend_kv_connector.p2p.protocol import MAX_RANKS, VERSION
from ascend_kv_connector.p2p.states import LAST_STATE, join_tables, leave_last_token
from ascend_kv_connector.p2p.transfers import Source
from ascend_kv_connector.p2p.trusted_addresses import TrustedAddresses


@dataclass
class Endpoint(KVConnectorHandshakeMetadata):
    """Handshake metadata of a worker: ``port`` of its producer, ``consumer_port`` of its consumer;
    0 if it has none."""

    host: str
    port: int
    consumer_port: int = 0


@dataclass
class Load:
    """Load of tokens ``start`` to ``stop`` into ``blocks``, of which the first holds token
    ``start``.

    ``source`` is None for a layer-by-layer load, whose producer sends PrefillStarted.
    """

    source: Source | None
    blocks: list[int]
    start: int
    stop: int


@dataclass
class LayerwisePrefill:
    """Prefill of a prompt of ``total`` tokens for a consumer whose request is ``reader`` and whose
    ranks are ``reader_ranks``.

    After this step its first ``tokens`` are in ``blocks``.
    """

    reader: str
    reader_ranks: tuple[tuple[str, int], ...]
    total: int
    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    announced: bool = False


@dataclass
class P2PMetadata(KVConnectorMetadata):
    """Connector metadata of one step for the workers.

    ``loads``: loads to start, by request. ``leases``: blocks to keep and their number of tokens, by
    request. ``released``: sources whose blocks are no longer needed. ``layerwise``: prefills of
    this step with a waiting consumer. ``revoked``: prefills whose blocks are taken back, with the
    reason, "" for a preemption. ``aborted``: loads whose request ended. ``failed_loads``: loads
    that no prefill instance will serve, with the cause. ``cancelled``: prefills with a waiting
    consumer that will not run. ``step``: number of this step if it computes prompts that consumers
    may load, otherwise 0. ``written``: the step in which the last tokens of a lease were computed.
    ``ranks``: (host, port) of this instance's producers. ``renewed``: sources that requests wait
    for. ``unwanted``: finished requests whose blocks no consumer will load.
    """

    loads: dict[str, Load] = field(default_factory=dict)
    leases: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    released: list[Source] = field(default_factory=list)
    layerwise: dict[str, LayerwisePrefill] = field(default_factory=dict)
    revoked: dict[str, str] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    failed_loads: dict[str, str] = field(default_factory=dict)
    cancelled: list[tuple[LayerwisePrefill, str]] = field(default_factory=list)
    step: int = 0
    written: dict[str, int] = field(default_factory=dict)
    ranks: list[tuple[str, int]] = field(default_factory=list)
    renewed: list[Source] = field(default_factory=list)
    unwanted: list[str] = field(default_factory=list)


@dataclass
class WaitingSource:
    """Source of a request that waits, or loads; its lease is renewed every ``seconds``, next when
    it is ``due``.

    A request that waits for blocks is computed here after ``until``, if that is given.
    """

    source: Source
    seconds: float
    due: float
    until: float = math.inf


MAX_ABORTED = 1024
"""Requests that one ``aborted_request`` may name."""


class P2PScheduler:
    """Implements the scheduler methods of ``vllm/distributed/kv_transfer/kv_connector/v1/base.py``.

    The keys of ``kv_transfer_params`` are those of vLLM's own connectors: a prefill instance gets
    ``do_remote_decode`` and returns ``do_remote_prefill`` for the decode instance. A decode
    instance that gets ``do_remote_prefill`` with ``metaserver``, a router's URL, allocates blocks
    first and posts there; a prefill instance gets that post as its ``kv_transfer_params``, and the
    prompt is read layer by layer during its prefill. For a request that names neither a source nor
    a router, the configured ``metaserver`` is used, if any.
    """

    def __init__(
        self,
        engine: str,
        block_size: int,
        is_producer: bool,
        is_consumer: bool,
        seconds: float = 120.0,
        trusted: TrustedAddresses | None = None,
        push: bool = False,
        windows: tuple[int, ...] = (0,),
        lease: float = 30.0,
        clock: Callable[[], float] = monotonic,
        tp_size: int = 1,
        draft_blocks: int = 0,
    ) -> None:
        self._tp_size, self._draft_blocks = tp_size, draft_blocks
        # For producers with states: prompts whose last token is left to the consumer.
        self._shortened: set[str] = set()
        self._lease, self._clock = lease, clock
        self._waiting: dict[str, WaitingSource] = {}
        self._windows, self._is_hybrid = windows, windows != (0,)
        self._has_states = LAST_STATE in windows
        self._no_layerwise = NO_LAYERWISE_STATES if self._has_states else NO_LAYERWISE_WINDOWS
        self._engine, self._block_size, self._is_producer, self._is_consumer = (
            engine,
            block_size,
            is_producer,
            is_consumer,
        )
        self._trusted = trusted or TrustedAddresses()
        self._metaserver = (
            self._trusted.metaservers[0] if push and self._trusted.metaservers else ""
        )
        self._ranks: list[tuple[str, int]] = []
        self._consumer_ranks: list[tuple[str, int]] = []
        self._metadata = P2PMetadata()
        self._layerwise: dict[str, LayerwisePrefill] = {}
        self._steps = 0
        # For producers: number of tokens, and the step that computed the last ones.
        self._prompts: dict[str, tuple[int, int]] = {}
        self._loading: dict[str, Source | None] = {}
        self._released: BoundedDict[None] = BoundedDict()
        self._recognized: set[str] = set()
        self._waited_too_long: set[str] = set()
        # An instance of both roles may wait for blocks that it keeps for others, which wait for
        # blocks that they keep for it.
        self._most_waiting = seconds if is_producer else math.inf
        self._failed_loads: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._metaserver_client = MetaserverClient(
            seconds, lambda request, cause: self._failed_loads.put((request, cause))
        )

    def set_endpoints(self, endpoints: dict[tuple[int, int], Endpoint]) -> None:
        """Set the workers' endpoints, by (pipeline rank, tensor rank)."""
        ordered = [endpoints[rank] for rank in sorted(endpoints)]
        self._ranks = [(each.host, each.port) for each in ordered]
        self._consumer_ranks = [(each.host, each.consumer_port) for each in ordered]

    def on_new_request(self, request: Any) -> None:
        """A request has arrived: its source's lease is renewed while it waits; sources that a
        router has aborted are freed."""
        params = request.kv_transfer_params or {}
        if self._is_producer and isinstance(aborted := params.get("aborted_request"), list):
            self._metadata.unwanted += [
                name for name in aborted[:MAX_ABORTED] if isinstance(name, str)
            ]
        if (
            self._is_producer
            and self._has_states
            and params.get("do_remote_decode")
            and leave_last_token(request)
        ):
            self._shortened.add(request.request_id)
        if self._remote_tokens(request) is not None and "metaserver" not in params:
            seconds = params.get("remote_lease")
            seconds = max(1.0, (seconds if isinstance(seconds, (int, float)) else self._lease) / 3)
            now = self._clock()
            self._waiting[request.request_id] = WaitingSource(
                _source(params), seconds, now + seconds, now + self._most_waiting
            )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        tokens = (self._remote_tokens(request) or 0) - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._track_prefill(request)
        stop = self._remote_tokens(request)
        if stop is None:
            return
        params, name = request.kv_transfer_params, request.request_id
        source = None if "metaserver" in params else _source(params)
        # Only once: after a preemption the prompt is computed here.
        self._stop_remote_prefill(request)
        if not num_external_tokens:
            self._waiting.pop(name, None)
            self._release_unused(source)
            return
        start = stop - num_external_tokens
        columns = slice(start // self._block_size, -(-stop // self._block_size))
        tables = self._tables(self._join_tables(blocks.get_block_ids(), stop))
        wanted = [block for table in tables for block in table[columns]]
        self._metadata.loads[name] = Load(source, wanted, start, stop)
        self._loading[name] = source
        if source is None:
            self._metaserver_client.post(
                name, params["metaserver"], self._prefill_params(request, start)
            )

    def build_connector_meta(self, scheduled: Any) -> P2PMetadata:
        """Metadata of a step; ``scheduled`` is vLLM's SchedulerOutput."""
        self._note_step(scheduled)
        self._update_progress(scheduled)
        while not self._failed_loads.empty():
            request, cause = self._failed_loads.get()
            self._metadata.failed_loads[request] = cause
        now = self._clock()
        for name, waiting in list(self._waiting.items()):
            if waiting.until <= now and name not in self._loading:
                del self._waiting[name]
                self._waited_too_long.add(name)
                self._release_unused(waiting.source)
            elif waiting.due <= now:
                waiting.due = now + waiting.seconds
                self._metadata.renewed.append(waiting.source)
        built, self._metadata = self._metadata, P2PMetadata()
        built.ranks = self._ranks
        return built

    def update_finished_loads(self, requests: Iterable[str]) -> None:
        """Loads of these requests have ended in all ranks."""
        for name in requests:
            self._waiting.pop(name, None)
            self._release_unused(self._loading.pop(name, None))

    def close(self) -> None:
        self._metaserver_client.close()

    def _release_unused(self, source: Source | None) -> None:
        """Release a source's blocks unless another request loads them too, such as a sibling (``n``
        > 1) or a retry.

        Later requests with this source compute their prompt: most of it is in the prefix cache by
        then.
        """
        if source is not None and source not in self._loading.values():
            self._metadata.released.append(source)
            self._released[f"{source.engine} {source.request}"] = None

    def _stop_remote_prefill(self, request: Any) -> None:
        request.kv_transfer_params["do_remote_prefill"] = False
        self._recognized.discard(request.request_id)
        self._waited_too_long.discard(request.request_id)

    def _prefill_params(self, request: Any, start: int) -> dict[str, Any]:
        """``kv_transfer_params`` for the prefill instance; keys as vllm-ascend's, except
        remote_ranks, remote_reader and remote_prompt_digest."""
        name = request.request_id
        host, port = self._consumer_ranks[0]
        params = {
            "request_id": external_request_id(name),
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_engine_id": self._engine,
            "remote_host": host,
            "remote_port": port,
            "remote_ranks": [list(rank) for rank in self._consumer_ranks],
            "remote_reader": name,
            "remote_cached_tokens": start,
            "remote_prompt_digest": prompt_digest(request, request.num_prompt_tokens),
        }
        return self._trusted.sign(params)

    def _track_prefill(self, request: Any) -> None:
        """Track a prompt that a consumer waits for, when its prefill starts or restarts."""
        name = request.request_id
        if self._is_producer and (request.kv_transfer_params or {}).get("do_remote_decode"):
            self._prompts.setdefault(name, (request.num_prompt_tokens, 0))
        if (
            not self._is_hybrid
            and name not in self._layerwise
            and (prefill := self._waiting_reader(request))
        ):
            self._layerwise[name] = prefill

    def _waiting_reader(self, request: Any) -> LayerwisePrefill | None:
        """The prefill that a consumer waits for; None if no consumer waits."""
        params = request.kv_transfer_params or {}
        if (
            not params.get("do_remote_decode")
            or "remote_reader" not in params
            or not self._is_producer
        ):
            return None
        wrong = _invalid_params(
            params, {"remote_reader": str, "remote_ranks": list, "remote_prompt_digest": str}
        )
        if not wrong and params["remote_prompt_digest"] != prompt_digest(
            request, request.num_prompt_tokens
        ):
            wrong = f"is for another prompt, of remote_reader {printable(params['remote_reader'])}"
        if request.request_id in self._waited_too_long:
            wrong = (
                f"waited {self._most_waiting:g} s for blocks, while this instance keeps those of"
                " others (kv_both)"
            )
        wrong = wrong or self._trusted.refusal(
            {key: value for key, value in params.items() if key != "metaserver"}
        )
        if wrong:
            extension.logger.warning(
                "request %s: do_remote_decode %s; its blocks are not sent",
                request.request_id,
                wrong,
            )
            return None
        reader_ranks = tuple((host, port) for host, port in params["remote_ranks"])
        return LayerwisePrefill(params["remote_reader"], reader_ranks, request.num_prompt_tokens)

    def _note_step(self, scheduled: Any) -> None:
        """Record which prompts for consumers this step computes."""
        self._steps += 1
        if not self._prompts:
            return
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        old = scheduled.scheduled_cached_reqs
        computed |= dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
        for name in self._prompts.keys() & computed.keys():
            total, _ = self._prompts[name]
            if computed[name] < total:
                self._prompts[name] = total, self._steps
                self._metadata.step = self._steps

    def _update_progress(self, scheduled: Any) -> None:
        """Record tokens and blocks of this step's layer-by-layer prefills."""
        if not self._layerwise:
            return
        for name in scheduled.preempted_req_ids or ():
            if name in self._layerwise:
                self._layerwise[name].blocks, self._layerwise[name].tokens = [], 0
                self._metadata.revoked[name] = ""
        steps = [
            (new.req_id, new.block_ids, new.num_computed_tokens, True)
            for new in scheduled.scheduled_new_reqs
        ]
        old = scheduled.scheduled_cached_reqs
        for name, more, computed in zip(
            old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True
        ):
            steps.append((name, more, computed, name in old.resumed_req_ids))
        for name, blocks, computed, resumed in steps:
            prefill = self._layerwise.get(name)
            if prefill is None or (prefill.tokens >= prefill.total and not resumed):
                continue
            (own,) = blocks or ([],)
            prefill.blocks = list(own) if resumed else prefill.blocks + own
            prefill.tokens = min(prefill.total, computed + scheduled.num_scheduled_tokens[name])
            self._metadata.layerwise[name] = replace(prefill)
            prefill.announced = True

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """``block_ids`` are the :meth:`joined_tables`."""
        params, name = request.kv_transfer_params or {}, request.request_id
        tokens = _prompt_tokens_computed(request)
        shortened = name in self._shortened
        self._shortened.discard(name)
        _, step = self._prompts.pop(name, (0, 0))
        self._waiting.pop(name, None)
        # It was never scheduled, for example because its client disconnected.
        if self._remote_tokens(request) is not None:
            self._stop_remote_prefill(request)
            self._release_unused(None if "metaserver" in params else _source(params))
            return False, None
        if name in self._loading:  # its client disconnected
            self._metadata.aborted.append(name)
            self._release_unused(self._loading.pop(name))
        ended = request.status in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        )
        prefill = self._layerwise.pop(name, None)
        if not params.get("do_remote_decode") or not ended or not block_ids:
            reason = f"the request ended before its prefill ({request.status.name})"
            if prefill is not None:
                self._metadata.revoked[name] = reason
            if (waited := prefill or self._waiting_reader(request)) and not waited.announced:
                self._metadata.cancelled.append((waited, reason))
            return False, None
        if not self._is_producer:
            extension.logger.warning(
                "request %s: do_remote_decode needs kv_role kv_producer or kv_both; its blocks are"
                " not kept",
                request.request_id,
            )
            return False, None
        if self._is_hybrid and (waited := self._waiting_reader(request)):
            self._metadata.cancelled.append((waited, self._no_layerwise))
        if not self._windows_complete(block_ids, tokens) or (self._has_states and not shortened):
            return False, None
        self._metadata.leases[name], self._metadata.written[name] = (list(block_ids), tokens), step
        host, port = self._ranks[0]
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
            "remote_host": host,
            "remote_port": port,
            "remote_ranks": [list(rank) for rank in self._ranks],
            "remote_num_tokens": tokens,
            "remote_prompt_digest": prompt_digest(request, tokens),
            "remote_lease": self._lease,
            # NIXL's keys, for routers that read them.
            "remote_block_ids": [list(each) for each in self._tables(block_ids)],
            "tp_size": self._tp_size,
            "remote_protocol": VERSION,
        }
        return True, self._trusted.sign(params)

    def _remote_tokens(self, request: Any) -> int | None:
        """Number of prompt tokens that a producer has for this request, as far as needed; None
        without a producer or with invalid parameters."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return None
        if self._metaserver and not params.keys() & {"metaserver", *REMOTE_PARAMS}:
            params["metaserver"] = self._metaserver
        wrong = _invalid_params(
            params, {"metaserver": str} if "metaserver" in params else REMOTE_PARAMS
        )
        if self._is_hybrid and "metaserver" in params:
            wrong = f"has metaserver: {self._no_layerwise}"
        if (version := params.get("remote_protocol", VERSION)) != VERSION:
            here = f"this instance's is {VERSION}: install the same ascend-kv-connector on both"
            wrong = f"is of protocol {printable(str(version))}, {here}"
        if not self._is_consumer:
            wrong = "needs kv_role kv_consumer or kv_both"
        is_new = request.request_id not in self._recognized
        wrong = (
            wrong or self._trusted.refusal(params, is_new) or self._other_prompt(request, params)
        )
        if not wrong and self._is_released(params):  # With n > 1, or a repeated request.
            extension.logger.debug(
                "request %s: its source has been released; its prompt is computed here",
                request.request_id,
            )
            self._stop_remote_prefill(request)
            self._waiting.pop(request.request_id, None)
            return None
        if wrong:
            extension.logger.warning(
                "request %s: do_remote_prefill %s; its prompt is computed here",
                request.request_id,
                wrong,
            )
            self._stop_remote_prefill(request)
            return None
        # The prompt's last token is computed here and needs a full window, which vLLM retains only
        # if that token is not loaded.
        most = request.num_prompt_tokens - self._is_hybrid
        return min(params.get("remote_num_tokens", most), most)

    def _is_released(self, params: dict[str, Any]) -> bool:
        return (
            "metaserver" not in params
            and f"{params['remote_engine_id']} {params['remote_request_id']}" in self._released
        )

    def _other_prompt(self, request: Any, params: dict[str, Any]) -> str:
        """Says so if the parameters' source is another prompt's, for example of the same list of
        prompts; "" otherwise."""
        if "metaserver" in params or request.request_id in self._recognized:
            return ""
        tokens = params["remote_num_tokens"]
        if tokens > request.num_prompt_tokens or params["remote_prompt_digest"] != prompt_digest(
            request, tokens
        ):
            return (
                f"is for another prompt, remote_request_id {printable(params['remote_request_id'])}"
            )
        self._recognized.add(request.request_id)
        return ""

    def _windows_complete(self, blocks: list[int], tokens: int) -> bool:
        """Whether the sliding windows still hold what a consumer needs to compute the last token.

        vLLM has freed blocks outside of the window of the next token, which is one more if the
        window starts a block there.
        """
        return all(
            not window
            or table[
                (tokens - 1 if window == LAST_STATE else max(0, tokens - window))
                // self._block_size
            ]
            for table, window in zip(self._tables(blocks), self._windows, strict=True)
        )

    def joined_tables(self, request: Any, tables: Sequence[Sequence[int]]) -> list[int]:
        """Block tables of the KV cache groups, for the computed tokens of a prompt."""
        return self._join_tables(tables, _prompt_tokens_computed(request))

    def _join_tables(self, tables: Sequence[Sequence[int]], tokens: int) -> list[int]:
        return join_tables(tables, self._windows, self._draft_blocks, tokens, self._block_size)

    def _tables(self, blocks: list[int]) -> list[Sequence[int]]:
        """Block tables of the KV cache groups."""
        return [
            group_block_table(blocks, group, len(self._windows))
            for group in range(len(self._windows))
        ]


NO_LAYERWISE_WINDOWS = (
    "layer-by-layer transfers do not support sliding windows; use --disable-hybrid-kv-cache-manager"
)

NO_LAYERWISE_STATES = (
    "layer-by-layer transfers do not support states of linear attention and state-space layers"
)

REMOTE_PARAMS = {
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_num_tokens": int,
    "remote_ranks": list,
    "remote_prompt_digest": str,
}
"""Parameters that a decode instance needs for a prompt with a remote prefill, and their types."""


def _invalid_params(params: dict[str, Any], forms: dict[str, type]) -> str:
    """Which of a router's parameters is missing or has the wrong type; "" if none."""
    for key, form in forms.items():
        if not isinstance(params.get(key), form):
            return (
                f"has {key} {printable(repr(params.get(key)))}, which is not from"
                " AscendP2PConnector"
            )
    if "remote_ranks" not in forms:
        return ""
    ranks = params["remote_ranks"]
    if not 0 < len(ranks) <= MAX_RANKS or not all(
        isinstance(rank, (list, tuple)) and list(map(type, rank)) == [str, int] for rank in ranks
    ):
        return f"has remote_ranks {printable(repr(ranks))}, which are not hosts and ports"
    return ""


def _prompt_tokens_computed(request: Any) -> int:
    return min(request.num_computed_tokens, request.num_prompt_tokens)


def _source(params: dict[str, Any]) -> Source:
    ranks = tuple((host, port) for host, port in params["remote_ranks"])
    return Source(params["remote_engine_id"], params["remote_request_id"], ranks)
