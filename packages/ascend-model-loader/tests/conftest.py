# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fixtures: weight servers, and the fuzzer in a background process."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from harness.engines import npus
from harness.weights.peers import Serving

FUZZER = (
    "import json; from harness.weights import fuzz; print('RESULT', json.dumps(fuzz.fuzz(20, 1)))"
)


@pytest.fixture(scope="session", autouse=True)
def fuzzing(request: pytest.FixtureRequest) -> Iterator[Future | None]:
    """Fuzz for 20 seconds in another process from the first test on; it mostly waits."""
    if not any("test_fuzzed" in item.name for item in request.session.items):
        yield None
        return
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(npus.run, 1, sys.executable, "-c", FUZZER, timeout=200)


@pytest.fixture
def serving() -> Iterator[Any]:
    started: list[Serving] = []

    def make(*args: Any, **options: Any) -> Serving:
        started.append(Serving(*args, **options))
        return started[-1]

    yield make
    for each in started:
        each.server.stop()
