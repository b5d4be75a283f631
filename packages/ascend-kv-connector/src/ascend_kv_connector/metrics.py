# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Statistics of transfers for vLLM's log and Prometheus
(``vllm/distributed/kv_transfer/kv_connector/v1/metrics.py``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from ascend_transfer.errors import KINDS
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from ascend_kv_connector.p2p.bounded import BoundedDict
from ascend_kv_connector.p2p.transfers import Done, Failed

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


GAUGES = {
    "leases": "Prompts whose blocks are kept for decode instances",
    "oldest_lease_seconds": "Age of the oldest of these prompts",
    "send_buffers_in_use": "Send buffers that readers have",
    "fetches_waiting": "Fetches that wait for a send buffer",
    "transfers_open": "Transfers to this instance that have not ended, queued ones included",
    "unsettled_blocks": "Blocks of ended transfers that peers may still write to",
}
"""Metrics of the present state and what they mean; sums over the ranks, but the highest of ages."""

COUNTS = {
    "sent": ("sent_bytes", "Bytes of KV cache that readers have read"),
    "packed": ("packed_bytes", "Bytes of KV cache copied to send buffers"),
    "unpacked": ("unpacked_bytes", "Bytes of KV cache copied from receive buffers"),
    "messages": ("messages", "Messages that completed transfers sent to prefill instances"),
    "expired": ("leases_expired", "Prompts whose lease expired unread"),
}
"""By key of the statistics a counter's name and what it means."""


@dataclass
class TransferStats(KVConnectorStats):
    """Statistics of an interval.

    ``data``: seconds and bytes of each completed transfer and the seconds of its phases,
    :data:`COUNTS`, failures by error code, and the latest gauges by rank.
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {
            "seconds": [],
            "bytes": [],
            "phases": {},
            **dict.fromkeys(COUNTS, 0),
            "failed": {},
            "gauges": {},
        }

    def add(self, outcome: Done | Failed) -> None:
        if isinstance(outcome, Done):
            self.data["seconds"].append(outcome.seconds)
            self.data["bytes"].append(outcome.size)
            self.data["unpacked"] += outcome.copied
            self.data["messages"] += outcome.messages
            for phase, seconds in outcome.phases.items():
                self.data["phases"].setdefault(phase, []).append(seconds)
        else:
            self.data["failed"][outcome.kind] = self.data["failed"].get(outcome.kind, 0) + 1

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        for key in ("seconds", "bytes", *COUNTS):
            self.data[key] += other.data[key]
        for phase, seconds in other.data["phases"].items():
            self.data["phases"].setdefault(phase, []).extend(seconds)
        for kind, count in other.data["failed"].items():
            self.data["failed"][kind] = self.data["failed"].get(kind, 0) + count
        self.data["gauges"].update(other.data["gauges"])
        return self

    def gauges(self) -> dict[str, float]:
        """Of all ranks."""
        ranks = self.data["gauges"].values()
        by_name = {name: [rank[name] for rank in ranks if name in rank] for name in GAUGES}
        return {
            name: max(values) if "oldest" in name else sum(values)
            for name, values in by_name.items()
            if values
        }

    def reduce(self) -> dict[str, int | float]:
        seconds, size = self.data["seconds"], sum(self.data["bytes"])
        reduced: dict[str, int | float] = {"Done": len(seconds)}
        if seconds:
            reduced["Mean (s)"] = round(sum(seconds) / len(seconds), 4)
            reduced["Longest (s)"] = round(max(seconds), 4)
            reduced["MiB"] = round(size / 2**20, 1)
            for phase, each in self.data["phases"].items():
                reduced[f"Mean {phase} (s)"] = round(sum(each) / len(each), 4)
        for key in ("sent", "packed", "unpacked"):
            if self.data[key]:
                reduced[f"MiB {key}"] = round(self.data[key] / 2**20, 1)
        if self.data["messages"]:
            reduced["Messages"] = self.data["messages"]
        reduced |= {f"Failed ({kind})": count for kind, count in self.data["failed"].items()}
        reduced |= {
            name.replace("_", " ").capitalize(): value
            for name, value in self.gauges().items()
            if value
        }
        return reduced | ({"Leases expired": self.data["expired"]} if self.data["expired"] else {})


class TransferMetrics(KVConnectorPromMetrics):
    """Prometheus metrics per engine, listed in the README; the exposition adds ``_total`` to the
    names of counters."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: Any,
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def make(metric: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            options |= {"documentation": text, "labelnames": [*labelnames, *labels]}
            return metric_types[metric](name=f"vllm:ascend_kv_{name}", **options)

        text = "Completed KV transfers"
        self._seconds = make(Histogram, "transfer_seconds", text, buckets=BUCKETS)
        text = "Phases of completed KV transfers"
        self._phases = make(Histogram, "transfer_phase_seconds", text, "phase", buckets=BUCKETS)
        self._bytes = make(Counter, "transfer_bytes", "Bytes of KV cache received")
        self._counts = {key: make(Counter, name, text) for key, (name, text) in COUNTS.items()}
        self._failures = make(Counter, "transfer_failures", "Failed KV transfers by cause", "cause")
        self._gauges = {
            name: make(Gauge, name, text, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        for values in per_engine_labelvalues.values():
            for kind in KINDS:
                self._failures.labels(*values, kind)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        stats = TransferStats(data=transfer_stats_data)
        for seconds in stats.data["seconds"]:
            self._seconds.labels(*values).observe(seconds)
        for phase, times in stats.data["phases"].items():
            for seconds in times:
                self._phases.labels(*values, phase).observe(seconds)
        self._bytes.labels(*values).inc(sum(stats.data["bytes"]))
        for key, counter in self._counts.items():
            counter.labels(*values).inc(stats.data[key])
        for kind, count in stats.data["failed"].items():
            self._failures.labels(*values, kind).inc(count)
        for name, value in stats.gauges().items():
            self._gauges[name].labels(*values).set(value)


class FailureLog:
    """Limits the log lines of failures: of each producer the first :data:`MOST` in :data:`SECONDS`,
    then their number."""

    MOST, SECONDS = 3, 10.0

    def __init__(
        self, log: Callable[[str], object], clock: Callable[[], float] = monotonic
    ) -> None:
        self._log, self._clock = log, clock
        self._since: BoundedDict[tuple[float, int]] = BoundedDict(256)

    def add(self, outcome: Failed) -> None:
        now, key = self._clock(), f"{outcome.engine} {outcome.kind}"
        since, count = self._since.get(key, (now, 0))
        if now - since >= self.SECONDS:
            if count > self.MOST:
                self._log(
                    f"{count - self.MOST} more KV transfers from engine {outcome.engine} failed in"
                    f" {now - since:.0f} s ({outcome.kind})"
                )
            since, count = now, 0
        self._since[key] = since, count + 1
        if count < self.MOST:
            self._log(str(outcome))
