"""What the tests of several files use."""

import logging

import pytest
from ascend_platform import extension


@pytest.fixture
def lines():
    """(level, message) of what is logged, at the logger itself: "vllm" has a handler of its own and does not always propagate."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    extension.logger.addHandler(handler)
    extension.logger.setLevel("INFO")
    yield records
    extension.logger.removeHandler(handler)
