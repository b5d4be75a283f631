# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Prometheus metrics of each NPU's memory and utilization, beside vLLM's own.

vLLM has no path for device metrics from a worker to the process that serves ``/metrics``. With one
API server process, each worker writes a small file every few seconds, which that process reads on
request; workers on other machines are not included. With several API server processes,
prometheus_client's multiprocess files are used (vLLM sets ``PROMETHEUS_MULTIPROC_DIR`` then).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_platform.logger import logger

if TYPE_CHECKING:
    from prometheus_client import Metric
    from vllm.config import VllmConfig

INTERVAL, STALE = 5.0, 60.0
"""Seconds between two measurements, and the age in seconds at which a file is ignored."""

GAUGES = {
    "vllm:npu_memory_used_bytes": "Used memory of the NPU, by all processes.",
    "vllm:npu_memory_total_bytes": "Total memory of the NPU.",
    "vllm:npu_memory_allocated_bytes": (
        "Memory allocated to tensors of the worker by torch_npu's caching allocator."
    ),
    "vllm:npu_memory_reserved_bytes": "Memory reserved by the worker's caching allocator.",
    "vllm:npu_utilization_ratio": (
        "Utilization of the NPU, 0 to 1, by aclrtGetDeviceUtilizationRate."
    ),
}
LABELS = ("engine", "rank", "device")
"""Index of the data-parallel engine, rank of the worker in it, index of its NPU among the visible
ones."""

measuring = threading.RLock()
"""Held while a thread measures, and while the caching allocator may call a function in Python.

Such a function runs while the allocator's lock is held and needs the interpreter's lock. A thread
that asks the allocator for statistics waits in the reverse order.
"""

_configs: list[weakref.ref[VllmConfig]] = []  # of engines created in this process


class Collector:
    """Collector for ``prometheus_client.REGISTRY`` of the latest files of the workers of this
    process's engines."""

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        found = list(_readings())
        for name, text in GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=LABELS)
            for each in found:
                if name in each["values"]:
                    family.add_metric(each["labels"], each["values"][name])
            if family.samples:
                yield family


def offer(config: VllmConfig) -> None:
    """Add the NPUs of this engine's workers to this process's ``/metrics`` and to
    ``LLM.get_metrics``."""
    if not _configs:
        from prometheus_client import REGISTRY

        REGISTRY.register(Collector())
    _configs.append(weakref.ref(config))


def report(config: VllmConfig, rank: int, device: int) -> Callable[[], None]:
    """Report the metrics of a worker's NPU from a separate thread until the returned function is
    called.

    Args:
        rank: of the worker in its engine.
        device: index of the NPU among the visible ones.
    """
    labels = [str(config.parallel_config.data_parallel_index), str(rank), str(device)]
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        write = _gauge_writer(labels)
    else:
        directory = _directory() / f"npus-{config.instance_id}"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write = _file_writer(directory / "-".join(labels), labels)
    stopped = threading.Event()
    thread = threading.Thread(
        target=_report_until_stopped, args=(write, device, stopped), name="npu-metrics", daemon=True
    )
    thread.start()
    return functools.partial(_stop, thread, stopped)


def measured(device: int, failed: set[str] | None = None) -> dict[str, float]:
    """The metrics of an NPU on which this process has a context, by name.

    Args:
        failed: names that are left out; those that fail are added, each with a warning. For
            example, a container may not be allowed to read the utilization.
    """
    import torch

    def total() -> int:
        return torch.npu.mem_get_info(device)[1]

    measures: dict[str, Callable[[], float]] = {
        "vllm:npu_memory_used_bytes": lambda: total() - torch.npu.mem_get_info(device)[0],
        "vllm:npu_memory_total_bytes": total,
        "vllm:npu_memory_allocated_bytes": lambda: torch.npu.memory_allocated(device),
        "vllm:npu_memory_reserved_bytes": lambda: torch.npu.memory_reserved(device),
        "vllm:npu_utilization_ratio": lambda: torch.npu.utilization(device) / 100,
    }
    failed = set() if failed is None else failed
    values = {}
    for name in [name for name in measures if name not in failed]:
        try:
            values[name] = measures[name]()
        except Exception as error:
            failed.add(name)
            text = "metric %s of NPU %d disabled: %s: %s"
            logger.warning(text, name, device, type(error).__name__, error)
    return values


def _report_until_stopped(
    write: Callable[[dict[str, float]], None], device: int, stopped: threading.Event
) -> None:
    failed: set[str] = set()
    try:
        import torch

        torch.npu.set_device(device)
        while True:
            with measuring:
                values = measured(device, failed)
            write(values)
            if stopped.wait(INTERVAL):
                return
    except Exception as error:
        logger.warning("metrics of NPU %d disabled: %s: %s", device, type(error).__name__, error)


def _stop(thread: threading.Thread, stopped: threading.Event) -> None:
    stopped.set()
    thread.join(timeout=2)


def _gauge_writer(labels: list[str]) -> Callable[[dict[str, float]], None]:
    from prometheus_client import Gauge

    gauges = {
        name: Gauge(name, text, LABELS, multiprocess_mode="livemostrecent")
        for name, text in GAUGES.items()
    }

    def write(values: dict[str, float]) -> None:
        for name, value in values.items():
            gauges[name].labels(*labels).set(value)

    return write


def _file_writer(file: Path, labels: list[str]) -> Callable[[dict[str, float]], None]:
    part = file.with_suffix(".part")

    def write(values: dict[str, float]) -> None:
        # The main process removes the directory when it exits, before its workers.
        with contextlib.suppress(FileNotFoundError):
            part.write_text(json.dumps({"labels": labels, "values": values}))
            part.replace(file)

    return write


@functools.cache
def _own_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="vllm-npus-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def _directory() -> Path:
    """The directory of vLLM's sockets, which the main process removes at exit; else one of this
    process."""
    shared = os.environ.get("VLLM_RPC_BASE_PATH")
    return Path(shared) if shared and os.path.isdir(shared) else _own_directory()


def _readings() -> Iterator[dict[str, Any]]:
    """The latest values of the workers of this process's engines. A file may be removed at any
    time."""
    for config in filter(None, (each() for each in _configs)):
        for file in sorted(_directory().glob(f"npus-{config.instance_id}*/*[0-9]")):
            try:
                if time.time() - file.stat().st_mtime < STALE:
                    yield json.loads(file.read_text())
            except FileNotFoundError:
                continue
