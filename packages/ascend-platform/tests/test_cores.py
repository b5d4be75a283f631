# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Cores of a worker's threads."""

import os
import threading

import pytest
import torch
from ascend_platform.worker import cores
from vllm.config import ParallelConfig


@pytest.mark.parametrize(
    ("nodes", "rank", "share"),
    [
        ([0, 0, 1, 1], 0, range(8)),
        ([0, 0, 1, 1], 1, range(8, 16)),
        ([0, 1, 0, 1], 3, range(8, 16)),
        ([0], 0, range(16)),
        ([1, 0, 0, 0], 2, range(5, 10)),
        ([0, 0], 2, ()),
    ],
)
def test_workers_of_a_node_share_its_cores(nodes, rank, share):
    assert list(cores.share(range(16), nodes, rank)) == list(share)


def test_launching_and_releasing_threads_have_a_core_each():
    names = {7: "VLLM::Worker_TP0", 11: "acl_thread", 8: "acl_thread", 9: "release_thread"}
    others = {0, 1, 2, 3}
    assert cores.assigned(names, range(6)) == {7: others, 11: others, 8: {5}, 9: {4}}


@pytest.mark.parametrize(
    ("layout", "variable", "is_bound"),
    [
        ({"numa_bind": True, "numa_bind_nodes": [0]}, None, True),
        ({"numa_bind": True, "numa_bind_nodes": [0]}, "1", False),
        ({}, None, False),
    ],
)
def test_threads_of_torch_npu_are_bound_by_their_names(monkeypatch, layout, variable, is_bound):
    torch.ones(4).npu().add_(1)  # starts them
    torch.npu.synchronize()
    if variable:
        monkeypatch.setenv("CPU_AFFINITY_CONF", variable)
    bound: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    cores.bind(ParallelConfig(**layout), 0)
    alone = {name(thread): own for thread, own in bound.items() if len(own) == 1}
    assert bool(bound) == is_bound
    assert bound.get(threading.get_native_id(), set(range(6))) == set(range(6))
    assert alone == ({"acl_thread": {7}, "release_thread": {6}} if is_bound else {})


def name(thread: int) -> str:
    return (cores.THREADS / str(thread) / "comm").read_text().strip()


def test_a_worker_of_few_cores_is_left_alone(monkeypatch, log_lines):
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", None)
    cores.bind(ParallelConfig(numa_bind=True, numa_bind_nodes=[0]), 0)
    assert "threads are not bound to cores: 3 cores for a worker" in [text for _, text in log_lines]
