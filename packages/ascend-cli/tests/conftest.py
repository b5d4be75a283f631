# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Fixtures of several test files."""

import json

import pytest
import transformers
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
def ten_layers(tmp_path):
    """A directory with the configuration of a Qwen3 model of ten layers."""
    transformers.Qwen3Config(
        num_hidden_layers=10, hidden_size=4096, head_dim=128, num_key_value_heads=8
    ).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


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
