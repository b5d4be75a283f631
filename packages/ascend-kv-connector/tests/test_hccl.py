# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""HCCL transport between two processes: reads, and reads whose peer sends or replies nothing."""

import sys
from pathlib import Path

import pytest
from ascend_platform import extension
from ascend_platform.plugins import slots
from ascend_platform.transfer import engine, hccl
from harness import npus


def test_reads_succeed_and_failures_are_bounded_in_time() -> None:
    done = npus.run(
        2,
        sys.executable,
        str(Path(__file__).parent / "run_hccl_reads.py"),
        VLLM_PLUGINS="",
        timeout=120,
    )
    found = npus.by_name(done)
    right = {
        "some": 4,
        "from another engine": 1,
        "idle here": 3,
        "idle there": 4,
        "after a refusal": 1,
        "after nothing was sent": 1,
        "after it was stopped": 1,
    }
    right["after a link was not destroyed"] = 1
    assert found["read"]["right"] == {name: [True] * count for name, count in right.items()}
    assert found["not registered here"]["cause"] == "the memory is not registered"
    assert found["not registered there"]["kind"] == "transport"
    assert (
        "bytes were requested outside of the peer's registered memory"
        in found["not registered there"]["cause"]
    )
    assert found["another secret"]["cause"].startswith("authentication failed: the secrets differ")
    assert found["another secret"]["seconds"] < 5
    assert found["nothing is sent"]["cause"] == "HCCL did not receive 4194304 bytes in time"
    assert found["link is not destroyed"]["cause"] == "HCCL did not receive 4194304 bytes in time"
    assert [name for name, result in found.items() if not result.get("settled", True)] == [
        "link is not destroyed"
    ]
    assert found["stopped"]["cause"].startswith("no answer in ")
    for name in ("nothing is sent", "stopped"):
        assert 0.4 < found[name]["seconds"] < 5
    # Whichever notices first, the connection or HCCL.
    assert found["killed"]["kind"] in ("peer", "transport")
    assert found["killed"]["seconds"] < 5
    assert (found["killed"]["sum"], found["killed"]["closed"] < 10) == (4950, True)
    assert (found["gone"]["kind"], found["gone"]["cause"][:18]) == ("peer", "nothing listens at")


def test_hccl_is_refused_without_ascend_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_offers", {})
    with pytest.raises(
        extension.RefusedError,
        match=r"fix: pip install ascend-communicator, and add ascend_communicator to",
    ):
        engine.check("hccl", "transport")
    assert hccl.HcclEngine.on_device
