# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Endurance test: many requests under faults; each ends in time, correctly or with a cause, and
nothing leaks."""

from collections.abc import Callable
from pathlib import Path

import pytest
from ascend_kv_connector.p2p.transfers import Done
from ascend_kv_connector.testing import one_rank  # noqa: F401
from harness.kv import request_faults
from harness.kv.memory_transport import InMemoryNetwork
from harness.kv.store_engines import Suite
from harness.kv.transfer_faults import Endurance

REQUESTS = 100
"""``tools/check transfers faults`` runs 500 of each."""

CASES = {
    "1 to 1": ({}, {}, False),
    "2 to 1, without checksums": ({"tp": 2}, {"verify": False}, False),
    "1 to 2, layer by layer": ({}, {"tp": 2}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_every_request_ends_correctly_or_with_a_cause(
    case: str, instances: Callable, network: InMemoryNetwork, record_property: Callable
) -> None:
    one, other, layerwise = CASES[case]
    result = Endurance(instances, network, REQUESTS, one, other, layerwise).run()
    print(result)
    for kind, number in result.ended.items():
        record_property(kind, number)
    assert (result.wrong, result.late, result.leaked) == ([], [], [])
    assert (
        sum(number for kind, number in result.ended.items() if not kind.startswith("(")) == REQUESTS
    )
    assert result.ended["done"] > REQUESTS * 0.5
    assert result.ended["(a producer was killed)"] == 3
    assert set(result.ended) > {"done", "transport"}


@pytest.mark.usefixtures("one_rank")
def test_requests_through_a_router_under_faults(tmp_path: Path) -> None:
    """vLLM's schedulers, repeated and mixed-up requests, restarts; ``tools/check transfers
    requests`` runs 2,000."""
    suite = Suite(tmp_path)
    suite.device = "cpu"
    result = request_faults.Endurance(suite.make, 80, restarts=2).run()
    print(result)
    assert (result.wrong, result.late, result.leaked) == ([], [], [])
    assert result.requests == 80
    assert result.loaded > 20
    assert result.events.keys() >= {"kill prefill", "restart decode", "the router dies"}
    assert {name.partition(":")[0] for name in result.ended} >= {
        "once",
        "layer by layer",
        "the same body again",
        "n = 2",
    }


def test_outcome_is_reported_once(instances: Callable) -> None:
    producer, consumer = instances("p").produce(), instances("d").consume()
    source, _ = producer.fill("r", 8)
    consumer.consumers[0].start("r", source, consumer.take(8), 0, 8)
    assert isinstance(consumer.wait()[0][0], Done)
    assert consumer.consumers[0].get_finished() == []
