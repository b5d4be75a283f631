# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Launches, bytes and modelled times of a decoder layer, held against the table that
`tools/check launches` writes; host waits."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.compare import launches as table
from harness.engines import npus

CASES = ["dense", "Gemma 3", "experts, TP2 EP2"]  # tools/check launches counts the others too
# Launches of a decoder layer in a decode, at most.
MAX_LAUNCHES = {
    "dense": 12,
    "experts, TP2 EP2": 22,
    "dense, W8A8": 14,
    "experts, W8A8": 17,
    "latent attention, W8A8, mla_prolog": 10,
    "gated delta net": 25,
    "gated delta net, float32 states": 29,
    "gated delta net, experts": 36,
}
STEPS = [(name, step) for name in CASES for step in ("prefill", "decode", "mixed")]


@pytest.fixture(scope="module")
def launch_counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return table.run(CASES, tmp_path_factory.mktemp("trace"))


@pytest.mark.parametrize(("name", "step"), STEPS)
def test_launches_and_bytes_are_those_of_the_table(
    launch_counts: dict[str, Any], name: str, step: str
) -> None:
    kept, result = json.loads(table.KEPT.read_text())[name][step], launch_counts[name][step]
    assert result["launches"] == kept["launches"]
    assert result["outside"] == kept["outside"]
    # Rounding may change which experts are selected.
    assert result["bytes"] == pytest.approx(kept["bytes"], rel=0.01)
    assert (result["sent"], result["needed"]) == (kept["sent"], kept["needed"])
    assert result["modelled"] == pytest.approx(kept["modelled"], rel=0.02)
    names = ("ai_cpu", "masked", "compilations")
    assert [result[name] for name in names] == [kept[name] for name in names]
    assert (result["exposed"] > 0) == (kept["exposed"] > 0) == (result["sent"] > 0)


@pytest.mark.parametrize(("name", "step"), STEPS)
def test_not_much_more_is_moved_than_is_needed(
    launch_counts: dict[str, Any], name: str, step: str
) -> None:
    result = launch_counts[name][step]
    # It has activations besides, and a Gemma layer has four norms.
    prefill = 4.9 if name == "Gemma 3" else 4.5
    assert 0.99 <= result["bytes"] / result["needed"] < (1.15 if step == "decode" else prefill)
    assert result["sent"] == result["to send"]


@pytest.mark.parametrize(("name", "step"), STEPS)
def test_host_does_not_wait_before_the_sampled_tokens(
    launch_counts: dict[str, Any], name: str, step: str
) -> None:
    assert launch_counts[name][step]["waits"] == 0


def test_no_case_of_the_table_waits_or_computes_on_the_ai_cpu() -> None:
    """Also those that only tools/check launches counts. vLLM's BERT shifts integers to decode token
    types, once in a prefill (``_decode_token_type_ids``)."""
    kept = json.loads(table.KEPT.read_text())
    steps = {f"{name}, {step}": each for name, case in kept.items() for step, each in case.items()}
    assert [name for name, each in steps.items() if each["waits"] or each.get("ai_cpu")] == [
        "embedding (BERT), prefill"
    ]
    assert steps["embedding (BERT), prefill"]["ai_cpu"] == {"aclnnRightShift": 1}


def test_decodes_launch_no_more_than_this() -> None:
    kept = json.loads(table.KEPT.read_text())
    result = {name: sum(kept[name]["decode"]["launches"].values()) for name in MAX_LAUNCHES}
    assert {name: count for name, count in result.items() if count > MAX_LAUNCHES[name]} == {}


def test_fused_operators_before_latent_attention(tmp_path: Path) -> None:
    """They launch less, and keep the rotated elements in another order; the largest is
    an option."""
    result = table.preprocessing(tmp_path)
    counts = {name: len(way["operators"]) for name, way in result.items()}
    assert counts == {"single_operators": 8, "norm_and_cache": 6, "prolog": 1}
    assert result["norm_and_cache"]["far"] == 0
    # One rounding of values of up to 4 at another step of the computation.
    assert 0 < result["prolog"]["far"] < 0.05


def test_host_wait_is_counted(tmp_path: Path) -> None:
    """One between two operators is, and none behind the tokens' way to the host, which may be on a
    stream of its own."""
    program = """
import torch
from harness.engines import trace

def count(waits, has_stream):
    before = len(trace.events())
    x = torch.ones(8, device="npu") + 1
    if waits:
        torch.npu.current_stream().synchronize()
    tokens, stream = x + 2, torch.npu.Stream() if has_stream else torch.npu.current_stream()
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        tokens.to("cpu", non_blocking=True)
    if has_stream:
        stream.synchronize()
        tokens += 1
    return trace.summary(trace.events()[before:-1])["waits"]

print("WAITS", [count(waits, has_stream) for has_stream in (False, True) for waits in (False, True)])
"""
    trace = str(tmp_path / "trace.json")
    done = npus.run(1, sys.executable, "-c", program, VLLM_PLUGINS="", ASCEND_EMULATOR_TRACE=trace)
    assert "WAITS [0, 1, 0, 1]" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
