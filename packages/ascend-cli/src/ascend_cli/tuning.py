# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Checks of what makes serving slow or unstable without an error: settings of HCCL, torch_npu, CANN
and the installation."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ascend_platform import extension
from ascend_platform.extension import installation

from ascend_cli.figures import figures_of
from ascend_cli.result import Result, fail, ok, warn

CANN_OF_TORCH_NPU = {"2.13": (9, 1), "2.14": (9, 1)}
"""The oldest CANN by torch_npu's minor version; 2.12 is released for 9.1 (COMPATIBILITY.md of
Ascend/pytorch)."""

EXPANSION_MODES = ("AIV", "AI_CPU", "HOST", "HOST_TS", "CCU_MS", "CCU_SCHED")
"""Values of HCCL_OP_EXPANSION_MODE (CANN's reference of environment variables)."""

CPUS = Path("/sys/devices/system/cpu")
BUFFER, COMMUNICATORS, SHARE = 200, 4, 0.1
"""HCCL's default buffer in MiB, the communicators of a layout with tensor, data, expert and
pipeline parallelism, and the part of an NPU's memory that their buffers may have without a warning.
"""


def cann_for_torch_npu(cann: str) -> Iterator[Result]:
    """Whether CANN is as new as torch_npu wants it."""
    torch_npu = extension.version("torch-npu")
    wanted = CANN_OF_TORCH_NPU.get(".".join(torch_npu.split(".")[:2]))
    found = re.match(r"(\d+)\.(\d+)", cann)
    if wanted and found and (int(found[1]), int(found[2])) < wanted:
        newer = ".".join(map(str, wanted))
        found_text = f"torch_npu {torch_npu} is for CANN {newer}, found {cann}"
        yield warn("CANN for torch_npu", found_text, f"install CANN {newer}")


def task_queue() -> Iterator[Result]:
    """TASK_QUEUE_ENABLE, of torch_npu."""
    name, value = "TASK_QUEUE_ENABLE", os.environ.get("TASK_QUEUE_ENABLE")
    if value == "2":
        fix = f"export {name}=1, or serve with --enforce-eager"
        yield warn(name, "2: torch_npu captures no graphs with it", fix)
    elif value == "0":
        found = "0: each operator is launched by the thread that calls it, which is slower"
        yield warn(name, found, f"unset {name}")
    elif value not in (None, "1"):
        yield fail(name, f"{value!r} is not 0, 1 or 2", f"unset {name}")


def launch_blocking() -> Iterator[Result]:
    """ASCEND_LAUNCH_BLOCKING, of torch_npu."""
    name = "ASCEND_LAUNCH_BLOCKING"
    if os.environ.get(name) == "1":
        found = "1: the host waits for each operator, and full graphs are refused"
        yield warn(name, found, f"unset {name}, or serve with --enforce-eager")


def streams_of_graphs() -> Iterator[Result]:
    """Whether the versions of driver and CANN limit the number of graphs."""
    driver = installation.driver_version()
    if driver and not installation.reuses_streams():
        newer = " and ".join(
            f"{name} {'.'.join(map(str, version))}"
            for name, version in installation.REUSE_STREAMS.items()
        )
        versions = f"driver {driver}, CANN {installation.cann_version() or 'unknown'}"
        found = (
            f"{versions}: each graph keeps streams of the NPU, so that fewer sizes may be captured"
        )
        yield warn("streams of graphs", found, f"install {newer} or later")


def hccl(npus: int) -> Iterator[Result]:
    """HCCL_OP_EXPANSION_MODE, HCCL_BUFFSIZE, and HCCL_EXEC_TIMEOUT beside vLLM's timeout."""
    name, mode = "HCCL_OP_EXPANSION_MODE", os.environ.get("HCCL_OP_EXPANSION_MODE")
    if mode is not None and mode not in EXPANSION_MODES:
        yield fail(name, f"{mode!r}; supported: {', '.join(EXPANSION_MODES)}", f"unset {name}")
    elif mode == "AIV" and npus > 1:
        why = "is only for tensor parallelism: several groups of ranks of an NPU may hang with it"
        yield ok(name, f"AIV, which {why}")
    elif mode is not None:
        yield ok(name, mode)
    yield from _timeouts()
    yield from _buffers(os.environ.get("HCCL_BUFFSIZE"))


def _timeouts() -> Iterator[Result]:
    """Whether vLLM ends a step before HCCL names the rank that a collective waits for."""
    names, (step, collective) = zip(*installation.timeouts().items(), strict=True)
    if names[0] in os.environ and step <= collective:
        found = f"{step} s: a step ends before a collective does ({collective} s)"
        why = "whose error names the rank that is missing"
        yield warn(names[0], f"{found}, {why}", f"unset {names[0]}, or set a smaller {names[1]}")


def _buffers(value: str | None) -> Iterator[Result]:
    if value is None:
        return
    if not value.isdigit() or int(value) < 1:
        fix = f"unset HCCL_BUFFSIZE (its default is {BUFFER})"
        yield fail("HCCL_BUFFSIZE", f"{value!r} is not a number of MiB", fix)
        return
    taken, figures = 2 * int(value) * COMMUNICATORS / 1024, figures_of(installation.chip_name())
    with_all = f"an NPU with {COMMUNICATORS} communicators, each with two buffers"
    found = f"{value} MiB: {taken:.1f} GiB of {with_all}"
    if figures and taken > SHARE * figures.memory_gib:
        fix = (
            "set a size for single groups (ascend.communicator.groups), or a smaller HCCL_BUFFSIZE"
        )
        yield warn("HCCL_BUFFSIZE", f"{found}, which the KV cache lacks", fix)
    else:
        yield ok("HCCL_BUFFSIZE", found)


def cpu_governor(cpus: Path = CPUS) -> Iterator[Result]:
    """Whether the CPUs run at full speed: decoding waits for the host, which launches the
    operators."""
    files = cpus.glob("cpu[0-9]*/cpufreq/scaling_governor")
    governors = Counter(file.read_text().strip() for file in files)
    if slow := {name: count for name, count in governors.items() if name != "performance"}:
        found = ", ".join(f"{name} on {count} CPUs" for name, count in slow.items())
        fix = "cpupower frequency-set -g performance"
        yield warn("CPU governor", f"{found}: launching operators is slower", fix)
    elif governors:
        yield ok("CPU governor", "performance")


def vllm_ascend() -> Iterator[Result]:
    """Files that vllm-ascend leaves behind; see ``checks.installed_plugins`` for the wheel
    itself."""
    name = "ASCEND_CUSTOM_OPP_PATH"
    every = os.environ.get(name, "").split(":")
    paths = [path for path in every if re.search("vllm[-_]ascend", path)]
    if paths:
        kept = ":".join(path for path in every if path and path not in paths)
        found = f"CANN loads vllm-ascend's operators from {', '.join(paths)}"
        yield warn(name, found, f"export {name}={kept}" if kept else f"unset {name}")
    package = installation.package("vllm_ascend")
    if package and not extension.version("vllm-ascend"):
        found = f"{package} has files of vllm-ascend, which is not installed"
        yield warn("vllm_ascend", found, f"rm -r {package}, or take it off PYTHONPATH")
