# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fixtures of several test files."""

import json

import pytest
from harness.models import small as small_models
from harness.project.distributions import write_cuda_torch, write_vllm_ascend


@pytest.fixture
def model(tmp_path):
    """Writes the configuration of a tiny model with these changes; returns its directory."""

    def write(**changes):
        tmp_path.joinpath("config.json").write_text(json.dumps(small_models.TINY | changes))
        return str(tmp_path)

    return write


@pytest.fixture
def cuda_torch(tmp_path):
    """A directory for PYTHONPATH with this environment's torch as its CUDA build."""
    write_cuda_torch(tmp_path)
    return tmp_path


@pytest.fixture
def vllm_ascend(tmp_path):
    """A directory for PYTHONPATH with the metadata of vllm-ascend."""
    write_vllm_ascend(tmp_path)
    return tmp_path
