# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""CPU and memory limits of control groups, from made-up files of /proc and /sys."""

import pytest
from ascend_emulator import limits

GIB = 1 << 30


def machine(tmp_path, cgroup, files, available=64):
    """The roots of /proc and of the control groups with these files."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "meminfo").write_text(f"MemTotal: {99 << 20} kB\nMemAvailable: {available << 20} kB\n")
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(f"{text}\n")
    return proc, mount


V2 = "0::/user/pod\n"
V1 = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "cpus", "memory"),
    {
        "no limits": (
            V2,
            {"user/pod/cpu.max": "max 100000", "user/pod/memory.max": "max"},
            64,
            64 * GIB,
        ),
        "no control group": ("", {}, 64, 64 * GIB),
        "v2": (
            V2,
            {"user/pod/cpu.max": "200000 100000", "user/pod/memory.max": 4 * GIB},
            2,
            4 * GIB,
        ),
        "v2, a limit above": (
            V2,
            {"user/cpu.max": "150000 100000", "user/pod/cpu.max": "max 100000"},
            2,
            64 * GIB,
        ),
        "v2, less than one CPU": (V2, {"user/pod/cpu.max": "50000 100000"}, 1, 64 * GIB),
        "v2, in a container that sees its own group as the root": (
            V2,
            {"cpu.max": "300000 100000", "memory.max": GIB},
            3,
            GIB,
        ),
        "v1": (
            V1,
            {
                "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": 400000,
                "cpu,cpuacct/docker/abc/cpu.cfs_period_us": 100000,
                "memory/docker/abc/memory.limit_in_bytes": 2 * GIB,
            },
            4,
            2 * GIB,
        ),
        "v1, no limits": (
            V1,
            {
                "cpu/docker/abc/cpu.cfs_quota_us": -1,
                "cpu/docker/abc/cpu.cfs_period_us": 100000,
                "memory/docker/abc/memory.limit_in_bytes": 9223372036854771712,
            },
            64,
            64 * GIB,
        ),
        "v1, in a container that sees its own group as the root": (
            V1,
            {
                "cpu/cpu.cfs_quota_us": 150000,
                "cpu/cpu.cfs_period_us": 100000,
                "memory/memory.limit_in_bytes": 3 * GIB,
            },
            2,
            3 * GIB,
        ),
    }.values(),
)
def test_limits_of_control_groups(tmp_path, cgroup, files, cpus, memory):
    proc, mount = machine(tmp_path, cgroup, files)
    assert limits.cpus(proc, mount, affinity=64) == cpus
    assert limits.memory(proc, mount) == memory


def test_affinity_and_free_memory_limit_too(tmp_path):
    proc, mount = machine(
        tmp_path,
        V2,
        {"user/pod/cpu.max": "400000 100000", "user/pod/memory.max": 4 * GIB},
        available=1,
    )
    assert limits.cpus(proc, mount, affinity=3) == 3
    assert limits.memory(proc, mount) == GIB
    assert limits.cpus() >= 1
    assert limits.memory() > 0
