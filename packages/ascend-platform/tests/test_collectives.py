# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""HCCL's settings that depend on the layout: time limits, and the mode of collectives."""

import os

import pytest
from ascend_platform.config import collectives
from vllm.config import ParallelConfig


@pytest.mark.parametrize(
    ("layout", "collective", "step"),
    [
        ({}, "", None),
        ({"tensor_parallel_size": 2}, "", "1956"),
        ({"tensor_parallel_size": 2}, "600", "720"),
        ({"tensor_parallel_size": 2}, "100", None),  # vLLM's 300 seconds are enough
        ({"tensor_parallel_size": 2}, "0", None),
    ],
)
def test_a_step_outlasts_a_collective(monkeypatch, layout, collective, step):
    """HCCL's error names the missing rank, vLLM's does not."""
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", collective)
    monkeypatch.setenv(collectives.STEP, "7")
    collectives.prepare(ParallelConfig(**layout))
    assert os.environ[collectives.STEP] == "7"
    monkeypatch.delenv(collectives.STEP)
    collectives.prepare(ParallelConfig(**layout))
    assert os.environ.get(collectives.STEP) == step


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ({"tensor_parallel_size": 2}, None),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "expert parallelism"),
        (
            {"data_parallel_size": 2, "enable_expert_parallel": True},
            "expert parallelism and data parallelism",
        ),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "context parallelism"),
    ],
)
def test_collectives_on_vector_cores_are_for_one_group(monkeypatch, log_lines, layout, named):
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AIV")
    monkeypatch.setenv(collectives.STEP, "2000")
    collectives.prepare(ParallelConfig(**layout))
    result = [text.split(":")[0] for _, text in log_lines if "HCCL" in text]
    assert result == ([f"HCCL_OP_EXPANSION_MODE is AIV with {named}"] if named else [])
