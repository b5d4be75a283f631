"""Statistics of transfers for vLLM's log and Prometheus (``vllm/distributed/kv_transfer/kv_connector/v1/metrics.py``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from ascend_kv_connector.errors import KINDS
from ascend_kv_connector.transfers import Done, Failed

BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


@dataclass
class TransferStats(KVConnectorStats):
    """``data``: seconds and bytes of each completed transfer, failures by kind, and expired leases."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {"seconds": [], "bytes": [], "failed": {}, "expired": 0}

    def add(self, outcome: Done | Failed) -> None:
        if isinstance(outcome, Done):
            self.data["seconds"].append(outcome.seconds)
            self.data["bytes"].append(outcome.size)
        else:
            self.data["failed"][outcome.kind] = self.data["failed"].get(outcome.kind, 0) + 1

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        for key in ("seconds", "bytes", "expired"):
            self.data[key] += other.data[key]
        for kind, count in other.data["failed"].items():
            self.data["failed"][kind] = self.data["failed"].get(kind, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds, size = self.data["seconds"], sum(self.data["bytes"])
        reduced: dict[str, int | float] = {"Done": len(seconds)}
        if seconds:
            reduced |= {"Mean (s)": round(sum(seconds) / len(seconds), 4), "Longest (s)": round(max(seconds), 4)}
            reduced |= {"MiB": round(size / 2**20, 1)}
        reduced |= {f"Failed ({kind})": count for kind, count in self.data["failed"].items()}
        return reduced | ({"Leases expired": self.data["expired"]} if self.data["expired"] else {})


class TransferMetrics(KVConnectorPromMetrics):
    """Prometheus metrics per engine, listed in the README."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        name = "vllm:ascend_kv_"
        self._seconds = metric_types[Histogram](
            name=f"{name}transfer_seconds", documentation="Completed KV transfers", buckets=BUCKETS, labelnames=labelnames
        )
        self._bytes = metric_types[Counter](
            name=f"{name}transfer_bytes", documentation="Bytes of KV cache received", labelnames=labelnames
        )
        self._failures = metric_types[Counter](
            name=f"{name}transfer_failures", documentation="Failed KV transfers by cause", labelnames=[*labelnames, "cause"]
        )
        self._expired = metric_types[Counter](
            name=f"{name}leases_expired", documentation="Prompts whose lease expired unread", labelnames=labelnames
        )
        for values in per_engine_labelvalues.values():
            for kind in KINDS:
                self._failures.labels(*values, kind)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for seconds in transfer_stats_data["seconds"]:
            self._seconds.labels(*values).observe(seconds)
        self._bytes.labels(*values).inc(sum(transfer_stats_data["bytes"]))
        self._expired.labels(*values).inc(transfer_stats_data["expired"])
        for kind, count in transfer_stats_data["failed"].items():
            self._failures.labels(*values, kind).inc(count)
