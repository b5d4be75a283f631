# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Cores of a worker's threads."""

import multiprocessing
import os

import pytest
import torch
from ascend_platform import host
from ascend_platform.worker import cores
from vllm.config import ParallelConfig

# A machine of two NUMA nodes with 48 cores each, of four NPUs each. The second node has another device
# between them.
BUSES = {
    number: (f"0000:{bus}:00.0", number // 4)
    for number, bus in enumerate(("c1", "01", "c2", "02", "81", "41", "82", "42"))
}
CORES = {0: range(48), 1: range(48, 96)}
LINES = """
| {0}     910B3               | OK            | 91.5        35                0    / 0             |
| 0                         | {1}  | 0           0    / 0          3391 / 65536         |
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """The kernel's files of the machine."""
    kinds = {bus: (node, "0xd802") for bus, node in BUSES.values()}
    for bus, (node, kind) in (kinds | {"0000:45:00.0": (1, "0x1822")}).items():
        directory = tmp_path / "pci" / bus
        directory.mkdir(parents=True)
        for name, text in (("numa_node", node), ("vendor", "0x19e5"), ("device", kind)):
            (directory / name).write_text(f"{text}\n")
    for node, cores_of_node in CORES.items():
        (tmp_path / f"node{node}").mkdir()
        text = f"{cores_of_node[0]}-{cores_of_node[-2]},{cores_of_node[-1]}\n"
        (tmp_path / f"node{node}" / "cpulist").write_text(text)
    known = host.node_cores
    monkeypatch.setattr(host, "node_cores", lambda node: known(node, tmp_path))
    return tmp_path / "pci"


def seen(numbers):
    """The listing of npu-smi in a container with these NPUs, which it counts from 0."""
    return "".join(LINES.format(i, BUSES[number][0].upper()) for i, number in enumerate(numbers))


def circumstances(number):
    """Listings, values of ASCEND_RT_VISIBLE_DEVICES and numbers in the process that are an NPU's."""
    every = list(BUSES)
    yield seen(every), None, number
    yield seen(every), str(number), 0  # an engine for each NPU
    yield seen([number]), None, 0  # a container for each NPU
    yield seen(sorted({number, 7})), None, 0
    yield seen(sorted({0, number})), str(int(number > 0)), 0


def in_all_circumstances(machine, monkeypatch, number):
    result = []
    for listing, visible, index in circumstances(number):
        monkeypatch.delenv(host.VISIBLE_NPUS, raising=False)
        if visible is not None:
            monkeypatch.setenv(host.VISIBLE_NPUS, visible)
        places, obstacle = host.npu_places(machine, listing)
        assert obstacle == ""
        assert places[index].bus == BUSES[number][0]
        result.append(cores.shared(CORES[BUSES[number][1]], places[index]))
    return result


def test_npus_of_a_machine_have_different_cores(machine, monkeypatch):
    """Whatever a process sees of them; each pair, in each pair of circumstances."""
    shares = {number: in_all_circumstances(machine, monkeypatch, number) for number in BUSES}
    for number, share in shares.items():
        assert all(each == share[0] for each in share)
        assert len(share[0]) == 12
        assert set(share[0]) <= set(CORES[BUSES[number][1]])
    every = [core for share in shares.values() for core in share[0]]
    assert sorted(every) == list(range(96))


def test_a_process_with_a_part_of_the_cores_gets_its_share(machine, monkeypatch):
    """As with --cpuset-cpus: the rest of the node may be of other containers."""
    monkeypatch.delenv(host.VISIBLE_NPUS, raising=False)
    first, second = (host.npu_places(machine, seen([number]))[0][0] for number in (1, 3))
    assert (first.position, second.position, first.npus) == (0, 1, 4)
    assert cores.shared(range(6, 30), first) == list(range(6, 12))
    assert cores.shared(range(6, 30), second) == list(range(12, 24))
    assert cores.shared(range(48, 96), first) == []  # bound to another node by hand


def test_nodes_of_odd_numbers_and_unknown_ones(tmp_path):
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text("0-2,8,10-11\n")
    assert host.node_cores(0, tmp_path) == [0, 1, 2, 8, 10, 11]
    assert host.node_cores(1, tmp_path) == []


def test_launching_and_releasing_threads_have_a_core_each():
    """The main thread has one that no other of this process has, and threads that it starts are not
    bound to one."""
    names = {7: "VLLM::Worker_TP0", 11: "acl_thread", 8: "acl_thread", 9: "release_thread"}
    remaining = {0, 1, 2}
    expected = {7: {*remaining, 3}, 11: remaining, 8: {5}, 9: {4}}
    assert cores.assigned(names, range(6), main=7) == expected


def test_second_engine_of_an_npu_uses_other_cores_than_the_first():
    names = {7: "VLLM::Worker_TP0", 8: "acl_thread", 9: "release_thread"}
    result = cores.assigned(names, range(6), main=7, is_first=False)
    assert result == {thread: {0, 1, 2} for thread in names}


def test_the_first_process_that_binds_threads_has_the_cores():
    """Until it ends; an engine in the same process has them again."""
    bus = f"test-{os.getpid()}"

    def elsewhere():
        with multiprocessing.get_context("fork").Pool(1) as other:
            return other.apply(_claim_anew, (bus,))

    assert cores.claim(bus)
    assert cores.claim(bus)
    assert not elsewhere()
    cores._claims.pop(bus).close()
    assert elsewhere()


def _claim_anew(bus):
    cores._claims = {}
    return cores.claim(bus)


PLACE = host.NPUPlace("0000:c1:00.0", 0, 1, 2)


@pytest.mark.parametrize(
    ("layout", "variable", "share"),
    [
        ({"numa_bind": True, "numa_bind_nodes": [0]}, None, range(8, 16)),
        ({"numa_bind": True, "numa_bind_nodes": [0], "numa_bind_cpus": ["0-7"]}, None, range(8)),
        ({"numa_bind": True, "numa_bind_nodes": [0]}, "1", None),
        ({}, None, None),
    ],
)
def test_threads_of_torch_npu_are_bound_by_their_names(monkeypatch, layout, variable, share):
    torch.ones(4).npu().add_(1)  # starts them
    torch.npu.synchronize()
    if variable:
        monkeypatch.setenv("CPU_AFFINITY_CONF", variable)
    bound: dict[int, set[int]] = {}
    usable = set(share if "numa_bind_cpus" in layout else range(16))
    monkeypatch.setattr(host, "npu_places", lambda: ([PLACE], ""))
    monkeypatch.setattr(host, "node_cores", lambda node: [*range(16)])
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: usable)
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    monkeypatch.setattr(cores, "claim", lambda bus: bus == PLACE.bus)
    cores.bind(ParallelConfig(**layout), 0)
    alone = {
        name(thread): cores_of_thread
        for thread, cores_of_thread in bound.items()
        if len(cores_of_thread) == 1
    }
    assert bool(bound) == (share is not None)
    if share is not None:
        assert bound[os.getpid()] == set(share[:6])
        assert alone == {"acl_thread": {share[7]}, "release_thread": {share[6]}}


def name(thread: int) -> str:
    return (cores.THREADS / str(thread) / "comm").read_text().strip()


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (([host.NPUPlace("0000:c1:00.0", 0, 0, 1)], ""), "3 cores for a worker"),
        (([], "npu-smi info failed (x)"), "npu-smi info failed (x)"),
        (([], ""), "NPU 0 is unknown"),
    ],
)
def test_a_worker_of_few_or_unknown_cores_is_left_alone(monkeypatch, log_lines, places, message):
    monkeypatch.setattr(host, "npu_places", lambda: places)
    monkeypatch.setattr(host, "node_cores", lambda node: [0, 1, 2])
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", None)
    cores.bind(ParallelConfig(numa_bind=True, numa_bind_nodes=[0]), 0)
    assert f"threads are not bound to cores: {message}" in [text for _, text in log_lines]
