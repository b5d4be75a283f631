# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Metrics of transfers: what Prometheus and the log get."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from ascend_kv_connector.metrics import FailureLog, TransferMetrics, TransferStats
from ascend_kv_connector.p2p.transfers import PHASES, Done, Failed
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


def failed(engine: str = "p", kind: str = "peer") -> Failed:
    return Failed(
        "r", (3, 4), kind, "no answer in 10 s", "check it", "h:1", engine, "memory", 0, 10, 10.0
    )


def ranks() -> TransferStats:
    """The statistics of two ranks, one behind the other."""
    one, other = TransferStats(), TransferStats()
    for number, stats in enumerate((one, other)):
        stats.add(Done("r", 1000, 0.5, {"queue": 0.1, "read": 0.3}))
        stats.data["sent"] = 70
        stats.data["gauges"] = {str(number): {"leases": 2, "oldest_lease_seconds": 3.0 + number}}
    other.add(failed())
    later = TransferStats()
    later.data["gauges"] = {"0": {"leases": 1, "oldest_lease_seconds": 0.5}}
    return one.aggregate(other).aggregate(later)


def test_prometheus_metrics() -> None:
    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace())
    metrics = TransferMetrics(config, kinds, ["engine"], {0: ["0"]})
    metrics.observe(ranks().data)
    lines = dict(
        line.rsplit(" ", 1)
        for line in generate_latest(registry).decode().splitlines()
        if line[0] != "#"
    )
    actual = {
        name.removeprefix("vllm:ascend_kv_"): float(value)
        for name, value in lines.items()
        if "_created" not in name
    }
    expected = {
        'transfer_seconds_count{engine="0"}': 2,
        'transfer_phase_seconds_count{engine="0",phase="queue"}': 2,
        'transfer_phase_seconds_sum{engine="0",phase="read"}': 0.6,
        'transfer_bytes_total{engine="0"}': 2000,
        'sent_bytes_total{engine="0"}': 140,
        'transfer_failures_total{cause="peer",engine="0"}': 1,
        'transfer_failures_total{cause="sleep",engine="0"}': 0,
        'leases_expired_total{engine="0"}': 0,
        'leases{engine="0"}': 3,  # the latest of each rank
        'oldest_lease_seconds{engine="0"}': 4.0,
    }
    assert {name: actual[name] for name in expected} == expected


def test_line_of_vllms_log() -> None:
    reduced = ranks().reduce()
    assert reduced["Done"] == 2
    assert reduced["Mean read (s)"] == 0.3
    assert reduced["Leases"] == 3
    assert reduced["Failed (peer)"] == 1
    assert TransferStats().is_empty()


def test_failures_of_a_producer_are_logged_at_a_limited_rate() -> None:
    lines: list[str] = []
    now = [0.0]
    log = FailureLog(lines.append, lambda: now[0])
    for _ in range(50):
        log.add(failed())
    log.add(failed("q"))
    assert [line.partition(";")[0][-17:] for line in lines] == ["no answer in 10 s"] * 4
    now[0] = 12.0
    log.add(failed())
    assert lines[4:] == ["47 more KV transfers from engine p failed in 12 s (peer)", str(failed())]


def test_lines_have_no_text_of_clients_or_peers_as_it_is() -> None:
    """vLLM takes a request's id from its client, of any length and with any characters."""
    evil = "x\nERROR forged \x1b[31m\u202e" + "y" * 3000
    outcomes = Done(evil, 1, 1.0), replace(failed(), request=evil)
    for line in map(str, outcomes):
        assert line.isprintable()
        assert "x?ERROR forged ?[31m?yyy" in line
        assert len(line) < 700


def test_phases_of_a_transfer(instances: Callable) -> None:
    producer, consumer = instances("p", expose_cache=False).produce(), instances("d").consume()
    source, _ = producer.fill("r", 17)
    assert producer.producers[0].gauges()["leases"] == 1
    consumer.consumers[0].start("r", source, consumer.take(17), 0, 17)
    ((outcome,),) = consumer.wait()
    assert {*outcome.phases} == {*PHASES} - {"unpack"}  # the read is into the cache
    # it overlaps with others
    assert sum(outcome.phases[phase] for phase in PHASES if phase != "unpack") <= outcome.seconds
    assert producer.producers[0].sent_bytes == outcome.size > 0
    assert consumer.consumers[0].gauges() == {"transfers_open": 0, "unsettled_blocks": 0}
