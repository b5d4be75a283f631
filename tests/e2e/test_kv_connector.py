# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""KV transfer between two engines, and a pool of KV cache that outlives its engine, both over real
Mooncake."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import checkout
from harness.engines import npus
from harness.engines.vllm_runner import IS_V2
from harness.models.decoders import qwen3

pytest.importorskip(
    "mooncake.engine",
    exc_type=ImportError,
    reason="Mooncake lacks a library: apt-get install libibverbs1",
)


@pytest.mark.slow
def test_tokens_of_prefill_and_decode_instances_match_one_engine(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    case: dict[str, Any] = {
        "model": qwen3(tmp_path),
        "prefill": {"devices": "0"},
        "decode": {"devices": "1"},
    }
    # MultiConnector, with OffloadingConnector in it
    case["decode"]["tiers"] = {"cpu_bytes_to_use": 200 << 20}
    case |= {
        "pull": 20,
        "layerwise": 20,
        "kill": 16,
        "transfer": {"secret_file": str(tmp_path / "secret")},
    }
    (tmp_path / "secret").write_text("what both instances have")
    program = [sys.executable, str(checkout.PROGRAMS / "serve_kv_transfer.py"), json.dumps(case)]
    done = npus.run(2, *program, memory="4GiB", VLLM_HOST_IP="127.0.0.1", VLLM_PLUGINS="")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"model runner: V{1 + IS_V2}" in done.stdout + done.stderr
    (result,) = npus.results(done.stdout)
    print(result)
    for phase in ("pull", "layerwise"):
        record_property(f"seconds of {phase}", result[phase]["seconds"])
        assert result[phase]["blocks are free"] == [True, True]
    # Of 20 requests, two are aborted on the decode instance and one on the prefill instance.
    assert result["pull"]["ended"] == {"length": 17, "aborted": 2, "prefill aborted": 1}
    ended = result["layerwise"]["ended"]
    assert ended.pop("length") == 17
    assert set(ended) <= {"aborted", "prefill aborted", "error"}
    assert sum(ended.values()) == 3
    assert result["from host memory"]["ended"] == {"length": 20}
    for phase in ("pull", "layerwise", "from host memory", "killed"):
        assert result[phase]["different"] == []
        assert result[phase]["not transferred"] == []
    assert sum(result["killed"]["ended"].values()) == 16
    assert set(result["killed"]["ended"]) <= {"length", "error"}
    assert result["killed"]["seconds"] < 25
    assert result["killed"]["blocks are free"] == [True]


@pytest.mark.slow
def test_a_pool_outlives_its_engine(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    case = {
        "model": qwen3(tmp_path),
        "backend": "mooncake",
        "requests": 12,
        "harms": ["master killed"],
        "reload": True,
    }
    program = [sys.executable, str(checkout.PROGRAMS / "serve_kv_store.py"), json.dumps(case)]
    done = npus.run(2, *program, memory="4GiB", VLLM_HOST_IP="127.0.0.1", VLLM_PLUGINS="")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"model runner: V{1 + IS_V2}" in done.stdout + done.stderr
    (result,) = npus.results(done.stdout)
    print(result)
    assert result["filled"]["ended"] == {"length": 36}
    assert result["restart"]["not loaded"] == []
    assert result["restart"]["chunks"]["loaded (mooncake)"] > 10
    assert result["master killed"]["chunks"]["lookup unanswered (mooncake)"] > 0
    # The prompts of before with the same weights, which may be others for all that is known.
    assert "loaded (mooncake)" not in result["weights reloaded"]["chunks"]
    for phase in ("restart", "weights reloaded", "master killed"):
        record_property(f"seconds of {phase}", result[phase]["seconds"])
        assert result[phase]["ended"] == {"length": 12}
        assert result[phase]["different"] == []
        assert result[phase]["blocks are free"]
    assert result["master killed"]["seconds"] < 20  # Twelve lookups of 2 s would take 24.
    assert result["left in /dev/shm"] == []
