# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Metrics of NPUs: each fails independently, and files that vanish do not end their collection."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from ascend_platform.observability import metrics

SCRIPT = """
import json, torch
from ascend_platform.observability import metrics
kept = torch.zeros(1000, device="npu")
failed = set()
print("RESULT", json.dumps([metrics.measured(0, failed), sorted(failed), metrics.measured(0, failed)]))
"""


def test_each_case_fails_separately_and_once() -> None:
    """Reading the utilization is refused, as in a container that may not."""
    emulator = [
        sys.executable,
        "-m",
        "ascend_emulator.cli",
        "run",
        "--without",
        "aclrtGetDeviceUtilizationRate",
        "--",
    ]
    done = subprocess.run(
        [*emulator, sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    values, failed, again = json.loads(line.removeprefix("RESULT"))
    assert failed == ["vllm:npu_utilization_ratio"]
    assert set(values) == set(again) == set(metrics.GAUGES) - set(failed)
    assert (
        4000
        <= values["vllm:npu_memory_allocated_bytes"]
        <= values["vllm:npu_memory_reserved_bytes"]
    )
    assert (
        values["vllm:npu_memory_reserved_bytes"]
        <= values["vllm:npu_memory_used_bytes"]
        < values["vllm:npu_memory_total_bytes"]
    )


class Config(SimpleNamespace):
    """The part of vLLM's configuration that a reading needs."""


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Config:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    config = Config(instance_id="a", parallel_config=SimpleNamespace(data_parallel_index=0))
    monkeypatch.setattr(metrics, "_configs", [lambda: config])
    return config


def test_missing_files_and_metrics_do_not_end_collection(config: Config, tmp_path: Any) -> None:
    directory = tmp_path / "npus-a"
    directory.mkdir()
    (directory / "0-0-0").symlink_to(directory / "gone")
    metrics._file_writer(directory / "0-1-1", ["0", "1", "1"])({"vllm:npu_memory_total_bytes": 5.0})
    (family,) = metrics.Collector().collect()
    (sample,) = family.samples
    assert (sample.name, sample.value, sample.labels["device"]) == (
        "vllm:npu_memory_total_bytes",
        5.0,
        "1",
    )


def test_process_without_the_main_process_has_its_own_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """As with external_launcher, or on another node, which has no such directory and must not keep
    one."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path / "of another node"))
    directory = metrics._directory()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "of another node").exists()


def test_directory_removed_by_the_main_process_is_no_error(tmp_path: Any) -> None:
    write = metrics._file_writer(tmp_path / "removed" / "0-1-1", ["0", "1", "1"])
    write({"vllm:npu_memory_total_bytes": 5.0})
    assert not list(tmp_path.iterdir())
