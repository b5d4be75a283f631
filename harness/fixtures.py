# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fixtures of the tests of several wheels."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def log_lines() -> Iterator[list[tuple[str, str]]]:
    """(level, message) of what is logged, at the logger itself: "vllm" has a handler of its own and
    does not always propagate."""
    from ascend_platform.extension import logger

    records: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(  # type: ignore[method-assign]
        (record.levelname, record.getMessage())
    )
    logger.addHandler(handler)
    logger.setLevel("INFO")
    yield records
    logger.removeHandler(handler)


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """Writes the configuration of a tiny model with these changes; returns its directory."""
    from harness.models import small

    def write(**changes: Any) -> str:
        tmp_path.joinpath("config.json").write_text(json.dumps(small.TINY | changes))
        return str(tmp_path)

    return write


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread of torch: for small models a second one makes it slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
