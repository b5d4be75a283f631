"""Prometheus metrics of each NPU's memory and utilization, beside vLLM's own.

vLLM has no way from a worker's device to the process that answers ``/metrics``. With one such process, workers write a small file
every few seconds, which it reads when it is asked; workers on other machines are not seen. With several, the way is by files of
prometheus_client (``PROMETHEUS_MULTIPROC_DIR``, which vLLM sets then).
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
"""Seconds between two looks at the device, and after which a file is nobody's."""

GAUGES = {
    "vllm:npu_memory_used_bytes": "Memory of the NPU that is in use, by all processes.",
    "vllm:npu_memory_total_bytes": "Memory of the NPU.",
    "vllm:npu_memory_allocated_bytes": "Memory of the worker's tensors, by torch_npu's caching allocator.",
    "vllm:npu_memory_reserved_bytes": "Memory that the worker's caching allocator holds.",
    "vllm:npu_utilization_ratio": "Utilization of the NPU, 0 to 1, by aclrtGetDeviceUtilizationRate.",
}
LABELS = ("engine", "rank", "device")
"""The data-parallel engine's index, the worker's rank in it, and its NPU's index among those that are visible."""

_configs: list[weakref.ref[VllmConfig]] = []  # of engines that this process made


class Collector:
    """What the workers of this process's engines have written last, for ``prometheus_client.REGISTRY``."""

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
    """Let this process's ``/metrics``, and ``LLM.get_metrics``, have the NPUs of this engine's workers."""
    if not _configs:
        from prometheus_client import REGISTRY

        REGISTRY.register(Collector())
    _configs.append(weakref.ref(config))


def report(config: VllmConfig, rank: int, device: int) -> Callable[[], None]:
    """Tell of a worker's NPU from now on, in a thread of its own, until the function that is returned is called.

    Args:
        rank: of the worker in its engine.
        device: the NPU's index among those that are visible.
    """
    labels = [str(config.parallel_config.data_parallel_index), str(rank), str(device)]
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        tell = _by_gauges(labels)
    else:
        directory = _base() / f"npus-{config.instance_id}"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        tell = _by_file(directory / "-".join(labels), labels)
    ended = threading.Event()
    thread = threading.Thread(target=_keep_telling, args=(tell, device, ended), name="npu-metrics", daemon=True)
    thread.start()
    return functools.partial(_end, thread, ended)


def measured(device: int) -> dict[str, float]:
    """The metrics of an NPU that this process has open."""
    import torch

    free, total = torch.npu.mem_get_info(device)
    values = (total - free, total, torch.npu.memory_allocated(device), torch.npu.memory_reserved(device))
    return dict(zip(GAUGES, [*values, torch.npu.utilization(device) / 100], strict=True))


def _keep_telling(tell: Callable[[dict[str, float]], None], device: int, ended: threading.Event) -> None:
    try:
        import torch

        torch.npu.set_device(device)
        while True:
            tell(measured(device))
            if ended.wait(INTERVAL):
                return
    except Exception as error:
        extension.logger.warning("no more metrics of NPU %d: %s: %s", device, type(error).__name__, error)


def _end(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    thread.join(timeout=2)


def _by_gauges(labels: list[str]) -> Callable[[dict[str, float]], None]:
    from prometheus_client import Gauge

    gauges = {name: Gauge(name, text, LABELS, multiprocess_mode="livemostrecent") for name, text in GAUGES.items()}

    def tell(values: dict[str, float]) -> None:
        for name, value in values.items():
            gauges[name].labels(*labels).set(value)

    return tell


def _by_file(file: Path, labels: list[str]) -> Callable[[dict[str, float]], None]:
    part = file.with_suffix(".part")

    def tell(values: dict[str, float]) -> None:
        part.write_text(json.dumps({"labels": labels, "values": values}))
        part.replace(file)

    return tell


def _base() -> Path:
    """Where ``vllm``'s own sockets are: the main process's, which goes with it."""
    return Path(os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir())


def _files() -> Iterator[Path]:
    for config in filter(None, (each() for each in _configs)):
        for file in sorted(_base().glob(f"npus-{config.instance_id}*/*[0-9]")):
            if time.time() - file.stat().st_mtime < STALE:
                yield file
