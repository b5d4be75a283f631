# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Requirements of an engine with several ranks that this machine lacks: NPUs in
ASCEND_RT_VISIBLE_DEVICES, and
the address of its sockets."""

import errno
import os
import socket

import pytest
from ascend_platform import host
from ascend_platform.config import devices
from ascend_platform.process import sockets
from vllm.config import ParallelConfig


@pytest.mark.parametrize(
    ("variable", "needed", "message"),
    [
        ("0, 1", 2, "='0, 1' leaves 1 of 1 NPUs: .*; fix: export ASCEND_RT_VISIBLE_DEVICES=0$"),
        ("0", 2, "1 are visible; fix: lower "),
    ],
)
def test_list_of_npus_that_is_not_used_as_a_whole_is_named(monkeypatch, variable, needed, message):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", variable)
    parallel = ParallelConfig(tensor_parallel_size=needed, distributed_executor_backend="mp")
    with pytest.raises(ValueError, match=rf"the layout needs {needed} NPUs .*{message}"):
        devices.check(parallel)


def test_device_ids_that_the_machine_does_not_have(monkeypatch):
    monkeypatch.setattr(host, "npu_count", lambda: (4, ""))
    devices.check(ParallelConfig(assigned_physical_gpu_ids=[3]))
    line = "--device-ids names NPU 4, 9, and this machine has 4; fix: choose among 0 to 3"
    with pytest.raises(ValueError, match=line):
        devices.check(ParallelConfig(assigned_physical_gpu_ids=[0, 4, 9]))


def test_ranks_on_a_machine_without_loopback_are_refused(monkeypatch):
    one, *several = (
        ParallelConfig(),
        ParallelConfig(tensor_parallel_size=2),
        ParallelConfig(data_parallel_size=2),
    )

    def bind(self, address):
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))

    monkeypatch.setattr(socket.socket, "bind", bind)
    sockets.check_loopback(one)
    for parallel in several:
        with pytest.raises(
            ValueError, match=r"has no address 127\.0\.0\.1 .*; fix: ip link set lo up"
        ):
            sockets.check_loopback(parallel)
