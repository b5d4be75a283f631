# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Scheduler side of a producer: whose blocks to keep for consumers."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy
import torch
from ascend_platform import extension
from ascend_transfer.errors import printable
from vllm.v1.request import RequestStatus

from ascend_kv_connector.config import Options
from ascend_kv_connector.p2p.params import TransferParams
from ascend_kv_connector.p2p.protocol import MAX_NAME, VERSION
from ascend_kv_connector.p2p.scheduler.cache_groups import CacheGroups
from ascend_kv_connector.p2p.scheduler.layerwise import LayerwisePrefills
from ascend_kv_connector.p2p.scheduler.metadata import LayerwisePrefill, Outbox
from ascend_kv_connector.p2p.states import leave_last_token
from ascend_kv_connector.p2p.trusted_addresses import TrustedAddresses
from ascend_kv_connector.versions import Versions

COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
"""Status of a request whose prompt is computed."""


REPLACED = "weights or its adapter were replaced while it was computed"

OTHER_VERSION = (
    "has other weights or another version of the adapter than this instance: one of the two has"
    " replaced them while it was running, or loaded other files"
)


def prompt_digest(request: Any, tokens: int) -> str:
    """Digest of all inputs that determine the KV cache of a vLLM request's first ``tokens`` prompt
    tokens, except the model and :class:`~ascend_kv_connector.versions.Versions`.

    These are token ids, multimodal inputs, prompt embeddings, the LoRA adapter's name and the
    client's ``cache_salt``, as in vLLM's block hashes (``vllm/v1/core/kv_cache_utils.py``,
    ``generate_block_hash_extra_keys``).
    """
    lora = request.lora_request
    inputs = [
        (each.mm_position.offset, each.mm_position.length, each.identifier)
        for each in request.mm_features
    ]
    inputs = [each for each in inputs if each[0] < tokens]
    keys = [
        tokens,
        lora.lora_name if lora else None,
        request.cache_salt,
        inputs,
        (request.prompt_is_token_ids or [])[:tokens],
    ]
    digest = hashlib.sha256(json.dumps(keys).encode())
    if request.prompt_token_ids is not None:
        digest.update(numpy.asarray(request.prompt_token_ids[:tokens], dtype="<i8").tobytes())
    if request.prompt_embeds is not None:
        digest.update(
            request.prompt_embeds[:tokens].contiguous().view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()[:32]


class ProducerScheduler:
    """Prompts that are computed for other instances."""

    def __init__(
        self,
        engine: str,
        groups: CacheGroups,
        is_producer: bool,
        options: Options,
        trusted: TrustedAddresses,
        outbox: Outbox,
        versions: Versions,
        tp_size: int = 1,
    ) -> None:
        self.ranks: list[tuple[str, int]] = []
        self.engine, self._groups, self._is_producer = engine, groups, is_producer
        self._lease, self._trusted, self._outbox = options.lease, trusted, outbox
        self._versions, self._tp_size = versions, tp_size
        # The number of tokens, and the step that computed the last ones.
        self._prompts: dict[str, tuple[int, int]] = {}
        # With states: prompts whose last token is left to the consumer.
        self._shortened: set[str] = set()
        self._layerwise = LayerwisePrefills()
        # Requests of these prefills, and the versions that their consumers have.
        self._requests: dict[str, tuple[Any, str]] = {}
        self._steps = 0

    def add(self, request: Any, params: TransferParams) -> None:
        """A request has arrived: sources that a router has aborted are freed."""
        if not self._is_producer:
            return
        self._outbox.metadata.unwanted += params.aborted_request or ()
        if params.do_remote_decode and self._groups.has_states and leave_last_token(request):
            self._shortened.add(request.request_id)

    def track(self, request: Any, params: TransferParams) -> None:
        """Track a prompt that a consumer waits for, when its prefill starts or restarts."""
        name = request.request_id
        if self._is_producer and params.do_remote_decode:
            self._prompts.setdefault(name, (request.num_prompt_tokens, 0))
        if (
            not self._groups.is_hybrid
            and name not in self._layerwise
            and (prefill := self._waiting_reader(request, params))
        ):
            self._layerwise[name] = prefill
            self._requests[name] = request, self._versions.key(request)

    def update(self, scheduled: Any) -> None:
        """Record which prompts for consumers a step computes."""
        self._steps += 1
        metadata = self._outbox.metadata
        if self._prompts:
            computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
            old = scheduled.scheduled_cached_reqs
            computed |= dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
            for name in self._prompts.keys() & computed.keys():
                total, _ = self._prompts[name]
                if computed[name] < total:
                    self._prompts[name] = total, self._steps
                    metadata.step = self._steps
        for name, (request, version) in list(self._requests.items()):
            if version != self._versions.key(request) or not self._versions.is_current(request):
                prefill = self._layerwise.pop(name)
                metadata.revoked[name] = REPLACED
                if not prefill.announced:
                    metadata.cancelled.append((prefill, REPLACED))
                del self._requests[name]
        self._layerwise.record(scheduled, metadata)

    def forget(self, name: str) -> int:
        """A request has ended; the step that computed its last tokens, 0 if none did."""
        self._shortened.discard(name)
        self._requests.pop(name, None)
        return self._prompts.pop(name, (0, 0))[1]

    def finish(
        self, request: Any, params: TransferParams, blocks: list[int]
    ) -> TransferParams | None:
        """A request has ended; the consumer's parameters if its ``blocks`` are kept."""
        name, tokens, metadata = request.request_id, computed_tokens(request), self._outbox.metadata
        shortened, step = name in self._shortened, self.forget(name)
        prefill = self._layerwise.pop(name, None)
        if not (params.do_remote_decode and request.status in COMPLETE and blocks):
            reason = f"the request ended before its prefill ({request.status.name})"
            self._cancel(request, params, prefill, reason)
            return None
        if not self._versions.is_current(request):
            extension.logger.info(
                "request %s: %s; its blocks are not kept", printable(name), REPLACED
            )
            self._cancel(request, params, prefill, REPLACED)
            return None
        if not self._is_producer:
            extension.logger.warning(
                "request %s: do_remote_decode needs kv_role kv_producer or kv_both; its blocks are"
                " not kept",
                printable(name),
            )
            return None
        if len(name) > MAX_NAME:
            self._warn(request, too_long(request))
            return None
        if self._groups.is_hybrid and (waited := self._waiting_reader(request, params)):
            metadata.cancelled.append((waited, self._groups.no_layerwise))
        if not self._groups.windows_complete(blocks, tokens) or (
            self._groups.has_states and not shortened
        ):
            return None
        metadata.leases[name], metadata.written[name] = (list(blocks), tokens), step
        return self._source_params(request, blocks, tokens)

    def _cancel(
        self, request: Any, params: TransferParams, prefill: LayerwisePrefill | None, reason: str
    ) -> None:
        """Tell a waiting consumer that a prompt will not be computed."""
        if prefill is not None:
            self._outbox.metadata.revoked[request.request_id] = reason
        waited = prefill or self._waiting_reader(request, params)
        if waited and not waited.announced:
            self._outbox.metadata.cancelled.append((waited, reason))

    def _source_params(self, request: Any, blocks: list[int], tokens: int) -> TransferParams:
        host, port = self.ranks[0]
        params = TransferParams(
            do_remote_prefill=True,
            do_remote_decode=False,
            remote_engine_id=self.engine,
            remote_request_id=request.request_id,
            remote_host=host,
            remote_port=port,
            remote_ranks=tuple(self.ranks),
            remote_num_tokens=tokens,
            remote_prompt_digest=prompt_digest(request, tokens),
            remote_version=self._versions.key(request) or None,
            remote_lease=self._lease,
            # NIXL's keys, for routers that read them.
            remote_block_ids=[list(table) for table in self._groups.split(blocks)],
            tp_size=self._tp_size,
            remote_protocol=VERSION,
        )
        return self._trusted.sign(params)

    def _waiting_reader(self, request: Any, params: TransferParams) -> LayerwisePrefill | None:
        """The prefill that a consumer waits for; None if no consumer waits."""
        reader = params.remote_reader
        if not (self._is_producer and params.do_remote_decode) or (
            reader is None and not params.invalid_reader
        ):
            return None
        tokens, wrong = request.num_prompt_tokens, params.invalid_reader
        if not wrong and params.remote_prompt_digest != prompt_digest(request, tokens):
            wrong = f"is for another prompt, of remote_reader {printable(str(reader))}"
        if wrong := wrong or self._trusted.ranks_refusal(params):
            self._warn(request, wrong)
            return None
        assert reader is not None
        prefill = LayerwisePrefill(reader, params.remote_ranks or (), tokens)
        if len(request.request_id) > MAX_NAME:
            wrong = too_long(request)
        elif (params.remote_version or "") != self._versions.key(request):
            wrong = OTHER_VERSION
        else:
            return prefill
        self._warn(request, wrong)
        self._outbox.metadata.cancelled.append((prefill, f"its request {wrong}"))
        return None

    def _warn(self, request: Any, wrong: str) -> None:
        extension.logger.warning(
            "request %s: do_remote_decode %s; its blocks are not sent",
            printable(request.request_id),
            wrong,
        )


def too_long(request: Any) -> str:
    """Refusal of a request whose id no message can have."""
    return f"has a request id of {len(request.request_id)} characters; the most is {MAX_NAME}"


def computed_tokens(request: Any) -> int:
    """Number of a prompt's tokens that are computed."""
    return min(request.num_computed_tokens, request.num_prompt_tokens)
