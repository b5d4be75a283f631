# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Level of torch_npu's task queue, which the worker sets."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ascend_platform.worker.worker import NPUWorker
from vllm.config import CUDAGraphMode


@pytest.fixture(autouse=True)
def default_level() -> Iterator[None]:
    yield
    torch.npu.set_task_queue_enable(1)


def level(mode: CUDAGraphMode, encoder: bool = False) -> int:
    compilation = SimpleNamespace(cudagraph_mode=mode, cudagraph_mm_encoder=encoder)
    model = SimpleNamespace(enforce_eager=False, is_multimodal_model=True)
    config = SimpleNamespace(compilation_config=compilation, model_config=model)
    worker: Any = SimpleNamespace(vllm_config=config)
    NPUWorker._set_task_queue(worker)
    return torch.npu.get_task_queue_enable()


def test_eager_engine_prepares_operators_in_the_launching_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TASK_QUEUE_ENABLE", raising=False)
    assert level(CUDAGraphMode.NONE) == 2
    assert level(CUDAGraphMode.NONE, encoder=True) == 1


def test_engines_with_graphs_have_the_level_that_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also after an eager engine in the same process."""
    monkeypatch.delenv("TASK_QUEUE_ENABLE", raising=False)
    assert [level(mode) for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY)] == [2, 1]
    graph = torch.npu.NPUGraph()
    x = torch.ones(4, device="npu")
    with torch.npu.graph(graph):
        x += 1
    graph.replay()
    assert x.tolist() == [2] * 4


def test_log_level_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "0")
    torch.npu.set_task_queue_enable(0)
    assert level(CUDAGraphMode.NONE) == 0
