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
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ascend_kv_connector.testing_engine import BLOCK, HEADS, LAYERS, SIZE, VOCABULARY, Engine, Pages, expected_tokens

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

    def check(self, engine: Engine, given: dict[str, list[int]], length: int, left: AbstractSet[str] = frozenset()) -> None:
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
        preempted: list[str] = []
        schedule = made.scheduler.schedule

        def watch(*arguments: Any, **more: Any) -> Any:
            out = schedule(*arguments, **more)
            preempted.extend(out.preempted_req_ids or ())
            return out

        made.scheduler.schedule = watch  # type: ignore[method-assign]
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
        assert again is not None
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
