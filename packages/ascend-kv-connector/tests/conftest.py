# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fixtures: instances with synthetic KV caches on the in-memory transport, without an NPU or an
engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.kv.instances import Instance
from harness.kv.memory_transport import Faults, InMemoryNetwork


@pytest.fixture
def network() -> InMemoryNetwork:
    return InMemoryNetwork(Faults())


@pytest.fixture
def instances(network: InMemoryNetwork) -> Iterator[type]:
    """Factory of instances in the network; all are closed at the end."""
    started: list[Instance] = []

    def make(name: str, **shape: object) -> Instance:
        started.append(Instance(network, name, **shape))
        return started[-1]

    yield make
    network.faults.hung.set()
    for instance in started:
        instance.close()
