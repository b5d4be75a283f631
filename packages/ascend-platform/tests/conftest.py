# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fixtures of several test files."""

import pytest
from ascend_platform import host
from harness.project.distributions import write_cuda_torch


@pytest.fixture
def cuda_torch(tmp_path):
    """A directory for PYTHONPATH with this environment's torch and, in its lib, the library that
    only torch's CUDA build has."""
    write_cuda_torch(tmp_path)
    return tmp_path


@pytest.fixture
def ascend310p(monkeypatch):
    monkeypatch.setattr(host, "chip", lambda: "Ascend310P3")
