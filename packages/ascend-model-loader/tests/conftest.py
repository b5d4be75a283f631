"""Servers of weights, for the tests of this directory."""

from collections.abc import Iterator
from typing import Any

import pytest
from weight_peers import Serving


@pytest.fixture
def serving() -> Iterator[Any]:
    made: list[Serving] = []

    def make(*args: Any, **options: Any) -> Serving:
        made.append(Serving(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.server.stop()
