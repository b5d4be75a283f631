# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Scheduler side of a consumer: which prompts to load, from where, and which leases to renew."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from queue import SimpleQueue
from time import monotonic
from typing import Any

from ascend_platform import extension
from ascend_transfer.errors import printable

from ascend_kv_connector.config import Options
from ascend_kv_connector.p2p.bounded import BoundedDict
from ascend_kv_connector.p2p.params import TransferParams, end_remote_prefill
from ascend_kv_connector.p2p.protocol import MAX_NAME, VERSION
from ascend_kv_connector.p2p.scheduler.cache_groups import CacheGroups
from ascend_kv_connector.p2p.scheduler.metadata import Load, Outbox
from ascend_kv_connector.p2p.scheduler.metaserver import MetaserverClient, external_request_id
from ascend_kv_connector.p2p.scheduler.producer import OTHER_VERSION, prompt_digest, too_long
from ascend_kv_connector.p2p.transfers import Source
from ascend_kv_connector.p2p.trusted_addresses import TrustedAddresses
from ascend_kv_connector.versions import Versions


@dataclass(frozen=True)
class RemotePrompt:
    """The first ``tokens`` tokens of a request's prompt are loaded from ``source``, or from an
    instance that the router ``metaserver`` finds, if ``version`` is still that of the request."""

    source: Source | None
    metaserver: str | None
    tokens: int
    version: str


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


class ConsumerScheduler:
    """Requests whose prompts other instances have computed, or compute for this one."""

    def __init__(
        self,
        engine: str,
        groups: CacheGroups,
        roles: tuple[bool, bool],
        options: Options,
        trusted: TrustedAddresses,
        outbox: Outbox,
        versions: Versions,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """``roles``: whether the instance is a producer, and whether it is a consumer."""
        self.ranks: list[tuple[str, int]] = []
        self.engine, self._groups, self._trusted, self._outbox = engine, groups, trusted, outbox
        self._versions = versions
        is_producer, self._is_consumer = roles
        self._lease, self._clock = options.lease, clock
        # An instance of both roles may wait for blocks that it keeps for others, which wait for
        # blocks that they keep for it.
        self._most_waiting = options.transfer_timeout if is_producer else math.inf
        self.metaserver = (
            trusted.metaservers[0] if options.mode == "push" and trusted.metaservers else ""
        )
        self._prompts: dict[str, RemotePrompt] = {}
        self._waiting: dict[str, WaitingSource] = {}
        self._loading: dict[str, Source | None] = {}
        self._released: BoundedDict[None] = BoundedDict()
        self._failed_loads: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self.client = MetaserverClient(
            options.transfer_timeout,
            lambda request, cause: self._failed_loads.put((request, cause)),
        )

    def add(self, request: Any, params: TransferParams) -> None:
        """A request has arrived: its source's lease is renewed while it waits."""
        if not params.do_remote_prefill:
            return
        if self.metaserver and not params.names_source:
            params = replace(params, metaserver=self.metaserver, invalid_source="")
        if refusal := self._refusal(request, params):
            extension.logger.warning(
                "request %s: do_remote_prefill %s; its prompt is computed here",
                printable(request.request_id),
                refusal,
            )
            end_remote_prefill(request)
            if refusal == OTHER_VERSION:
                self._release_unused(params.source)
            return
        source = params.source
        if self._is_released(source):  # With n > 1, or a repeated request.
            self._decline(request)
            return
        # The prompt's last token is computed here and needs a full window, which vLLM retains only
        # if that token is not loaded.
        most = request.num_prompt_tokens - self._groups.is_hybrid
        tokens = most if params.remote_num_tokens is None else min(params.remote_num_tokens, most)
        self._prompts[request.request_id] = RemotePrompt(
            source, params.metaserver, tokens, self._versions.key(request)
        )
        if source is not None:
            lease = self._lease if params.remote_lease is None else params.remote_lease
            seconds, now = max(1.0, lease / 3), self._clock()
            self._waiting[request.request_id] = WaitingSource(
                source, seconds, now + seconds, now + self._most_waiting
            )

    def remote_tokens(self, request: Any) -> int:
        """Number of prompt tokens to load for a request that has not loaded them."""
        prompt = self._prompts.get(request.request_id)
        return 0 if prompt is None or self._is_unusable(request, prompt) else prompt.tokens

    def start_load(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load a prompt's last ``num_external_tokens`` into blocks that vLLM has allocated; once:
        after a preemption the prompt is computed here."""
        name = request.request_id
        prompt = self._prompts.pop(name, None)
        if prompt is None:
            return
        if self._is_unusable(request, prompt):
            self._decline(request)
            if not self._is_released(prompt.source):
                self._release_unused(prompt.source)
            return
        end_remote_prefill(request)
        if not num_external_tokens:
            self._waiting.pop(name, None)
            self._release_unused(prompt.source)
            return
        stop = prompt.tokens
        start, size = stop - num_external_tokens, self._groups.block_size
        columns = slice(start // size, -(-stop // size))
        tables = self._groups.split(self._groups.join(blocks.get_block_ids(), stop))
        wanted = [block for table in tables for block in table[columns]]
        self._outbox.metadata.loads[name] = Load(prompt.source, wanted, start, stop)
        self._loading[name] = prompt.source
        if prompt.metaserver is not None:
            message = self._prefill_params(request, start).to_dict()
            self.client.post(name, prompt.metaserver, message)

    def update(self) -> None:
        """Before each step: hand on failed posts, and renew or give up leases."""
        metadata = self._outbox.metadata
        while not self._failed_loads.empty():
            request, cause = self._failed_loads.get()
            metadata.failed_loads[request] = cause
        now = self._clock()
        for name, waiting in list(self._waiting.items()):
            if waiting.until <= now and name not in self._loading:
                extension.logger.warning(
                    "request %s: do_remote_prefill waited %g s for blocks, while this instance"
                    " keeps those of others (kv_both); its prompt is computed here",
                    printable(name),
                    self._most_waiting,
                )
                del self._waiting[name], self._prompts[name]
                self._release_unused(waiting.source)
            elif waiting.due <= now:
                waiting.due = now + waiting.seconds
                metadata.renewed.append(waiting.source)

    def finish_loads(self, requests: Iterable[str]) -> None:
        """Loads of these requests have ended in all ranks."""
        for name in requests:
            self._waiting.pop(name, None)
            self._release_unused(self._loading.pop(name, None))

    def finish(self, name: str) -> bool:
        """A request has ended; whether its prompt was neither loaded nor computed, for example
        because its client disconnected."""
        self._waiting.pop(name, None)
        prompt = self._prompts.pop(name, None)
        if prompt is not None and not self._is_released(prompt.source):
            self._release_unused(prompt.source)
            return True
        if name in self._loading:  # its client disconnected
            self._outbox.metadata.aborted.append(name)
            self._release_unused(self._loading.pop(name))
        return False

    def close(self) -> None:
        self.client.close()

    def _refusal(self, request: Any, params: TransferParams) -> str:
        """Why a prompt is not loaded; "" if it may be."""
        if not self._is_consumer:
            return "needs kv_role kv_consumer or kv_both"
        if (version := params.remote_protocol) not in (None, VERSION):
            here = f"this instance's is {VERSION}: install the same ascend-kv-connector on both"
            return f"is of protocol {printable(str(version))}, {here}"
        if len(request.request_id) > MAX_NAME:
            return too_long(request)
        if self._groups.is_hybrid and params.metaserver is not None:
            return f"has metaserver: {self._groups.no_layerwise}"
        return (
            params.invalid_source
            or self._trusted.refusal(params)
            or self._other_prompt(request, params)
        )

    def _decline(self, request: Any) -> None:
        extension.logger.debug(
            "request %s: its source has been released, or weights or its adapter were replaced; its"
            " prompt is computed here",
            printable(request.request_id),
        )
        end_remote_prefill(request)
        self._waiting.pop(request.request_id, None)

    def _is_unusable(self, request: Any, prompt: RemotePrompt) -> bool:
        """Whether a prompt that was not declined cannot be loaded any more."""
        return self._is_released(prompt.source) or prompt.version != self._versions.key(request)

    def _is_released(self, source: Source | None) -> bool:
        return source is not None and f"{source.engine} {source.request}" in self._released

    def _release_unused(self, source: Source | None) -> None:
        """Release a source's blocks unless another request loads them too, such as a sibling (``n``
        > 1) or a retry.

        Later requests with this source compute their prompt: most of it is in the prefix cache by
        then.
        """
        if source is not None and source not in self._loading.values():
            self._outbox.metadata.released.append(source)
            self._released[f"{source.engine} {source.request}"] = None

    def _prefill_params(self, request: Any, start: int) -> TransferParams:
        """For the prefill instance that the router finds."""
        host, port = self.ranks[0]
        params = TransferParams(
            request_id=external_request_id(request.request_id),
            do_remote_prefill=False,
            do_remote_decode=True,
            remote_engine_id=self.engine,
            remote_host=host,
            remote_port=port,
            remote_ranks=tuple(self.ranks),
            remote_reader=request.request_id,
            remote_cached_tokens=start,
            remote_prompt_digest=prompt_digest(request, request.num_prompt_tokens),
            remote_version=self._versions.key(request) or None,
        )
        return self._trusted.sign(params)

    def _other_prompt(self, request: Any, params: TransferParams) -> str:
        """An error if the parameters' source is of another prompt, for example in the same list of
        prompts, or was computed with other weights or another version of the adapter; ""
        otherwise."""
        # Of a request that vLLM has refused or failed, it hands on the parameters with a prompt of
        # one token, and aborts it at once: its end is to release the source.
        if params.metaserver is not None or getattr(request, "abort_immediately", False):
            return ""
        tokens = params.remote_num_tokens
        assert tokens is not None
        if tokens > request.num_prompt_tokens or params.remote_prompt_digest != prompt_digest(
            request, tokens
        ):
            return f"is for another prompt, remote_request_id {printable(str(params.remote_request_id))}"
        is_same = (params.remote_version or "") == self._versions.key(request)
        return "" if is_same else OTHER_VERSION
