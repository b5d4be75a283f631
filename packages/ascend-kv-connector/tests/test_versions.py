# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""KV cache of weights and adapters that were replaced in a running engine is not loaded, by that
engine or others, from a pool, host memory or a prefill instance."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from ascend_kv_connector.testing import BLOCK, VOCABULARY, Engine, one_rank  # noqa: F401
from harness.kv.replaceable import Replaceable, write_adapter
from harness.kv.store_engines import Suite
from vllm.lora.request import LoRARequest

CHUNK = 12288
"""Bytes of a block of the suite, all layers."""

draw = random.Random(11)
X, Y, Z = ([draw.randrange(VOCABULARY) for _ in range(5 * BLOCK)] for _ in range(3))
WHOLE = 5 * BLOCK - 1
"""Tokens loaded of each of them at most: the last token of a prompt is always computed."""

HOST = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


@pytest.fixture
def make(one_rank: None, tmp_path: Path) -> Iterator[Callable[..., Replaceable]]:  # noqa: F811
    """Factory of engines with replaceable weights; by default they share a pool on disk."""
    engines: list[Engine] = []
    (tmp_path / "model").mkdir()
    suite = Suite(tmp_path / "model")

    def make(transfer: dict[str, Any] | None = None, weights: int = 0, **more: Any) -> Replaceable:
        extra = {"cpu_bytes_to_use": 200 * CHUNK}
        if transfer is None:
            extra |= {"backend": "disk", "disk_path": str(tmp_path / "pool")}
            transfer = {}
        transfer = {"kv_connector_extra_config": extra} | transfer
        engines.append(suite.make(transfer, **more))
        return Replaceable(engines[-1], weights)

    yield make
    for each in engines:
        each.close()


def serve(model: Replaceable, prompt: list[int], **more: Any) -> int:
    """Compute a prompt; the number of its tokens that were not computed."""
    engine, name = model.engine, f"r{len(model.engine.ended)}"
    engine.add(name, prompt, 3, **more)
    engine.run()
    settle(engine)
    assert engine.wrong == []
    assert engine.ended[name][0] == "length"
    return engine.loaded[name]


def settle(engine: Engine) -> None:
    """Step until all pending stores have finished."""
    while engine.scheduler.connector.has_pending_push_work():
        engine.step()


def sql(path: str, **more: Any) -> LoRARequest:
    return LoRARequest("sql", 1, path, **more)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    "method",
    ["update_weights", "finish_weight_update", "reload_weights", "apply_model", print, "extension"],
)
def test_pool_has_no_kv_cache_of_replaced_weights(
    make: Callable[..., Replaceable], method: Any, reset: bool
) -> None:
    """vLLM's own reset does not reset connectors by default."""
    trained, other = make(), make()
    assert serve(trained, X) == 0
    trained.replace(method)
    if reset:
        assert trained.engine.scheduler.reset_prefix_cache()
    assert serve(trained, X) == 0
    assert serve(trained, Y) == 0
    trained.engine.scheduler.reset_prefix_cache()
    assert serve(trained, Y) == WHOLE
    restarted = make()
    for unchanged in (other, restarted):
        assert serve(unchanged, X) == WHOLE
        assert serve(unchanged, Y) == (0 if unchanged is other else WHOLE)
    trained.replace(method, 2)
    assert serve(trained, Y) == 0


def test_methods_that_leave_weights_keep_the_pool(make: Callable[..., Replaceable]) -> None:
    one, other = make(), make()
    for method in (
        "list_loras",
        "profile",
        "compute_weight_checksums",
        "init_weight_transfer_engine",
    ):
        one.replace(method, weights=0)
    serve(one, X)
    assert serve(other, X) == WHOLE


def test_host_memory_has_no_kv_cache_of_replaced_weights(
    make: Callable[..., Replaceable],
) -> None:
    trained = make(HOST)
    serve(trained, X)
    assert trained.engine.scheduler.reset_prefix_cache()
    assert serve(trained, X) == WHOLE
    trained.replace()
    assert serve(trained, X) == 0
    assert trained.engine.scheduler.reset_prefix_cache()
    assert serve(trained, X) == WHOLE


def test_kept_requests_are_not_stored(make: Callable[..., Replaceable]) -> None:
    """As with ``/pause`` and mode keep: a part of their KV cache is of the earlier weights."""
    trained, other = make(), make()
    engine = trained.engine
    engine.add("kept", X, 3 * BLOCK)
    engine.add("waiting", Y, 3)
    while not engine.tables:
        engine.step()  # 64 tokens a step: the second request has not started.
    assert "waiting" not in engine.tables
    trained.replace()
    engine.run()
    settle(engine)
    assert {name for name, *_ in engine.wrong} == {"kept"}
    engine.wrong.clear()
    output = engine.ended["kept"][1]
    assert serve(trained, [*X, *output]) == 0
    engine.scheduler.reset_prefix_cache()
    assert serve(trained, Y) == WHOLE
    assert serve(other, [*X, *output]) <= 4 * BLOCK
    assert serve(other, Y) == 0


def test_waiting_request_is_not_loaded_from_what_was_before(
    make: Callable[..., Replaceable],
) -> None:
    """It has been looked up, and its chunks were found, when weights are replaced."""
    trained = make()
    serve(trained, X)
    engine = trained.engine
    engine.scheduler.reset_prefix_cache()
    manager: Any = engine.scheduler.connector.scheduler.manager  # type: ignore[union-attr]
    lookup, answers = manager.lookup, []

    def asked(*arguments: Any) -> Any:
        answers.append(lookup(*arguments))
        return type(answers[-1]).RETRY

    manager.lookup = asked
    engine.add("waiting", X, 3)
    engine.step()
    assert answers
    manager.lookup = lookup
    trained.replace()
    engine.run()
    assert (engine.wrong, engine.loaded["waiting"]) == ([], 0)


@pytest.mark.parametrize("transfer", [None, HOST], ids=["pool", "host memory"])
def test_adapter_loaded_in_place_is_computed_again(
    make: Callable[..., Replaceable], tmp_path: Path, transfer: dict[str, Any] | None
) -> None:
    path = write_adapter(tmp_path / "sql", 1)
    one = make(transfer)
    one.load(sql(path))
    assert serve(one, X, lora_request=sql(path)) == 0
    assert serve(one, X) == 0
    assert serve(one, X, lora_request=sql(path)) == WHOLE
    write_adapter(tmp_path / "sql", 2)
    one.load(sql(path, load_inplace=True))
    # vLLM's API server keeps load_inplace, so that each step loads it.
    assert serve(one, X, lora_request=sql(path, load_inplace=True)) == 0
    assert one.engine.scheduler.reset_prefix_cache()
    assert serve(one, X, lora_request=sql(path, load_inplace=True)) == WHOLE
    write_adapter(tmp_path / "sql", 3)
    assert serve(one, X, lora_request=sql(path, load_inplace=True)) == 0
    assert serve(one, X) == WHOLE


def test_adapter_trained_on_is_not_served_from_the_pool(
    make: Callable[..., Replaceable], tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "sql", 1)
    serve(make(), X, lora_request=sql(path))
    assert serve(make(), X, lora_request=sql(path)) == WHOLE
    assert serve(make(), X) == 0
    assert serve(make(), X, lora_request=LoRARequest("other", 1, path)) == 0
    write_adapter(tmp_path / "sql", 2)
    assert serve(make(), X, lora_request=sql(path)) == 0
    assert serve(make(), X, lora_request=sql(path)) == WHOLE
    write_adapter(tmp_path / "sql", 1)
    assert serve(make(), X, lora_request=sql(path)) == WHOLE


def test_files_that_change_under_a_loaded_adapter(
    make: Callable[..., Replaceable], tmp_path: Path
) -> None:
    """vLLM goes on with what it has loaded, and with the new files once it has dropped that."""
    path = write_adapter(tmp_path / "sql", 1)
    one = make()
    one.load(sql(path))
    write_adapter(tmp_path / "sql", 2)
    assert serve(one, X, lora_request=sql(path)) == 0  # Of the first ones.
    one.forget(1)
    assert serve(one, X, lora_request=sql(path)) == 0  # Of the second ones.
    assert serve(make(), X, lora_request=sql(path)) == 0


def test_files_that_change_while_a_request_runs(
    make: Callable[..., Replaceable], tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "sql", 1)
    one = make()
    one.engine.add("r", X, 3, lora_request=sql(path))
    write_adapter(tmp_path / "sql", 2)  # Loaded in the first step.
    one.engine.run()
    settle(one.engine)
    write_adapter(tmp_path / "sql", 1)
    assert serve(make(), X, lora_request=sql(path)) == 0


def test_adapter_without_files_is_shared_with_none(make: Callable[..., Replaceable]) -> None:
    """Such as one that a trainer has in memory, for which it invents a path."""

    def tensors(number: int) -> LoRARequest:
        return LoRARequest("policy", number, "/in/memory")

    one, other = make(), make()
    for model, number in ((one, 1), (other, 2)):
        model.adapters[1] = number
        assert serve(model, X, lora_request=tensors(1)) == 0
        assert serve(model, X, lora_request=tensors(1)) == WHOLE
    one.load = lambda lora: None  # type: ignore[method-assign]
    one.replace("load_tensors")
    one.adapters[1] = 3
    assert serve(one, X, lora_request=tensors(1)) == 0


def test_adapter_that_is_downloaded_by_its_first_request(
    make: Callable[..., Replaceable], tmp_path: Path
) -> None:
    one, path = make(), str(tmp_path / "sql")
    engine, load = one.engine, one._load

    def download(lora: LoRARequest) -> bool:
        write_adapter(tmp_path / "sql", 1)
        return load(lora)

    one._load = download  # type: ignore[method-assign]
    engine.add("first", X, 3, lora_request=sql(path))
    engine.run()
    one._load = load  # type: ignore[method-assign]
    settle(engine)
    assert serve(one, X, lora_request=sql(path)) == 0  # Of the files, which are known now.
    assert serve(one, X, lora_request=sql(path)) == WHOLE
    assert serve(make(), X, lora_request=sql(path)) == WHOLE


def test_cache_salts_share_nothing(make: Callable[..., Replaceable]) -> None:
    one, other = make(), make()
    serve(one, X, cache_salt="a")
    assert serve(one, X, cache_salt="b") == serve(other, X) == 0
    assert serve(other, X, cache_salt="a") == WHOLE
    one.replace()
    serve(one, Y, cache_salt="a")
    assert serve(one, Y, cache_salt="b") == serve(one, Y) == 0
    # A client cannot name a version.
    token = one.engine.scheduler.connector._versions.weights
    assert token
    for salt in (token, f" {token}", str((None, token))):
        assert serve(other, Y, cache_salt=salt) == 0


P2P: dict[str, Any] = {
    "kv_connector": "AscendP2PConnector",
    "kv_connector_extra_config": {
        "host": "127.0.0.1",
        "insecure": True,
        "chunk_mib": 1,
        "answer_timeout": 5,
        "transfer_timeout": 20,
    },
}


@pytest.fixture
def pair(make: Callable[..., Replaceable]) -> Callable[..., tuple[Replaceable, Replaceable]]:
    """Factory of a prefill and a decode instance; ``more`` are options of the connector."""
    pytest.importorskip(
        "mooncake.engine",
        exc_type=ImportError,
        reason="Mooncake lacks a library: apt-get install libibverbs1",
    )

    def make_pair(engine_id: str = "", **more: Any) -> tuple[Replaceable, Replaceable]:
        options = P2P["kv_connector_extra_config"] | more
        named = {"engine_id": engine_id} if engine_id else {}
        one, other = (
            make(P2P | named | {"kv_role": role, "kv_connector_extra_config": options})
            for role in ("kv_producer", "kv_consumer")
        )
        return one, other

    return make_pair


def prefill(model: Replaceable, prompt: list[int], **more: Any) -> dict[str, Any]:
    """Compute a prompt for another instance, whose parameters are returned."""
    engine, name = model.engine, f"p{len(model.engine.ended)}"
    engine.add(name, prompt, 1, {"do_remote_decode": True}, **more)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    assert engine.wrong == []
    return json.loads(json.dumps(engine.ended[name][2]))


def hand_over(one: Replaceable, other: Replaceable, prompt: list[int], **more: Any) -> int:
    """Tokens of a prompt that the second instance loads from the first."""
    params = prefill(one, prompt, **more)
    return read(one, other, prompt, params, **more)


def read(one: Replaceable, other: Replaceable, prompt: list[int], params: Any, **more: Any) -> int:
    engine, name = other.engine, f"d{len(other.engine.ended)}"
    engine.add(name, prompt, 3, params, **more)
    engine.run(lambda step: one.engine.step())
    assert (engine.wrong, engine.ended[name][0]) == ([], "length")
    return engine.loaded[name]


def test_weights_replaced_in_either_instance_are_not_mixed(
    pair: Callable[..., tuple[Replaceable, Replaceable]],
) -> None:
    one, other = pair()
    assert hand_over(one, other, X) >= WHOLE
    kept = prefill(one, Y)
    waiting = prefill(one, Z)
    other.engine.add("waits", Z, 3, waiting)
    other.replace()
    other.engine.run(lambda step: one.engine.step())
    assert (other.engine.wrong, other.engine.loaded["waits"]) == ([], 0)
    assert read(one, other, Y, kept) == 0
    assert hand_over(one, other, X) == 0
    one.replace()  # The same weights, which neither of the two knows.
    assert hand_over(one, other, [1, *X]) == 0
    one.engine.run()
    assert one.engine.held == 0


def test_earlier_prompt_is_read_with_the_weights_of_its_time(
    pair: Callable[..., tuple[Replaceable, Replaceable]],
) -> None:
    one, other = pair()
    params = prefill(one, X)
    one.engine.add("running", Y, 1, {"do_remote_decode": True})
    one.engine.step()
    one.replace()
    assert read(one, other, X, params) >= WHOLE
    while one.engine.scheduler.has_unfinished_requests():
        one.engine.step()
    assert one.engine.ended["running"][2] is None  # Of both weights.
    one.engine.wrong.clear()
    assert hand_over(one, other, Z) == 0


def test_versions_of_an_adapter_are_not_mixed(
    pair: Callable[..., tuple[Replaceable, Replaceable]], tmp_path: Path
) -> None:
    one, other = pair()
    first = write_adapter(tmp_path / "one", 1)
    copied, second = write_adapter(tmp_path / "copy", 1), write_adapter(tmp_path / "two", 2)
    params = prefill(one, X, lora_request=sql(first))
    assert read(one, other, X, params, lora_request=sql(copied)) >= WHOLE
    params = prefill(one, Y, lora_request=sql(first))
    assert read(one, other, Y, params, lora_request=LoRARequest("sql", 2, second)) == 0
    params = prefill(one, Z, lora_request=sql(first))
    write_adapter(tmp_path / "copy", 2)
    other.load(sql(copied, load_inplace=True))
    assert read(one, other, Z, params, lora_request=sql(copied)) == 0
    params = prefill(one, X, cache_salt="a")
    assert read(one, other, X, params, cache_salt="a") >= WHOLE
    params = prefill(one, Y, cache_salt="a")
    assert read(one, other, Y, params, cache_salt="b") == 0


def test_waiting_instance_is_told_of_other_weights(
    pair: Callable[..., tuple[Replaceable, Replaceable]],
) -> None:
    """It would wait for a prefill layer by layer until ``transfer_timeout``."""
    url = "http://127.0.0.1:9/"
    one, other = pair(mode="push", metaserver=url)
    asked: list[Any] = []
    consumer: Any = other.engine.scheduler.connector._scheduler.consumer  # type: ignore[union-attr]
    consumer.client.post = lambda *arguments: asked.append(arguments[2])
    other.engine.add("d", X, 3, {"do_remote_prefill": True, "metaserver": url})
    while not asked:
        other.engine.step()
    one.replace()
    one.engine.add("p", X, 1, asked[0])
    began = monotonic()
    other.engine.run(lambda step: one.engine.step())
    assert other.engine.ended["d"][0] == "error"  # By vLLM's kv_load_failure_policy.
    assert monotonic() - began < 10


def test_instances_with_one_engine_id_are_told_apart(
    pair: Callable[..., tuple[Replaceable, Replaceable]], make: Callable[..., Replaceable]
) -> None:
    """A manifest gives one to all replicas. Otherwise the first of two decode instances that read a
    prompt would free the other one's buffers, and the blocks."""
    one, first = pair(engine_id="0", expose_cache=False)
    options = P2P["kv_connector_extra_config"] | {"expose_cache": False}
    more = {"kv_role": "kv_consumer", "kv_connector_extra_config": options, "engine_id": "0"}
    second = make(P2P | more)
    params = prefill(one, X)
    one.engine.step()  # With the lease.
    leases = one.engine.worker._worker._producer.leases
    for other in (first, second):
        other.engine.add("d", X, 3, dict(params))
        other.engine.step()
    until = monotonic() + 10
    (lease,) = leases._live.values()
    while len(lease.readers) < 2 and monotonic() < until:
        one.engine.step()
    assert len(lease.readers) == 2
    for other in (first, second):
        other.engine.run(lambda step: one.engine.step())
        assert (other.engine.wrong, other.engine.loaded["d"]) == ([], WHOLE)
    one.engine.run()


def test_instances_with_one_engine_id_have_their_own_memory(
    make: Callable[..., Replaceable], tmp_path: Path
) -> None:
    """vLLM names the file in /dev/shm, which the processes of an instance share, by it."""

    def start(number: int) -> Replaceable:
        options = {"backend": "disk", "cpu_bytes_to_use": 200 * CHUNK}
        options["disk_path"] = str(tmp_path / f"pool-{number}")
        more = {"engine_id": "0", "kv_connector_extra_config": options}
        return make(more, weights=number)

    one, other = start(0), start(1)
    assert serve(one, X) == serve(other, Y) == 0
    one.engine.close()
    other.engine.close()
    assert serve(start(0), X) == serve(start(1), Y) == WHOLE
