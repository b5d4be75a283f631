# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Worker methods other than steps, through vLLM's API: profiles, metrics, weight checksums, sharded
state."""

import sys
from typing import Any

import pytest
from harness import checkout
from harness.engines import npus

ADDER = checkout.ADDER


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    program = checkout.PROGRAMS / "call_worker.py"
    done = npus.run(
        1,
        sys.executable,
        str(program),
        str(ADDER),
        str(tmp_path_factory.mktemp("worker")),
        VLLM_PLUGINS="",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (record,) = npus.results(done.stdout)
    return dict(record)


def test_profiler_session_has_a_trace_with_operators_and_steps(
    result: dict[str, Any],
) -> None:
    first, second = result["profiles"]
    assert first.startswith("first_")
    assert second.startswith("second_")
    for names in result["recorded"]:
        assert any("npu_fused_infer_attention_score" in name for name in names)
        assert any(name.startswith("execute") for name in names)  # vLLM's annotation of a step


def test_npu_metrics_are_reported(result: dict[str, Any]) -> None:
    metrics = result["metrics"]
    assert {str(labels) for labels, _ in metrics.values()} == {
        "{'engine': '0', 'rank': '0', 'device': '0'}"
    }
    values = {name: value for name, (_, value) in metrics.items()}
    free, total = result["memory"]
    assert values["memory_total_bytes"] == total
    assert (
        0
        < values["memory_allocated_bytes"]
        <= values["memory_reserved_bytes"]
        <= values["memory_used_bytes"]
        <= total
    )
    assert values["memory_used_bytes"] == pytest.approx(total - free, rel=0.2)
    assert 0 <= values["utilization_ratio"] <= 1


def test_allocator_segments_grow_by_default(result: dict[str, Any]) -> None:
    assert result["expandable"]
    assert all(result["expandable"])


def test_weights_come_back_from_the_checkpoint(result: dict[str, Any]) -> None:
    assert len(result["checksums"]) > 10
    assert result["checksums reset"] != result["checksums"] == result["checksums reloaded"]
    assert result["tokens reset"] != result["tokens"] == result["tokens reloaded"]


def test_sharded_state_holds_the_weights_of_the_worker(result: dict[str, Any]) -> None:
    assert len(result["saved"]) > 10
    assert all(result["saved"].values())


def test_other_methods_answer_or_are_refused(result: dict[str, Any]) -> None:
    assert result["answers"] == [None] * 4
    assert "generate" in result["tasks"]
    assert "Qwen3ForCausalLM" in result["inspection"] or "Llama" in result["inspection"]
    assert "cannot be checkpointed" in result["checkpoint"]
