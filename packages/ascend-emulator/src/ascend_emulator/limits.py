# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""CPU and memory of this process: affinity, available memory, control groups (v1 and v2), and
vector unit."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def _cgroup_files(controller: str, name: str, proc: Path, mount: Path) -> Iterator[str]:
    """Contents of a limit's file in this process's control group and its ancestors."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has one hierarchy and no controllers here, and version 1 one directory per controller.
        # In containers the path may be the host's.
        for root in [mount] if not controllers else [mount / controllers, mount / controller]:
            group = root / path.lstrip("/")
            for directory in [group, *group.parents]:
                if directory.is_relative_to(root) and (directory / name).is_file():
                    yield (directory / name).read_text().strip()


def cpus(proc: Path = PROC, mount: Path = CGROUPS, affinity: int | None = None) -> int:
    """Number of CPUs that this process may use, rounded up."""
    numbers = [float(affinity or len(os.sched_getaffinity(0)))]
    for text in _cgroup_files("cpu", "cpu.max", proc, mount):
        quota, _, period = text.partition(" ")
        if quota != "max":
            numbers.append(int(quota) / int(period or 100_000))
    quotas = _cgroup_files("cpu", "cpu.cfs_quota_us", proc, mount)
    periods = _cgroup_files("cpu", "cpu.cfs_period_us", proc, mount)
    numbers += [
        int(quota) / int(period)
        for quota, period in zip(quotas, periods, strict=False)
        if int(quota) > 0
    ]
    return max(1, math.ceil(min(numbers)))


def memory(proc: Path = PROC, mount: Path = CGROUPS) -> int:
    """Available memory in bytes, at most the control groups' limits."""
    available = next(
        int(line.split()[1]) * 1024
        for line in (proc / "meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    limits = [*_cgroup_files("memory", "memory.max", proc, mount)]
    limits += _cgroup_files("memory", "memory.limit_in_bytes", proc, mount)
    return min([available, *(int(limit) for limit in limits if limit != "max")])


def vector_unit(environ: Mapping[str, str], proc: Path = PROC) -> str:
    """Vector unit that the kernels use, by which sums differ in their order: AVX512_BF16, AVX512,
    AVX2 or generic.

    The rules are those of ``vector_unit()`` in csrc/core/vector_unit.cpp, which asks ATen.
    """
    line = re.search(r"^flags\s*:(.*)$", (proc / "cpuinfo").read_text(), re.MULTILINE)
    flags = set(line[1].split()) if line else set()
    chosen = environ.get("ATEN_CPU_CAPABILITY", "")
    if chosen == "default" or not {"avx2", "fma"} <= flags:
        return "generic"
    if chosen == "avx2" or not {"avx512f", "avx512vl", "avx512bw", "avx512dq"} <= flags:
        return "AVX2"
    avoided = environ.get("ONEDNN_MAX_CPU_ISA") in ("AVX512_CORE", "AVX512_CORE_VNNI")
    return "AVX512_BF16" if "avx512_bf16" in flags and not avoided else "AVX512"
