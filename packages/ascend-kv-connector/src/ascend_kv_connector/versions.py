# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Versions of the weights and adapters that a request's KV cache is computed with, in the
scheduler's process.

vLLM's block hashes contain the name and path of an adapter, and nothing of weights. Both stay the
same when the contents are replaced in a running engine. A version is therefore part of the first
block's hash, as a ``cache_salt`` is, and with it of the prefix cache, of host memory, and of the
names of chunks in a pool. Prompts that are handed to another instance carry it in their
``kv_transfer_params``.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ascend_platform import extension
from ascend_transfer.checkpoint import adapter_files, adapter_fingerprint
from vllm.v1.request import RequestStatus

Files = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Adapter:
    """Adapter of an id as it was loaded last: its path, the state of its files, and a version of
    their contents."""

    path: str
    files: Files
    version: str


@dataclass
class Computed:
    """Versions that a request's KV cache is computed with. ``hasher`` is vLLM's hash function of its blocks.
    ``stale``: a part was computed with weights or adapters that have been replaced since."""

    weights: str
    adapter: Adapter | None
    hasher: Any
    stale: bool = False

    @property
    def salt(self) -> str:
        """Part of the hash of the request's first block; "" for vLLM's own hash."""
        adapter = f"adapter {self.adapter.version}" if self.adapter else ""
        return " ".join(filter(None, (self.weights, adapter)))


class Versions:
    """Versions of one engine, which its connectors share (:func:`of_engine`).

    ``weights`` is "" as long as weights are those of the checkpoint, then a name that no other
    engine has, another one for each replacement.
    """

    def __init__(self) -> None:
        self.weights, self._has_replaced = "", False
        self._requests: weakref.WeakKeyDictionary[Any, Computed] = weakref.WeakKeyDictionary()
        self._adapters: dict[int, Adapter] = {}

    # Called by connectors.

    def on_new_request(self, request: Any) -> None:
        """A request has arrived: its blocks are hashed with its versions."""
        if request not in self._requests:  # otherwise another connector was first
            adapter = self._of_adapter(request.lora_request)
            self._set(request, Computed(self.weights, adapter, request._block_hasher))

    def key(self, request: Any) -> str:
        """Versions of a request, equal in two instances whose weights and adapter are; "" for the
        checkpoint's weights. They change only before it starts."""
        return self._requests[request].salt

    def is_current(self, request: Any) -> bool:
        """Whether all of a request's KV cache is computed with its versions, and may be shared."""
        return not any(True for _ in self.stale([request]))

    def stale(self, requests: Iterable[Any]) -> Iterator[Any]:
        """The requests whose KV cache may not be shared."""
        files: dict[str, Files] = {}
        for request in requests:
            if (known := self._requests.get(request)) is None:
                continue
            if (adapter := known.adapter) and not known.stale:
                # The workers load it again when they have dropped it, or for load_inplace.
                now = files.setdefault(adapter.path, _files(adapter.path))
                known.stale = now != adapter.files
            if known.stale:
                yield request

    # Called by ascend-platform (Listener).

    def weights_replaced(self) -> None:
        self.weights = f"weights {secrets.token_hex(16)}"
        self._adapters.clear()  # vLLM's workers load them again.
        self._renew(lambda request: True)
        # Once: trainers send weights in parts, for each step.
        log = extension.logger.debug if self._has_replaced else extension.logger.info
        self._has_replaced = True
        log(
            "weights may have been replaced: KV cache that was computed before is not used any"
            " more, and other instances do not get what is computed from now on"
        )

    def loading_adapter(self, lora_request: Any) -> Callable[[], None]:
        before = _files(lora_request.lora_path)

        def loaded() -> None:
            self._note(lora_request, before)

        return loaded

    # Internal

    def _of_adapter(self, lora_request: Any) -> Adapter | None:
        if lora_request is None:
            return None
        files = _files(lora_request.lora_path)
        known = self._adapters.get(lora_request.lora_int_id)
        if known is None or _is_loaded_again(known, files, lora_request.load_inplace):
            known = self._note(lora_request, files)
        if (known.path, known.files) == (lora_request.lora_path, files):
            return known
        # The workers may have the files of before, or these: no two requests share anything.
        return Adapter(lora_request.lora_path, files, secrets.token_hex(16))

    def _note(self, lora_request: Any, before: Files) -> Adapter:
        """An adapter was, or is going to be, loaded from its files, whose state was ``before``."""
        path, number = lora_request.lora_path, lora_request.lora_int_id
        version = _fingerprint(path) if before else ""
        if not version or _files(path) != before:  # Not known, or changed meanwhile.
            version = secrets.token_hex(16)
        earlier = self._adapters.get(number)
        self._adapters[number] = noted = Adapter(path, before, version)
        if earlier is not None and earlier.version != version:
            self._renew(
                lambda request: request.lora_request and request.lora_request.lora_int_id == number
            )
        return noted

    def _renew(self, concerned: Callable[[Any], Any]) -> None:
        """Give the requests concerned that have not started the versions of now; the others may
        not be shared any more."""
        for request, known in list(self._requests.items()):
            if not concerned(request):
                continue
            known.stale = True
            if request.num_computed_tokens == 0 and request.status in NOT_STARTED:
                adapter = self._of_adapter(request.lora_request)
                self._set(request, Computed(self.weights, adapter, known.hasher))

    def _set(self, request: Any, computed: Computed) -> None:
        before = self._requests.get(request)
        self._requests[request] = computed
        if computed.hasher is None or computed.salt == (before.salt if before else ""):
            return
        request._block_hasher = partial(_hash_with, computed.salt, computed.hasher)
        request.block_hashes.clear()
        request.update_block_hashes()


NOT_STARTED = (
    RequestStatus.WAITING,
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
    RequestStatus.PREEMPTED,
)


def _hash_with(salt: str, hasher: Callable[[Any], Any], request: Any) -> Any:
    """vLLM's hashes of a request's new blocks, with a part for :class:`Versions`; the request's own
    ``cache_salt`` is what routers see."""
    own = request.cache_salt
    # No client's salt is equal to it, which is a string.
    request.cache_salt = own, salt
    try:
        return hasher(request)
    finally:
        request.cache_salt = own


def _is_loaded_again(known: Adapter, files: Files, in_place: bool) -> bool:
    """Whether the workers load an adapter for a request, or have downloaded it since."""
    if not known.files:
        return in_place or bool(files)
    return in_place and known.files != files


def _files(path: str) -> Files:
    try:
        return adapter_files(path)
    except OSError:  # They are being replaced.
        return ()


def _fingerprint(path: str) -> str:
    try:
        return adapter_fingerprint(path)
    except OSError:
        return ""


def of_engine(vllm_config: Any) -> Versions:
    """Versions of the engine with this VllmConfig or a copy; the caller keeps them.

    Raises:
        RefusedError: vLLM's engine core is not one that is supported.
    """
    known = (
        each for each in extension.replacement_listeners(vllm_config) if isinstance(each, Versions)
    )
    if (versions := next(known, None)) is None:
        extension.listen_for_replacements(vllm_config, versions := Versions())
    return versions
