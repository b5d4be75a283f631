"""The connector's part in vLLM's scheduler: which requests are read from elsewhere, and whose blocks are kept for others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ascend_platform import extension
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata
from vllm.v1.request import RequestStatus

from ascend_kv_connector.transfers import Source


@dataclass
class Endpoint(KVConnectorHandshakeMetadata):
    """Where a worker answers, which it tells the scheduler once."""

    host: str
    port: int


@dataclass
class Load:
    """Tokens ``start`` to ``stop`` are to come into ``blocks``, of which the first holds token ``start``."""

    source: Source
    blocks: list[int]
    start: int
    stop: int


@dataclass
class P2PMetadata(KVConnectorMetadata):
    """What one step's scheduling means for the workers: by request loads to start, blocks to keep with the tokens they hold,
    and sources whose blocks are not wanted."""

    loads: dict[str, Load] = field(default_factory=dict)
    leases: dict[str, tuple[list[int], int]] = field(default_factory=dict)
    declined: list[Source] = field(default_factory=list)


class P2PScheduler:
    """See the methods of the same names in ``vllm/distributed/kv_transfer/kv_connector/v1/base.py``.

    The keys of ``kv_transfer_params`` are vLLM's own connectors': a prefill instance gets ``do_remote_decode`` and answers with
    ``do_remote_prefill``, which a decode instance gets.
    """

    def __init__(self, engine: str, block_size: int, produces: bool, consumes: bool) -> None:
        self._engine, self._block_size, self._produces, self._consumes = engine, block_size, produces, consumes
        self._ranks: list[tuple[str, int]] = []
        self._next = P2PMetadata()

    def take_endpoints(self, endpoints: dict[tuple[int, int], Endpoint]) -> None:
        """Endpoints by (pipeline rank, tensor rank)."""
        self._ranks = [(endpoints[rank].host, endpoints[rank].port) for rank in sorted(endpoints)]

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tokens = self._remote_tokens(request) - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        stop = self._remote_tokens(request)
        if not stop:
            return
        source = _source(request.kv_transfer_params)
        request.kv_transfer_params["do_remote_prefill"] = False  # once: after a preemption it is computed here
        if not num_external_tokens:
            self._next.declined.append(source)
            return
        start = stop - num_external_tokens
        (table,) = blocks.get_block_ids()
        size = self._block_size
        self._next.loads[request.request_id] = Load(source, list(table[start // size : -(-stop // size)]), start, stop)

    def build_connector_meta(self) -> P2PMetadata:
        built, self._next = self._next, P2PMetadata()
        return built

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        if self._remote_tokens(request):  # it never got blocks here, for example because the client has left
            self._next.declined.append(_source(params))
            params["do_remote_prefill"] = False
            return False, None
        ended = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if not params.get("do_remote_decode") or not ended or not block_ids:
            return False, None
        if not self._produces:
            extension.logger.warning(
                "request %s: do_remote_decode needs kv_role kv_producer or kv_both; its blocks are not kept", request.request_id
            )
            return False, None
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        self._next.leases[request.request_id] = (list(block_ids), tokens)
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

    def _remote_tokens(self, request: Any) -> int:
        """How many of the prompt's tokens another instance has computed for this request; 0 if none, or if it is told wrongly."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0
        wrong = _wrong(params)
        if not self._consumes:
            wrong = "needs kv_role kv_consumer or kv_both"
        if wrong:
            extension.logger.warning("request %s: do_remote_prefill %s; its prompt is computed here", request.request_id, wrong)
            params["do_remote_prefill"] = False
            return 0
        return min(params["remote_num_tokens"], request.num_prompt_tokens)


def _wrong(params: dict[str, Any]) -> str:
    """What is missing from a router's parameters, or is not of its form; "" if nothing."""
    forms = {"remote_engine_id": str, "remote_request_id": str, "remote_num_tokens": int, "remote_ranks": list}
    for key, form in forms.items():
        if not isinstance(params.get(key), form):
            return f"comes with {key} {params.get(key)!r}, which is not what AscendP2PConnector answers with"
    ranks = params["remote_ranks"]
    if not ranks or not all(isinstance(rank, (list, tuple)) and list(map(type, rank)) == [str, int] for rank in ranks):
        return f"comes with remote_ranks {ranks!r}, which are no hosts and ports"
    return ""


def _source(params: dict[str, Any]) -> Source:
    ranks = tuple((host, port) for host, port in params["remote_ranks"])
    return Source(params["remote_engine_id"], params["remote_request_id"], ranks)
