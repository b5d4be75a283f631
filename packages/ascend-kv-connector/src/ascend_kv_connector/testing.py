"""A conformance suite for KV connectors: subclass :class:`ConnectorTests` in a test module, and pytest runs it.

    from ascend_kv_connector.testing import ConnectorTests

    class TestMine(ConnectorTests):
        transfer = {"kv_connector": "Mine", "kv_connector_module_path": "my.module", "kv_role": "kv_both"}

It has vLLM's scheduler with the connector in it, and a worker with the connector in it, but no model: the KV cache of a token is
made of the tokens up to it, and so is the next token. So each token of each block that a step uses can be compared, whichever way
it came there, on whatever device there is.
"""

from __future__ import annotations

import inspect
import json
import pickle
import random
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

LAYERS, HEADS, SIZE, BLOCK = 3, 2, 16, 16
WINDOW = 40
VOCABULARY = 997
PATIENCE = 30.0
"""Seconds after which a request that has not ended counts as hung."""

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": HEADS * SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": SIZE,
    "max_position_embeddings": 1024,
    "torch_dtype": "float32",
}


class Pages(NamedTuple):
    """A layer's keys and values, each ``[blocks, BLOCK, HEADS, SIZE]``, as ascend-platform hands them to connectors."""

    key: torch.Tensor
    value: torch.Tensor


def next_token(tokens: list[int]) -> int:
    """What the model without weights says after these."""
    return zlib.crc32(bytes(str(tokens), "ascii")) % VOCABULARY


def content(tokens: list[int], layer: int, part: int) -> torch.Tensor:
    """float32 ``[tokens]``: what is in the cache for each of them."""
    made, running = [], 1
    for token in tokens:
        running = (running * 31 + token + 7) % 65521
        made.append(running)
    return torch.tensor(made, dtype=torch.float32) + 100_000 * (2 * layer + part + 1)


class Engine:
    """vLLM's scheduler and a worker of one rank, each with the connector, and the model without weights.

    ``wrong`` has (request, token, layer) where the KV cache was not what it should be as a step used it.
    """

    def __init__(
        self,
        config: Any,
        blocks: int,
        make_caches: Callable[[int, int], list],
        parts: Callable[[Any], list],
        windowed: Sequence[int] = (),
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
            SlidingWindowSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        hashing = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self.hasher = get_request_block_hasher(BLOCK, hashing)
        shape = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": SIZE, "dtype": torch.float32}
        spec = FullAttentionSpec(**shape)
        self.layers = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
        size = blocks * spec.page_size_bytes
        tensors = _tensors(KVCacheTensor, self.layers, size, spec.page_size_bytes)
        self.group = {layer: int(number in windowed) for number, layer in enumerate(self.layers)}
        groups = [KVCacheGroupSpec([layer for layer in self.layers if not self.group[layer]], spec)]
        if windowed:
            back = SlidingWindowSpec(**shape, sliding_window=WINDOW)
            groups.append(KVCacheGroupSpec([layer for layer in self.layers if self.group[layer]], back))
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
        config.cache_config.num_gpu_blocks = blocks
        self.config, self.blocks, self.parts = config, blocks, parts
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), BLOCK, hash_block_size=BLOCK, log_stats=True)
        self.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        self.caches = dict(zip(self.layers, make_caches(LAYERS, blocks), strict=True))
        for name, held in self.caches.items():
            config.compilation_config.static_forward_context[name] = SimpleNamespace(kv_cache=held, layer_name=name)
        self.worker.register_kv_caches(self.caches)
        if (handshake := self.worker.get_handshake_metadata()) is not None:
            told = pickle.loads(pickle.dumps(handshake))
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): told})
        self.tables: dict[str, list[list[int]]] = {}
        self.wrong: list[tuple[str, int, str]] = []
        self.ended: dict[str, tuple[str, list[int], dict[str, Any] | None]] = {}
        self.loaded: dict[str, int] = {}

    def add(self, name: str, prompt: list[int], length: int, params: dict[str, Any] | None = None) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(
            max_tokens=length, ignore_eos=True, extra_args={"kv_transfer_params": params} if params else None
        )
        request = Request(name, list(prompt), sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        if name in self.scheduler.requests and name not in self.ended:
            self.ended[name] = "abort", [], None
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One step, as vLLM's engine core and its model runner do it (``vllm/v1/worker/kv_connector_model_runner_mixin.py``)."""
        from vllm.forward_context import get_forward_context, set_forward_context
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        out, worker = self.scheduler.schedule(), self.worker
        metadata = pickle.loads(pickle.dumps(out.kv_connector_metadata))  # it goes to other processes
        self._take_tables(out)
        described = {name: self._describe(out, self.group[name]) for name in self.layers} if out.num_scheduled_tokens else None
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
            given = KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_stats=worker.get_kv_connector_stats(),
                kv_cache_events=worker.get_kv_connector_kv_cache_events(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            given = pickle.loads(pickle.dumps(given))
            worker.clear_connector_metadata()
        names = list(out.num_scheduled_tokens)
        tokens = [sampled.get(name, []) for name in names]
        ran = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, tokens, kv_connector_output=given)
        for answers in self.scheduler.update_from_output(out, ran).values():
            for answer in answers.outputs:
                known = self.ended.get(answer.request_id, ("", [], None))
                reason = str(answer.finish_reason) if answer.finish_reason is not None else ""
                self.ended[answer.request_id] = reason, known[1] + list(answer.new_token_ids), answer.kv_transfer_params

    def run(self, while_running: Callable[[int], None] = lambda step: None) -> None:
        """Until all requests have ended and all blocks are free."""
        until, steps = monotonic() + PATIENCE, 0
        while self.scheduler.has_unfinished_requests() or self.held:
            assert monotonic() < until, f"after {PATIENCE} s {sorted(self.scheduler.requests)} are open, {self.held} blocks held"
            while_running(steps)
            self.step()
            steps += 1
            sleep(0.001)

    @property
    def held(self) -> int:
        """Blocks that are somebody's."""
        return self.blocks - 1 - self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.connector.shutdown()

    def _take_tables(self, out: Any) -> None:
        for new in out.scheduled_new_reqs:
            self.tables[new.req_id] = [list(table) for table in new.block_ids]
            self.loaded.setdefault(new.req_id, new.num_computed_tokens)
        old = out.scheduled_cached_reqs
        for name, blocks in zip(old.req_ids, old.new_block_ids, strict=True):
            more = [list(table) for table in blocks] if blocks else [[] for _ in self.tables[name]]
            resumed = name in old.resumed_req_ids
            self.tables[name] = more if resumed else [a + b for a, b in zip(self.tables[name], more, strict=True)]

    def _rows(self, name: str, group: int, start: int, stop: int) -> torch.Tensor:
        table = torch.tensor(self.tables[name][group], dtype=torch.int64)
        places = torch.arange(start, stop)
        return table[places // BLOCK] * BLOCK + places % BLOCK

    def _span(self, out: Any, name: str) -> tuple[int, int]:
        computed = {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}
        computed |= dict(zip(out.scheduled_cached_reqs.req_ids, out.scheduled_cached_reqs.num_computed_tokens, strict=True))
        return computed[name], computed[name] + out.num_scheduled_tokens[name]

    def _describe(self, out: Any, group: int) -> Any:
        """What connectors look at of an attention's metadata."""
        rows = [self._rows(name, group, *self._span(out, name)) for name in out.num_scheduled_tokens]
        return SimpleNamespace(slot_mapping=torch.cat(rows), num_actual_tokens=sum(out.num_scheduled_tokens.values()))

    def _forward(self, out: Any, described: Any) -> dict[str, list[int]]:
        """Write this step's tokens, layer by layer, look at all before them that they see, and say the next."""
        for number, layer in enumerate(self.layers if out.num_scheduled_tokens else ()):
            self.worker.wait_for_layer_load(layer)
            for name in out.num_scheduled_tokens:
                start, stop = self._span(out, name)
                seen = max(0, start + 1 - WINDOW) if self.group[layer] else 0
                known = list(self.scheduler.requests[name].all_token_ids)[:stop]
                rows = self._rows(name, self.group[layer], seen, stop)
                for part, cache in enumerate(self.parts(self.caches[layer])):
                    flat = cache.flatten(0, 1)
                    expected = content(known, number, part)[seen:].to(flat.device)
                    own = rows[start - seen :].to(flat.device)
                    flat[own] = expected[start - seen :, None, None].expand(-1, *flat.shape[1:])
                    same = (flat[rows.to(flat.device)] == expected[:, None, None]).flatten(1).all(1).cpu()
                    self.wrong += [(name, place, layer) for place in torch.nonzero(~same).flatten().tolist()[:1]]
            self.worker.save_kv_layer(layer, self.caches[layer], described[layer])
        sampled = {}
        for name in out.num_scheduled_tokens:
            known = list(self.scheduler.requests[name].all_token_ids)
            if self._span(out, name)[1] >= len(known):
                sampled[name] = [next_token(known)]
        return sampled


def _tensors(kind: Any, layers: list[str], size: int, page: int) -> list[Any]:
    """All layers in one allocation, one behind the other, as vLLM's KVCacheTensor says it (``vllm/v1/kv_cache_interface.py``)."""
    if "layer_stride" in inspect.signature(kind).parameters:
        return [kind(size=size * len(layers), layers=layers, layer_stride=size, block_stride=page)]
    return [kind(size=size, shared_by=[layer]) for layer in layers]


def expected_tokens(prompt: list[int], length: int) -> list[int]:
    known = list(prompt)
    for _ in range(length):
        known.append(next_token(known))
    return known[len(prompt) :]


def prompts(count: int, seed: int = 0, longest: int = 150) -> dict[str, list[int]]:
    """By name prompts of 1 to ``longest`` tokens, of which every third begins as others do."""
    draw = random.Random(seed)
    shared = [draw.randrange(VOCABULARY) for _ in range(longest)]
    out = {}
    for number in range(count):
        size = draw.choice([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 70, longest])
        own = [draw.randrange(VOCABULARY) for _ in range(size)]
        out[f"r{seed}-{number}"] = (shared[: size * 2 // 3] + own)[:size] if number % 3 == 2 else own
    return out


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """vLLM's process groups, of this process alone."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():  # another module of tests has imported this too
        yield
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


class ConnectorTests:
    """What every connector has to keep to. ``transfer`` is its ``--kv-transfer-config``.

    ``device`` is where the KV cache is. With ``paged`` a layer's is :class:`Pages`, as on Ascend NPUs, and otherwise one tensor
    ``[blocks, HEADS, BLOCK, 2 * SIZE]``, as vLLM makes it elsewhere. ``keeps`` says that it remembers KV cache when the device's
    own prefix cache has been reset. The layers numbered in ``windowed`` look back 40 tokens alone, and have a block table of
    their own.
    """

    transfer: ClassVar[dict[str, Any]] = {}
    device: str = "cpu"
    paged: bool = True
    keeps: bool = False
    windowed: Sequence[int] = ()

    def make_caches(self, layers: int, blocks: int) -> list[Any]:
        """Each layer's, all in one allocation, which layers follow each other in."""
        whole = torch.full((layers, blocks * BLOCK * HEADS * 2 * SIZE), -1.0, device=self.device)
        if self.paged:
            return [Pages(*layer.view(2, blocks, BLOCK, HEADS, SIZE)) for layer in whole]
        return [layer.view(blocks, BLOCK, HEADS, 2 * SIZE).transpose(1, 2) for layer in whole]

    def parts(self, cache: Any) -> list[torch.Tensor]:
        """A layer's keys and values, each ``[blocks, BLOCK, HEADS, SIZE]``, in the memory of the cache."""
        if self.paged:
            return [cache.key, cache.value]
        apart = cache.transpose(1, 2)
        return [apart[..., :SIZE], apart[..., SIZE:]]

    @pytest.fixture
    def engine(self, one_rank: None, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
        """A function that makes an engine; its arguments are of the connector's configuration, but for ``blocks``."""
        made = []

        def make(blocks: int = 200, **transfer: Any) -> Engine:
            made.append(Engine(self.config(self.transfer | transfer), blocks, self.make_caches, self.parts, self.windowed))
            return made[-1]

        yield make
        for each in made:
            each.close()
            each.close()  # it may be asked twice

    def config(self, transfer: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(MODEL))
            return EngineArgs(
                model=directory,
                skip_tokenizer_init=True,
                max_model_len=512,
                max_num_seqs=8,
                max_num_batched_tokens=64,
                block_size=BLOCK,
                enforce_eager=True,
                async_scheduling=False,
                dtype="float32",
                kv_transfer_config=json.loads(json.dumps(transfer)),
            ).create_engine_config()

    def check(self, engine: Engine, given: dict[str, list[int]], length: int, left: set[str] = frozenset()) -> None:
        assert engine.wrong == [], f"the KV cache differs, first at (request, token, layer) {engine.wrong[0]}"
        for name, prompt in given.items():
            reason, tokens, _ = engine.ended[name]
            if name not in left:
                assert (reason, tokens) == ("length", expected_tokens(prompt, length)), name
        assert engine.held == 0

    # What is tested

    def test_it_can_be_made_and_answers_as_it_is_asked(self, engine: Callable[..., Engine]) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

        kind = type(engine().worker)
        assert issubclass(kind, KVConnectorBase_V1)
        for base in (KVConnectorBase_V1, SupportsHMA) if issubclass(kind, SupportsHMA) else (KVConnectorBase_V1,):
            for name, asked in inspect.getmembers(base, inspect.isfunction):
                if name.startswith("_"):
                    continue
                wanted = [each for each in inspect.signature(asked).parameters.values() if each.name != "self"]
                try:
                    inspect.signature(getattr(kind, name)).bind(None, *([None] * sum(each.kind in (0, 1) for each in wanted)))
                except TypeError as error:
                    pytest.fail(f"{kind.__name__}.{name} cannot be called as vLLM does: {error}")

    def test_requests_end_with_the_right_tokens(self, engine: Callable[..., Engine]) -> None:
        made, given = engine(), prompts(24)
        for name, prompt in given.items():
            made.add(name, prompt, 5)
        made.run()
        self.check(made, given, 5)

    def test_prompts_that_come_again(self, engine: Callable[..., Engine]) -> None:
        made, given = engine(), prompts(8, 1, 200)
        for turn in range(3):
            for name, prompt in given.items():
                made.add(f"{name}-{turn}", prompt, 3)
            made.run()
            self.check(made, {f"{name}-{turn}": prompt for name, prompt in given.items()}, 3)
            assert made.scheduler.reset_prefix_cache()
        if self.keeps:
            long = [f"{name}-2" for name, prompt in given.items() if len(prompt) > 3 * BLOCK]
            assert long
            assert all(made.loaded[name] >= BLOCK for name in long), "nothing was kept"

    def test_requests_that_are_aborted(self, engine: Callable[..., Engine]) -> None:
        made, given, draw = engine(), prompts(24, 2), random.Random(2)
        when = {name: draw.randrange(12) for name in list(given)[::2]}
        for name, prompt in given.items():
            made.add(name, prompt, 5)

        def leave(step: int) -> None:
            for name in [name for name, at in when.items() if at == step]:
                made.abort(name)

        made.run(leave)
        self.check(made, given, 5, set(when))

    def test_requests_that_are_preempted(self, engine: Callable[..., Engine]) -> None:
        made, given = engine(blocks=30), prompts(12, 3)
        preempted = []
        schedule = made.scheduler.schedule

        def watch(*arguments: Any, **more: Any) -> Any:
            out = schedule(*arguments, **more)
            preempted.extend(out.preempted_req_ids or ())
            return out

        made.scheduler.schedule = watch
        for name, prompt in given.items():
            made.add(name, prompt, 40)
        made.run()
        assert preempted, "no request was preempted, so this has shown nothing"
        self.check(made, given, 40)

    def test_stats_can_be_added_up_and_sent(self, engine: Callable[..., Engine]) -> None:
        made = engine()
        kind = type(made.worker)
        if (stats := kind.build_kv_connector_stats()) is None:
            pytest.skip("it has no stats")
        stats = pickle.loads(pickle.dumps(stats))
        again = kind.build_kv_connector_stats(data=stats.data)
        assert again.aggregate(stats).is_empty()
        assert isinstance(again.reduce(), dict)


class HandoffTests(ConnectorTests):
    """Of connectors that hand a prompt from one instance to another by ``kv_transfer_params``.

    The first gets ``do_remote_decode``, the other what the first answers.
    ``prefill`` and ``decode`` are what each configuration has in addition to ``transfer``.
    """

    prefill: ClassVar[dict[str, Any]] = {"kv_role": "kv_producer"}
    decode: ClassVar[dict[str, Any]] = {"kv_role": "kv_consumer"}

    def hand_over(self, one: Engine, other: Engine, given: dict[str, list[int]], left: dict[str, int] | None = None) -> None:
        for name, prompt in given.items():
            one.add(name, prompt, 1, {"do_remote_decode": True})
        while one.scheduler.has_unfinished_requests():
            one.step()
        for name, prompt in given.items():
            reason, _, params = one.ended[name]
            assert reason == "length"
            assert params, "the prefill instance answers without kv_transfer_params"
            other.add(name, prompt, 5, json.loads(json.dumps(params)))  # it goes by a router

        def both(step: int) -> None:
            one.step()
            for name in [name for name, at in (left or {}).items() if at == step]:
                other.abort(name)

        other.run(both)
        one.run()

    def test_prompts_are_handed_over(self, engine: Callable[..., Engine]) -> None:
        one, other, given = engine(**self.prefill), engine(**self.decode), prompts(16, 4)
        self.hand_over(one, other, given)
        self.check(other, given, 5)
        assert one.wrong == []
        for name, prompt in given.items():
            assert other.loaded[name] >= len(prompt) - 1, f"{name} was computed anew"

    def test_readers_that_leave(self, engine: Callable[..., Engine]) -> None:
        one, other, given = engine(**self.prefill), engine(**self.decode), prompts(16, 5)
        left = {name: place % 4 for place, name in enumerate(list(given)[::2])}
        self.hand_over(one, other, given, left)
        self.check(other, given, 5, set(left))

    def test_parameters_of_somebody_else(self, engine: Callable[..., Engine]) -> None:
        other, given = engine(**self.decode), prompts(3, 6)
        for name, prompt in given.items():
            other.add(name, prompt, 5, {"do_remote_prefill": True, "remote_host": "nowhere"})
        other.run()
        assert other.wrong == []
        assert all(other.ended[name][0] in ("length", "error") for name in given)
        assert other.held == 0


__all__ = ["ConnectorTests", "Engine", "HandoffTests", "Pages", "one_rank"]
