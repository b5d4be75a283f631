# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""AscendStoreConnector: instances that share a pool load exactly what was stored."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ascend_kv_connector.store import tier as tier_module
from ascend_kv_connector.store.chunk_format import FOOTER_BYTES, write_footer
from ascend_kv_connector.testing import BLOCK, Engine, one_rank, prompts  # noqa: F401
from ascend_platform.attention import mla_prolog
from harness.kv import store_faults
from harness.kv.store_engines import Suite
from safetensors.torch import save_file
from vllm.config import KVEventsConfig

CHUNK = 12288
"""Bytes of a block of the suite, all layers."""


@pytest.fixture
def engine(one_rank: None, tmp_path: Path) -> Iterator[Callable[..., Engine]]:  # noqa: F811
    engines: list[Engine] = []
    (tmp_path / "model").mkdir()
    suite = Suite(tmp_path / "model")

    def make(transfer: dict[str, Any] | None = None, **more: Any) -> Engine:
        if transfer is None:
            extra = {
                "backend": "disk",
                "disk_path": str(tmp_path / "pool"),
                "cpu_bytes_to_use": 200 * CHUNK,
            }
            transfer = {
                "kv_role": more.pop("kv_role", "kv_both"),
                "kv_connector_extra_config": extra | more.pop("extra", {}),
            }
        engines.append(suite.make(transfer, **more))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


def serve(engine: Engine, given: dict[str, list[int]], turn: str) -> dict[str, int]:
    """Run the prompts; the number of tokens of each that were loaded."""
    for name, prompt in given.items():
        engine.add(f"{turn}-{name}", prompt, 3)
    engine.run()
    settle(engine)
    Suite.check(None, engine, {f"{turn}-{name}": prompt for name, prompt in given.items()}, 3)  # type: ignore[arg-type]
    return {name: engine.loaded[f"{turn}-{name}"] for name in given}


def settle(engine: Engine) -> None:
    """Step until all pending stores have finished."""
    while engine.scheduler.connector.has_pending_push_work():
        engine.step()


LONG = {
    name: prompt
    for name, prompt in prompts(12, 3).items()
    if len(prompt) >= 3 * BLOCK and name[-1] not in "258"
}
"""Prompts without a shared prefix."""

WHOLE = {name: min(len(prompt) - 1, len(prompt) // BLOCK * BLOCK) for name, prompt in LONG.items()}
"""Tokens loaded of each when all its chunks are in the pool: the last token of a prompt is always
computed."""


def test_stored_chunks_are_loaded_by_another_instance(engine: Callable[..., Engine]) -> None:
    one = engine()
    assert not any(serve(one, {name: LONG[name] for name in list(LONG)[:1]}, "first").values())
    serve(one, LONG, "more")
    one.close()
    assert serve(engine(), LONG, "again") == WHOLE


def test_different_layouts_and_hashes_do_not_share(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(engine(), LONG, "first")
    assert not any(serve(engine(dtype="bfloat16"), dict(list(LONG.items())[:1]), "dtype").values())
    assert not any(
        serve(
            engine(extra={"blocks_per_chunk": 2}), dict(list(LONG.items())[:1]), "chunks"
        ).values()
    )
    assert not any(
        serve(
            engine(extra={"namespace": "other"}), dict(list(LONG.items())[:1]), "namespace"
        ).values()
    )
    assert not any(
        serve(
            engine(hf_overrides={"rope_theta": 7.0}), dict(list(LONG.items())[:1]), "model"
        ).values()
    )
    # Belongs to latent attention, which this model does not have.
    monkeypatch.setattr(mla_prolog, "check", lambda config: None)
    halves = {"additional_config": {"ascend": {"platform": {"mla_prolog": True}}}}
    assert not any(serve(engine(**halves), dict(list(LONG.items())[:1]), "order").values())
    assert all(serve(engine(), dict(list(LONG.items())[:1]), "the same").values())
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert not any(serve(engine(), dict(list(LONG.items())[:1]), "seed").values())


def test_tiers_of_offloading_share_between_equal_models(
    engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """Of OffloadingConnector with the same directory."""
    tier = {"type": "ascend_disk", "path": str(tmp_path / "tier")}
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 200 * CHUNK,
        "secondary_tiers": [tier],
    }
    transfer = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    one = dict(list(LONG.items())[:1])
    save_file({"weight": torch.arange(9.0)}, tmp_path / "model" / "model.safetensors")
    serve(engine(transfer), one, "first")
    assert all(serve(engine(transfer), one, "again").values())
    assert not any(serve(engine(transfer, hf_overrides={"rope_theta": 7.0}), one, "rope").values())
    save_file({"weight": torch.ones(9)}, tmp_path / "model" / "model.safetensors")
    assert not any(serve(engine(transfer), one, "weights").values())


def test_weights_replaced_under_the_same_path_do_not_share(
    engine: Callable[..., Engine], tmp_path: Path
) -> None:
    one = dict(list(LONG.items())[:1])
    weights = torch.arange(1000.0)
    save_file({"weight": weights}, tmp_path / "model" / "model.safetensors")
    serve(engine(), one, "first")
    assert all(serve(engine(), one, "the same").values())
    save_file({"weight": weights + 1}, tmp_path / "model" / "model.safetensors")
    assert not any(serve(engine(), one, "trained on").values())


def test_stored_and_corrupt_chunks_are_events_for_routers(
    engine: Callable[..., Engine], tmp_path: Path
) -> None:
    (name, prompt), *_ = LONG.items()

    events_by_rank: dict[int, list[Any]] = {}

    def watched(**options: Any) -> Engine:
        """An engine that keeps what vLLM's scheduler takes after a step."""
        watched_engine = engine(**options)
        tier = watched_engine.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]
        take, kept = tier.take_events, events_by_rank.setdefault(id(watched_engine), [])

        def take_events() -> list[Any]:
            events_taken = list(take())
            kept.extend(events_taken)
            return events_taken

        tier.take_events = take_events
        return watched_engine

    def events(watched_engine: Engine) -> list[Any]:
        watched_engine.scheduler.connector.connector_scheduler.manager.secondary_tiers[
            0
        ].take_events()
        return events_by_rank[id(watched_engine)]

    announced = {
        "extra": {"enable_kv_events": True},
        "kv_events_config": KVEventsConfig(True, "null"),
    }
    one = watched(**announced)
    serve(one, {name: prompt}, "first")
    stored = events(one)
    assert {
        (event.medium.name, event.locality.name, event.ownership, event.removed) for event in stored
    } == {("STORAGE", "REMOTE", "ascend_disk", False)}
    keys = [key for event in stored for key in event.keys]
    assert len(keys) == len(set(keys)) == len(list(tmp_path.glob("pool/*/*/*.kv")))
    one.close()
    for file in tmp_path.glob("pool/*/*/*.kv"):
        file.write_bytes(file.read_bytes()[:-5000])
    other = watched(**announced)
    serve(other, {name: prompt}, "second")
    assert {event.removed for event in events(other)} == {True, False}  # removed, and stored again
    silent = watched(kv_events_config=announced["kv_events_config"])
    serve(silent, LONG, "third")
    assert events(silent) == []


def test_roles(engine: Callable[..., Engine]) -> None:
    serve(engine(kv_role="kv_consumer"), LONG, "consumer first")
    # the consumer stored nothing
    assert not any(serve(engine(extra={"enable_lookup": False}), LONG, "does not look").values())
    assert all(serve(engine(kv_role="kv_consumer"), LONG, "consumer").values())
    assert all(serve(engine(kv_role="kv_producer"), LONG, "producer").values())
    assert not any(
        serve(
            engine(kv_role="kv_consumer", extra={"consumer_is_to_load": False}), LONG, "neither"
        ).values()
    )


@pytest.mark.parametrize("harm", ["cut", "changed", "of another prefix", "removed"])
def test_damaged_files_are_recomputed_and_stored_again(
    engine: Callable[..., Engine], tmp_path: Path, harm: str
) -> None:
    name, prompt = max(LONG.items(), key=lambda item: len(item[1]))
    given, chunks = {name: prompt}, len(prompt) // BLOCK
    serve(engine(), given, "first")
    files = sorted((tmp_path / "pool").rglob("*.kv"))
    assert len(files) == chunks
    other = files[0].read_bytes()
    for file in files[1:]:
        data = bytearray(file.read_bytes())
        if harm == "cut":
            file.write_bytes(data[: len(data) // 2])
        elif harm == "changed":
            data[len(data) // 3] ^= 4
            file.write_bytes(data)
        elif harm == "of another prefix":
            file.write_bytes(other)
        else:
            file.unlink()
    assert serve(engine(), given, "harmed")[name] <= BLOCK  # serve() checks the tokens
    assert serve(engine(), given, "again")[name] == WHOLE[name]


def test_late_bytes_of_another_read_are_not_stored_as_intact(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread loads and stores by one buffer, to which a read that timed out may still write."""
    one = dict(list(LONG.items())[:1])

    def write(name: str, record: memoryview, *chunk: memoryview) -> None:
        record[7] ^= 4
        write_footer(name, record, *chunk)

    with monkeypatch.context() as patch:
        patch.setattr(tier_module, "write_footer", write)
        serve(engine(), one, "first")
    assert not any(serve(engine(), one, "again").values())  # serve() checks the tokens
    assert all(serve(engine(), one, "stored again").values())


def test_full_disk_is_tolerated(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(file: int, data: Any) -> int:
        if isinstance(data, memoryview) and len(data) > FOOTER_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr("ascend_kv_connector.store.disk.os.write", full)
    first = engine()
    serve(first, LONG, "first")
    counts = outcomes(first)
    assert counts["store", "full", ""] > 0
    assert ("store", "stored", "") not in counts
    assert not any(serve(engine(), LONG, "again").values())


def outcomes(engine: Engine) -> dict[tuple[str, str, str], int]:
    tier = engine.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]
    return tier.seen


@pytest.fixture(autouse=True)
def record_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the tiers' counts for the tests; vLLM's scheduler takes them for the metrics."""
    from ascend_kv_connector.store.tier import PoolTier

    count = PoolTier._count

    def watch(tier: Any, op: str, outcome: str, code: str = "", number: int = 1) -> None:
        count(tier, op, outcome, code, number)
        tier.__dict__.setdefault("seen", Counter())[op, outcome, code] += number

    monkeypatch.setattr(PoolTier, "_count", watch)


def test_full_disk_is_not_written_for_a_while(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, puts = engine(), list[int]()
    (tier,) = first.scheduler.connector.connector_scheduler.manager.secondary_tiers
    monkeypatch.setattr(
        tier._pool, "put", lambda names, records: puts.append(len(names)) or ["full"] * len(names)
    )
    for name, prompt in LONG.items():
        serve(first, {name: prompt}, "full")
    assert len(puts) == 1
    tier._full_until = 0.0
    serve(first, {"later": [7] * 64}, "full")
    assert len(puts) == 2


def test_no_old_chunks_are_loaded_after_a_reset(engine: Callable[..., Engine]) -> None:
    first = engine()
    serve(first, LONG, "first")
    assert first.scheduler.reset_prefix_cache(reset_connector=True)
    assert not any(serve(first, dict(list(LONG.items())[:1]), "reset").values())


def test_every_outcome_is_counted(engine: Callable[..., Engine]) -> None:
    from ascend_kv_connector.store.tier import CHUNKS_METRIC

    pool_engine, counted = engine(), {}
    for name, prompt in LONG.items():
        pool_engine.add(name, prompt, 3)
    while (
        pool_engine.scheduler.has_unfinished_requests()
        or pool_engine.scheduler.connector.has_pending_push_work()
    ):
        pool_engine.step()
        if stats := pool_engine.scheduler.connector.get_kv_connector_stats():
            for labels, count in stats.data["data"].get(CHUNKS_METRIC, {}).items():
                counted[labels] = counted.get(labels, 0) + count
    known = {("store", "stored"), ("store", "present"), ("lookup", "missing")}
    assert set(counted) <= {("ascend_disk", *each, "") for each in known}
    tier = pool_engine.scheduler.connector.connector_scheduler.manager.secondary_tiers[0]
    assert CHUNKS_METRIC in type(tier).build_metric_definitions({})
    tier._count_outcome("store", "failed -800")  # with an error code of Mooncake's
    assert tier.get_stats().data["data"][CHUNKS_METRIC] == {
        ("ascend_disk", "store", "failed", "-800"): 1
    }


def test_requests_under_faults(engine: Callable[..., Engine]) -> None:
    result = store_faults.Endurance(
        lambda: engine(store_faults.TRANSFER_CONFIG, blocks=64), 200, deaths=1
    ).run()
    print(result)
    assert (result.wrong, result.late, result.leaked) == ([], [], 0)
    assert sum(result.ended.values()) == 200
    assert set(result.ended) <= {"length", "left", "in flight at restart"}
    assert result.chunks["loaded"] > 50
    assert all(
        result.faults.get(name) for name in ("fail", "corrupt", "late", "cut", "lost", "full")
    ), result.faults


@pytest.mark.parametrize("load", [True, False])
def test_rows_of_a_late_job_are_not_accessed(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, load: bool
) -> None:
    store_faults.POOL.__init__()  # type: ignore[misc]
    first = engine(store_faults.TRANSFER_CONFIG)
    serve(first, LONG, "first")
    manager = first.scheduler.connector.connector_scheduler.manager
    (tier,) = manager.secondary_tiers
    held, let_go, came_back = store_faults.POOL.held, threading.Event(), threading.Event()
    key, before = bytes.fromhex(next(iter(held)).rpartition("/")[2]), dict(held)
    asked = "get" if load else "exists"
    answer = getattr(store_faults.POOL, asked)

    def hang(*arguments: Any) -> Any:
        let_go.wait(20)
        came_back.set()
        return answer(*arguments)

    monkeypatch.setattr(store_faults.POOL, asked, hang)
    host = np.asarray(manager.primary_tier.get_kv_memoryview())
    key = key if load else bytes(len(key))
    began = monotonic()
    (tier.submit_load if load else tier.submit_store)(
        SimpleNamespace(job_id=-1, keys=[key], chunk_ids=[7])
    )
    while not (ended := tier.get_finished_jobs()):
        sleep(0.01)
    assert store_faults.TRANSFER <= monotonic() - began < store_faults.TRANSFER + store_faults.LATE
    assert (ended[0].job_id, ended[0].success, ended[0].successful_keys) == (-1, False, None)
    host[7] = 90  # reused by another job
    let_go.set()
    assert came_back.wait(5)
    sleep(0.2)
    assert (host[7] == 90).all()
    assert held == before
    del host


def test_lookups_that_wait_do_not_delay_the_end(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    store_faults.POOL.__init__()  # type: ignore[misc]
    first, asked = engine(store_faults.TRANSFER_CONFIG), list[int]()

    def slow(names: list[str]) -> list[bool]:
        asked.append(len(names))
        sleep(store_faults.ANSWER / 2)
        return [False] * len(names)

    monkeypatch.setattr(store_faults.POOL, "exists", slow)
    (tier,) = first.scheduler.connector.connector_scheduler.manager.secondary_tiers
    for number in range(40):  # in as many steps
        tier.lookup(bytes([number]) * 36, SimpleNamespace(req_id=f"r{number}"))
        tier.on_schedule_end(None)
    while not asked:
        sleep(0.001)
    began = monotonic()
    tier.shutdown()
    assert monotonic() - began < 2.0
    assert len(asked) < 10
