# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fixtures of several test files."""

import json
import logging

import pytest
from ascend_platform import extension, host
from harness.models import small as small_models
from harness.project.distributions import write_cuda_torch


@pytest.fixture
def log_lines():
    """(level, message) of what is logged, at the logger itself: "vllm" has a handler of its own and
    does not always propagate."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    extension.logger.addHandler(handler)
    extension.logger.setLevel("INFO")
    yield records
    extension.logger.removeHandler(handler)


@pytest.fixture
def model(tmp_path):
    """Writes the configuration of a tiny model with these changes; returns its directory."""

    def write(**changes):
        tmp_path.joinpath("config.json").write_text(json.dumps(small_models.TINY | changes))
        return str(tmp_path)

    return write


@pytest.fixture
def cuda_torch(tmp_path):
    """A directory for PYTHONPATH with this environment's torch and, in its lib, the library that
    only torch's CUDA build has."""
    write_cuda_torch(tmp_path)
    return tmp_path


@pytest.fixture
def ascend310p(monkeypatch):
    monkeypatch.setattr(host, "chip", lambda: "Ascend310P3")
