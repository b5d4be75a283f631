"""Prometheus metrics of each NPU's memory and utilization, beside vLLM's own.

vLLM has no path for device metrics from a worker to the process that serves ``/metrics``. With one API server process, each
worker writes a small file every few seconds, which that process reads on request; workers on other machines are not included.
With several API server processes, prometheus_client's multiprocess files are used (vLLM sets ``PROMETHEUS_MULTIPROC_DIR`` then).
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ascend_platform import extension

if TYPE_CHECKING:
    from prometheus_client import Metric
    from vllm.config import VllmConfig

INTERVAL, STALE = 5.0, 60.0
"""Seconds between two measurements, and the age in seconds at which a file is ignored."""

GAUGES = {
    "vllm:npu_memory_used_bytes": "Used memory of the NPU, by all processes.",
    "vllm:npu_memory_total_bytes": "Total memory of the NPU.",
    "vllm:npu_memory_allocated_bytes": "Memory allocated to tensors of the worker by torch_npu's caching allocator.",
    "vllm:npu_memory_reserved_bytes": "Memory reserved by the worker's caching allocator.",
    "vllm:npu_utilization_ratio": "Utilization of the NPU, 0 to 1, by aclrtGetDeviceUtilizationRate.",
}
LABELS = ("engine", "rank", "device")
"""Index of the data-parallel engine, rank of the worker in it, index of its NPU among the visible ones."""

_configs: list[weakref.ref[VllmConfig]] = []  # of engines created in this process


class Collector:
    """Collector for ``prometheus_client.REGISTRY`` of the latest files of the workers of this process's engines."""

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        found = [json.loads(file.read_text()) for file in _files()]
        for name, text in GAUGES.items() if found else ():
            family = GaugeMetricFamily(name, text, labels=LABELS)
            for each in found:
                family.add_metric(each["labels"], each["values"][name])
            yield family


def offer(config: VllmConfig) -> None:
    """Add the NPUs of this engine's workers to this process's ``/metrics`` and to ``LLM.get_metrics``."""
    if not _configs:
        from prometheus_client import REGISTRY

        REGISTRY.register(Collector())
    _configs.append(weakref.ref(config))


def report(config: VllmConfig, rank: int, device: int) -> Callable[[], None]:
    """Report the metrics of a worker's NPU from a separate thread until the returned function is called.

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
    thread = threading.Thread(target=_report_until_stopped, args=(write, device, stopped), name="npu-metrics", daemon=True)
    thread.start()
    return functools.partial(_stop, thread, stopped)


def measured(device: int) -> dict[str, float]:
    """The metrics of an NPU on which this process has a context, by name."""
    import torch

    free, total = torch.npu.mem_get_info(device)
    values = (total - free, total, torch.npu.memory_allocated(device), torch.npu.memory_reserved(device))
    return dict(zip(GAUGES, [*values, torch.npu.utilization(device) / 100], strict=True))


def _report_until_stopped(write: Callable[[dict[str, float]], None], device: int, stopped: threading.Event) -> None:
    try:
        import torch

        torch.npu.set_device(device)
        while True:
            write(measured(device))
            if stopped.wait(INTERVAL):
                return
    except Exception as error:
        extension.logger.warning("metrics of NPU %d disabled: %s: %s", device, type(error).__name__, error)


def _stop(thread: threading.Thread, stopped: threading.Event) -> None:
    stopped.set()
    thread.join(timeout=2)


def _gauge_writer(labels: list[str]) -> Callable[[dict[str, float]], None]:
    from prometheus_client import Gauge

    gauges = {name: Gauge(name, text, LABELS, multiprocess_mode="livemostrecent") for name, text in GAUGES.items()}

    def write(values: dict[str, float]) -> None:
        for name, value in values.items():
            gauges[name].labels(*labels).set(value)

    return write


def _file_writer(file: Path, labels: list[str]) -> Callable[[dict[str, float]], None]:
    part = file.with_suffix(".part")

    def write(values: dict[str, float]) -> None:
        part.write_text(json.dumps({"labels": labels, "values": values}))
        part.replace(file)

    return write


def _directory() -> Path:
    """The directory of vLLM's sockets, which the main process removes at exit."""
    return Path(os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir())


def _files() -> Iterator[Path]:
    for config in filter(None, (each() for each in _configs)):
        for file in sorted(_directory().glob(f"npus-{config.instance_id}*/*[0-9]")):
            if time.time() - file.stat().st_mtime < STALE:
                yield file
