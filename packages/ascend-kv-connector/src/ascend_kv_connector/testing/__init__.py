# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Conformance suite for KV connectors. Subclass :class:`ConnectorTests` in a test module, and pytest
runs it.

    from ascend_kv_connector.testing import ConnectorTests

    class TestMine(ConnectorTests):
        transfer = dict(kv_connector="Mine", kv_connector_module_path="my.module", kv_role="kv_both")

It runs vLLM's scheduler and a worker, each with the connector, but no model: the KV cache of a
token, and the next token, are functions of the tokens up to it. Thus every token of every block
that a step uses can be checked, however it was loaded, on any device.
"""

from __future__ import annotations

import functools
import inspect
import json
import pickle
import random
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ascend_kv_connector.testing.engine import (
    BLOCK,
    HEADS,
    LAYERS,
    SIZE,
    VOCABULARY,
    Engine,
    Index,
    Latents,
    Pages,
    expected_tokens,
)

MODEL: dict[str, Any] = {
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
LATENT: dict[str, Any] = MODEL | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 24,
    "qk_nope_head_dim": SIZE,
    "v_head_dim": SIZE,
    "q_lora_rank": None,
    "first_k_dense_replace": LAYERS,
}


@functools.cache
def _model_directory(latent: bool) -> tempfile.TemporaryDirectory[str]:
    """Directory of the model of all engines: connectors compare its name."""
    directory = tempfile.TemporaryDirectory()
    Path(directory.name, "config.json").write_text(json.dumps(LATENT if latent else MODEL))
    return directory


def prompts(count: int, seed: int = 0, longest: int = 150) -> dict[str, list[int]]:
    """Prompts of 1 to ``longest`` tokens by name; every third starts with a shared prefix."""
    draw = random.Random(seed)
    shared = [draw.randrange(VOCABULARY) for _ in range(longest)]
    out = {}
    for number in range(count):
        size = draw.choice([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 70, longest])
        unique = [draw.randrange(VOCABULARY) for _ in range(size)]
        out[f"r{seed}-{number}"] = (
            (shared[: size * 2 // 3] + unique)[:size] if number % 3 == 2 else unique
        )
    return out


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """vLLM's process groups with this process as the only rank."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():  # Another test module uses this fixture too.
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
    """Tests that every connector has to pass. ``transfer`` is its ``--kv-transfer-config``.

    ``device`` is the device of the KV cache. With ``paged`` a layer's cache is :class:`Pages`, as
    on Ascend NPUs, otherwise one tensor ``[blocks, HEADS, BLOCK, 2 * SIZE]``, as in vLLM elsewhere.
    ``keeps``: the connector keeps KV cache after a reset of the device's prefix cache. The layers
    in ``windowed`` have a sliding window of 40 tokens, and a block table of their own. With
    ``latent`` layers have :class:`Latents`, and the last one an :class:`Index`, as sparse latent
    attention on Ascend NPUs.
    """

    transfer: ClassVar[dict[str, Any]] = {}
    device: str = "cpu"
    paged: bool = True
    keeps: bool = False
    windowed: Sequence[int] = ()
    latent: bool = False

    def make_caches(self, layers: int, blocks: int) -> list[Any]:
        """KV cache of each layer, in one allocation."""
        whole = torch.full((layers, blocks * BLOCK * HEADS * 2 * SIZE), -1.0, device=self.device)
        if self.latent:
            rows = [
                layer.view(-1, LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"])
                for layer in whole
            ]
            return [_latents(layer, blocks) for layer in rows[:-1]] + [
                Index(rows[-1].view(blocks, BLOCK, 1, -1))
            ]
        if self.paged:
            return [Pages(*layer.view(2, blocks, BLOCK, HEADS, SIZE)) for layer in whole]
        return [layer.view(blocks, BLOCK, HEADS, 2 * SIZE).transpose(1, 2) for layer in whole]

    def parts(self, cache: Any) -> list[torch.Tensor]:
        """A layer's keys and values, views ``[blocks, BLOCK, HEADS, SIZE]`` of the cache, or the
        parts of its latents."""
        if self.paged:
            return [*cache]
        apart = cache.transpose(1, 2)
        return [apart[..., :SIZE], apart[..., SIZE:]]

    @pytest.fixture
    def engine(self, one_rank: None, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
        """Factory of engines; its arguments override the connector's configuration, except
        ``blocks``."""
        engines = []

        def make(blocks: int = 200, **transfer: Any) -> Engine:
            config = self.config(self.transfer | transfer)
            engines.append(
                Engine(config, blocks, self.make_caches, self.parts, self.windowed, self.latent)
            )
            return engines[-1]

        yield make
        for each in engines:
            each.close()
            each.close()  # shutdown may be called twice

    def config(self, transfer: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import EngineArgs

        config = EngineArgs(
            model=_model_directory(self.latent).name,
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
        if not self.paged and hasattr(config.cache_config, "kv_cache_layout"):
            # The number from make_caches; vLLM's engine core resolves it.
            config.cache_config.kv_cache_layout = "LBNHC"
        return config

    def check(
        self,
        engine: Engine,
        requests: dict[str, list[int]],
        length: int,
        left: AbstractSet[str] = frozenset(),
    ) -> None:
        assert engine.wrong == [], (
            f"the KV cache differs, first at (request, token, layer) {engine.wrong[0]}"
        )
        for name, prompt in requests.items():
            reason, tokens, _ = engine.ended[name]
            if name not in left:
                assert (reason, tokens) == ("length", expected_tokens(prompt, length)), name
        assert engine.held == 0

    # Tests

    def test_signatures_match_vllms(self, engine: Callable[..., Engine]) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import (
            KVConnectorBase_V1,
            SupportsHMA,
        )

        kind = type(engine().worker)
        assert issubclass(kind, KVConnectorBase_V1)
        for base in (
            (KVConnectorBase_V1, SupportsHMA)
            if issubclass(kind, SupportsHMA)
            else (KVConnectorBase_V1,)
        ):
            for name, asked in inspect.getmembers(base, inspect.isfunction):
                if name.startswith("_"):
                    continue
                wanted = [
                    each
                    for each in inspect.signature(asked).parameters.values()
                    if each.name != "self"
                ]
                try:
                    inspect.signature(getattr(kind, name)).bind(
                        None, *([None] * sum(each.kind in (0, 1) for each in wanted))
                    )
                except TypeError as error:
                    pytest.fail(f"{kind.__name__}.{name} cannot be called as vLLM does: {error}")

    def test_requests_generate_the_expected_tokens(self, engine: Callable[..., Engine]) -> None:
        instance, requests = engine(), prompts(24)
        for name, prompt in requests.items():
            instance.add(name, prompt, 5)
        instance.run()
        self.check(instance, requests, 5)

    def test_repeated_prompts(self, engine: Callable[..., Engine]) -> None:
        instance, requests = engine(), prompts(8, 1, 200)
        for turn in range(3):
            for name, prompt in requests.items():
                instance.add(f"{name}-{turn}", prompt, 3)
            instance.run()
            self.check(instance, {f"{name}-{turn}": prompt for name, prompt in requests.items()}, 3)
            assert instance.scheduler.reset_prefix_cache()
        if self.keeps:
            long = [f"{name}-2" for name, prompt in requests.items() if len(prompt) > 3 * BLOCK]
            assert long
            assert all(instance.loaded[name] >= BLOCK for name in long), "no KV cache was kept"

    def test_aborted_requests(self, engine: Callable[..., Engine]) -> None:
        instance, requests, draw = engine(), prompts(24, 2), random.Random(2)
        when = {name: draw.randrange(12) for name in list(requests)[::2]}
        for name, prompt in requests.items():
            instance.add(name, prompt, 5)

        def leave(step: int) -> None:
            for name in [name for name, at in when.items() if at == step]:
                instance.abort(name)

        instance.run(leave)
        self.check(instance, requests, 5, set(when))

    def test_preempted_requests(self, engine: Callable[..., Engine]) -> None:
        instance, requests = engine(blocks=480 // BLOCK), prompts(12, 3)
        preempted: list[str] = []
        schedule = instance.scheduler.schedule

        def watch(*arguments: Any, **more: Any) -> Any:
            out = schedule(*arguments, **more)
            preempted.extend(out.preempted_req_ids or ())
            return out

        instance.scheduler.schedule = watch  # type: ignore[method-assign]
        for name, prompt in requests.items():
            instance.add(name, prompt, 40)
        instance.run()
        assert preempted, "no request was preempted; the test is inconclusive"
        self.check(instance, requests, 40)

    def test_stats_can_be_aggregated_and_pickled(self, engine: Callable[..., Engine]) -> None:
        instance = engine()
        kind = type(instance.worker)
        if (stats := kind.build_kv_connector_stats()) is None:
            pytest.skip("the connector has no stats")
        stats = pickle.loads(pickle.dumps(stats))
        again = kind.build_kv_connector_stats(data=stats.data)
        assert again is not None
        assert again.aggregate(stats).is_empty()
        assert isinstance(again.reduce(), dict)


def _latents(layer: torch.Tensor, blocks: int) -> Latents:
    """A region ``[tokens, 64]`` as latents followed by rotated keys, each contiguous."""
    widths = LATENT["kv_lora_rank"], LATENT["qk_rope_head_dim"]
    parts = layer.view(-1).split([len(layer) * width for width in widths])
    return Latents(
        *(part.view(blocks, BLOCK, 1, width) for part, width in zip(parts, widths, strict=True))
    )


class HandoffTests(ConnectorTests):
    """Tests of connectors that pass a prompt from one instance to another by
    ``kv_transfer_params``.

    The first instance gets ``do_remote_decode``, the other the parameters that the first returns.
    ``prefill`` and ``decode`` are merged into ``transfer`` for the two.
    """

    prefill: ClassVar[dict[str, Any]] = {"kv_role": "kv_producer"}
    decode: ClassVar[dict[str, Any]] = {"kv_role": "kv_consumer"}

    def prefill_all(self, one: Engine, requests: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
        """Compute prompts on the first instance; returns the parameters for the other, by name."""
        for name, prompt in requests.items():
            one.add(name, prompt, 1, {"do_remote_decode": True})
        while one.scheduler.has_unfinished_requests():
            one.step()
        assert all(one.ended[name][0] == "length" for name in requests)
        assert all(one.ended[name][2] for name in requests), (
            "the prefill instance returned no kv_transfer_params"
        )
        # serialized as by a router
        return {name: json.loads(json.dumps(one.ended[name][2])) for name in requests}

    def hand_over(
        self,
        one: Engine,
        other: Engine,
        requests: dict[str, list[int]],
        left: dict[str, int] | None = None,
    ) -> None:
        for name, params in self.prefill_all(one, requests).items():
            other.add(name, requests[name], 5, params)

        def both(step: int) -> None:
            one.step()
            for name in [name for name, at in (left or {}).items() if at == step]:
                other.abort(name)

        other.run(both)
        one.run()

    def test_handoff(self, engine: Callable[..., Engine]) -> None:
        one, other, requests = engine(**self.prefill), engine(**self.decode), prompts(16, 4)
        self.hand_over(one, other, requests)
        self.check(other, requests, 5)
        assert one.wrong == []
        for name, prompt in requests.items():
            assert other.loaded[name] >= len(prompt) - 1, f"{name} was recomputed"

    def test_aborted_readers(self, engine: Callable[..., Engine]) -> None:
        one, other, requests = engine(**self.prefill), engine(**self.decode), prompts(16, 5)
        left = {name: place % 4 for place, name in enumerate(list(requests)[::2])}
        self.hand_over(one, other, requests, left)
        self.check(other, requests, 5, set(left))

    def test_params_of_another_prompt(self, engine: Callable[..., Engine]) -> None:
        """The API server returns the parameters of a list's first prompt, and a router gives them
        to all prompts of the list."""
        one, other = engine(**self.prefill), engine(**self.decode)
        requests = {name: prompt for name, prompt in prompts(12, 7).items() if len(prompt) > BLOCK}
        first = next(iter(requests))
        params = self.prefill_all(one, {first: requests[first]})[first]
        for name, prompt in requests.items():
            other.add(name, prompt, 5, dict(params))
        other.run(lambda step: one.step())
        self.check(other, requests, 5)
        for name, prompt in requests.items():  # Their blocks in the prefix cache are right, too.
            other.add(f"{name}-again", prompt, 5)
        other.run()
        self.check(other, {f"{name}-again": prompt for name, prompt in requests.items()}, 5)

    def test_params_of_several_requests(self, engine: Callable[..., Engine]) -> None:
        """With ``n`` > 1, and if a router repeats a request, several requests have the same
        parameters."""
        one, other, requests = engine(**self.prefill), engine(**self.decode), prompts(8, 8)
        siblings = {
            f"{number}_{name}": prompt for name, prompt in requests.items() for number in range(3)
        }
        params = self.prefill_all(one, requests)
        for name, prompt in siblings.items():
            other.add(name, prompt, 5, dict(params[name.partition("_")[2]]))
        left = {f"1_{name}": place % 3 for place, name in enumerate(requests)}

        def both(step: int) -> None:
            one.step()
            for name in [name for name, at in left.items() if at == step]:
                other.abort(name)

        other.run(both)
        self.check(other, siblings, 5, set(left))
        for name, prompt in requests.items():
            other.add(f"again_{name}", prompt, 5, dict(params[name]))
        other.run(both)
        self.check(other, {f"again_{name}": prompt for name, prompt in requests.items()}, 5)
        one.run()

    def test_params_of_another_connector(self, engine: Callable[..., Engine]) -> None:
        other, requests = engine(**self.decode), prompts(3, 6)
        for name, prompt in requests.items():
            other.add(name, prompt, 5, {"do_remote_prefill": True, "remote_host": "nowhere"})
        other.run()
        assert other.wrong == []
        assert all(other.ended[name][0] in ("length", "error") for name in requests)
        assert other.held == 0


__all__ = ["ConnectorTests", "Engine", "HandoffTests", "Pages", "one_rank"]
