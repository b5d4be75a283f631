# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Engine of the conformance suite: vLLM's scheduler and a worker with a KV connector, without a
model."""

from __future__ import annotations

import inspect
import pickle
import zlib
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

LAYERS, HEADS, SIZE, BLOCK = 3, 2, 16, 16
WINDOW = 40
VOCABULARY = 997
PATIENCE = 30.0
"""Seconds after which a request that has not ended counts as hung."""


class Pages(NamedTuple):
    """A layer's keys and values, each ``[blocks, BLOCK, HEADS, SIZE]``, as ascend-platform passes
    them to connectors."""

    key: torch.Tensor
    value: torch.Tensor


class Latents(NamedTuple):
    """A layer's latents and rotated keys, ``[blocks, BLOCK, 1, 40 and 24]``: multi-head latent
    attention."""

    latent: torch.Tensor
    rope: torch.Tensor


class Index(NamedTuple):
    """Keys of an indexer, ``[blocks, BLOCK, 1, 64]``: sparse latent attention keeps them in a
    separate layer."""

    index: torch.Tensor  # type: ignore[assignment]  # tuple.index is not used


def next_token(tokens: list[int]) -> int:
    """The next token that the modelless engine generates."""
    return zlib.crc32(bytes(str(tokens), "ascii")) % VOCABULARY


def content(tokens: list[int], layer: int, part: int, version: int = 0) -> torch.Tensor:
    """float32 ``[tokens]``: expected KV cache value of each token with one of twenty versions of
    the weights."""
    values, running = [], 1
    for token in tokens:
        running = (running * 31 + token + 7) % 65521
        values.append(running)
    offset = 100_000 * (2 * layer + part + 1 + 7 * version)
    return torch.tensor(values, dtype=torch.float32) + offset


class Engine:
    """vLLM's scheduler and a worker of one rank, each with the connector, without a model.

    ``wrong`` has (request, token, layer) where a step found an unexpected KV cache value.
    ``version`` is the version of the weights that a request is computed with now.
    """

    def __init__(
        self,
        config: Any,
        blocks: int,
        make_caches: Callable[[int, int], list],
        parts: Callable[[Any], list],
        windowed: Sequence[int] = (),
        latent: bool = False,
    ) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
            MLAAttentionSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        hashing = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self.hasher = get_request_block_hasher(BLOCK, hashing)
        shape: dict[str, Any] = {
            "block_size": BLOCK,
            "num_kv_heads": HEADS,
            "head_size": SIZE,
            "dtype": torch.float32,
        }
        spec = FullAttentionSpec(**shape)
        if latent:
            spec = MLAAttentionSpec(**shape | {"num_kv_heads": 1, "head_size": 2 * HEADS * SIZE})
        self.layers = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
        size = blocks * spec.page_size_bytes
        tensors = _tensors(KVCacheTensor, self.layers, size, spec.page_size_bytes)
        self.group = {layer: int(number in windowed) for number, layer in enumerate(self.layers)}
        groups = [KVCacheGroupSpec([layer for layer in self.layers if not self.group[layer]], spec)]
        if windowed:
            back = SlidingWindowSpec(**shape, sliding_window=WINDOW)
            groups.append(
                KVCacheGroupSpec([layer for layer in self.layers if self.group[layer]], back)
            )
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
        config.cache_config.num_gpu_blocks = blocks
        self.config, self.blocks, self.parts = config, blocks, parts
        self.scheduler = Scheduler(
            config,
            cache,
            StructuredOutputManager(config),
            BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        self.caches = dict(zip(self.layers, make_caches(LAYERS, blocks), strict=True))
        for name, held in self.caches.items():
            config.compilation_config.static_forward_context[name] = SimpleNamespace(
                kv_cache=held, layer_name=name
            )
        self.worker.register_kv_caches(self.caches)
        if (handshake := self.worker.get_handshake_metadata()) is not None:
            metadata = pickle.loads(pickle.dumps(handshake))
            assert self.scheduler.connector is not None
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        self.tables: dict[str, list[list[int]]] = {}
        self.wrong: list[tuple[str, int, str]] = []
        self.ended: dict[str, tuple[str, list[int], dict[str, Any] | None]] = {}
        self.loaded: dict[str, int] = {}
        self.version: Callable[[Any], int] = lambda request: 0

    def add(
        self,
        name: str,
        prompt: list[int],
        length: int,
        params: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        """Add a request; ``more`` are arguments of vLLM's Request."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(
            max_tokens=length,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher, **more)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        if name in self.scheduler.requests and not self.ended.get(name, ("",))[0]:
            self.ended[name] = "abort", [], None
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One step, as in vLLM's engine core and model runner
        (``vllm/v1/worker/kv_connector_model_runner_mixin.py``)."""
        from vllm.forward_context import get_forward_context, set_forward_context
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        out, worker = self.scheduler.schedule(), self.worker
        # serialized as between processes
        metadata = pickle.loads(pickle.dumps(out.kv_connector_metadata))
        self._take_tables(out)
        described = (
            {name: self._describe(out, self.group[name]) for name in self.layers}
            if out.num_scheduled_tokens
            else None
        )
        with set_forward_context(described, self.config):
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
            before = getattr(out, "has_sync_kv_loads", True)
            if before:
                worker.start_load_kv(get_forward_context())
            sampled = self._forward(out, described)
            if not before:
                worker.start_load_kv(get_forward_context())
            worker.wait_for_save()
            results = worker.get_transfer_results(out.finished_req_ids)
            transferred = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_stats=worker.get_kv_connector_stats(),
                kv_cache_events=worker.get_kv_connector_kv_cache_events(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            transferred = pickle.loads(pickle.dumps(transferred))
            worker.clear_connector_metadata()
        names = list(out.num_scheduled_tokens)
        tokens = [sampled.get(name, []) for name in names]
        ran = ModelRunnerOutput(
            names,
            {name: index for index, name in enumerate(names)},
            tokens,
            kv_connector_output=transferred,
        )
        for answers in self.scheduler.update_from_output(out, ran).values():
            for answer in answers.outputs:
                known = self.ended.get(answer.request_id, ("", [], None))
                reason = str(answer.finish_reason) if answer.finish_reason is not None else ""
                self.ended[answer.request_id] = (
                    reason,
                    known[1] + list(answer.new_token_ids),
                    answer.kv_transfer_params,
                )

    def run(self, while_running: Callable[[int], None] = lambda step: None) -> None:
        """Step until all requests have ended and all blocks are free."""
        until, steps = monotonic() + PATIENCE, 0
        while self.scheduler.has_unfinished_requests() or self.held:
            assert monotonic() < until, (
                f"after {PATIENCE} s {sorted(self.scheduler.requests)} are unfinished, {self.held}"
                " blocks in use"
            )
            while_running(steps)
            self.step()
            steps += 1
            sleep(0.001)

    @property
    def held(self) -> int:
        """Number of allocated blocks."""
        return self.blocks - 1 - self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self) -> None:
        self.worker.shutdown()
        assert self.scheduler.connector is not None
        self.scheduler.connector.shutdown()

    def _take_tables(self, out: Any) -> None:
        for new in out.scheduled_new_reqs:
            self.tables[new.req_id] = [list(table) for table in new.block_ids]
            self.loaded.setdefault(new.req_id, new.num_computed_tokens)
        old = out.scheduled_cached_reqs
        for name, blocks in zip(old.req_ids, old.new_block_ids, strict=True):
            more = [list(table) for table in blocks] if blocks else [[] for _ in self.tables[name]]
            resumed = name in old.resumed_req_ids
            self.tables[name] = (
                more if resumed else [a + b for a, b in zip(self.tables[name], more, strict=True)]
            )

    def _rows(self, name: str, group: int, start: int, stop: int) -> torch.Tensor:
        table = torch.tensor(self.tables[name][group], dtype=torch.int64)
        positions = torch.arange(start, stop)
        return table[positions // BLOCK] * BLOCK + positions % BLOCK

    def _span(self, out: Any, name: str) -> tuple[int, int]:
        computed = {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}
        computed |= dict(
            zip(
                out.scheduled_cached_reqs.req_ids,
                out.scheduled_cached_reqs.num_computed_tokens,
                strict=True,
            )
        )
        return computed[name], computed[name] + out.num_scheduled_tokens[name]

    def _describe(self, out: Any, group: int) -> Any:
        """Attention metadata as connectors use it."""
        rows = [
            self._rows(name, group, *self._span(out, name)) for name in out.num_scheduled_tokens
        ]
        return SimpleNamespace(
            slot_mapping=torch.cat(rows), num_actual_tokens=sum(out.num_scheduled_tokens.values())
        )

    def _forward(self, out: Any, described: Any) -> dict[str, list[int]]:
        """Write this step's tokens layer by layer, check all visible tokens before them, and return
        the next tokens."""
        for number, layer in enumerate(self.layers if out.num_scheduled_tokens else ()):
            self.worker.wait_for_layer_load(layer)
            for name in out.num_scheduled_tokens:
                start, stop = self._span(out, name)
                seen = max(0, start + 1 - WINDOW) if self.group[layer] else 0
                request = self.scheduler.requests[name]
                known, version = list(request.all_token_ids)[:stop], self.version(request)
                rows = self._rows(name, self.group[layer], seen, stop)
                for part, cache in enumerate(self.parts(self.caches[layer])):
                    flat = cache.flatten(0, 1)
                    expected = content(known, number, part, version)[seen:].to(flat.device)
                    new_rows = rows[start - seen :].to(flat.device)
                    flat[new_rows] = expected[start - seen :, None, None].expand(
                        -1, *flat.shape[1:]
                    )
                    same = (
                        (flat[rows.to(flat.device)] == expected[:, None, None])
                        .flatten(1)
                        .all(1)
                        .cpu()
                    )
                    self.wrong += [
                        (name, place, layer)
                        for place in torch.nonzero(~same).flatten().tolist()[:1]
                    ]
            self.worker.save_kv_layer(layer, self.caches[layer], described[layer])
        sampled = {}
        for name in out.num_scheduled_tokens:
            known = list(self.scheduler.requests[name].all_token_ids)
            if self._span(out, name)[1] >= len(known):
                sampled[name] = [next_token(known)]
        return sampled


def _tensors(kind: Any, layers: list[str], size: int, page: int) -> list[Any]:
    """All layers in one allocation, consecutively, as vLLM's KVCacheTensor describes it
    (``vllm/v1/kv_cache_interface.py``)."""
    if "layer_stride" in inspect.signature(kind).parameters:
        return [kind(size=size * len(layers), layers=layers, layer_stride=size, block_stride=page)]
    return [kind(size=size, shared_by=[layer]) for layer in layers]


def expected_tokens(prompt: list[int], length: int) -> list[int]:
    known = list(prompt)
    for _ in range(length):
        known.append(next_token(known))
    return known[len(prompt) :]
