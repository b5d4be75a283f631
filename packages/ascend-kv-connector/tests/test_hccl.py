"""HCCL transport between two processes: reads, and reads whose peer sends or replies nothing."""

import sys
from pathlib import Path

import pytest
from ascend_platform import extension
from ascend_platform.components import slots
from ascend_platform.transfer import engine, hccl
from harness import npus


def test_reads_succeed_and_failures_are_bounded_in_time() -> None:
    done = npus.run(2, sys.executable, str(Path(__file__).parent / "run_hccl_reads.py"), VLLM_PLUGINS="", timeout=120)
    found = npus.by_name(done)
    right = {"some": 4, "after a refusal": 1, "after nothing was sent": 1, "after it was stopped": 1}
    assert found["read"]["right"] == {name: [True] * count for name, count in right.items()}
    assert (found["not registered here"]["cause"], found["not registered here"]["quarantine"]) == (
        "the memory is not registered",
        "0",
    )
    assert (found["not registered there"]["kind"], found["not registered there"]["quarantine"]) == ("transport", "0")
    assert "bytes were requested outside of the peer's registered memory" in found["not registered there"]["cause"]
    assert found["another secret"]["cause"].startswith("authentication failed: the secrets differ")
    assert found["another secret"]["seconds"] < 5
    assert found["nothing is sent"]["cause"] == "HCCL did not receive 4194304 bytes in time"
    assert found["nothing is sent"]["quarantine"] == "60.0"
    assert found["stopped"]["cause"].startswith("no answer in ")
    for name in ("nothing is sent", "stopped"):
        assert 0.4 < found[name]["seconds"] < 5
    assert found["killed"]["kind"] in ("peer", "transport")  # whichever notices first, the connection or HCCL
    assert found["killed"]["seconds"] < 5
    assert (found["killed"]["sum"], found["killed"]["closed"] < 10) == (4950, True)
    assert (found["gone"]["kind"], found["gone"]["cause"][:18]) == ("peer", "nothing listens at")


def test_hccl_is_refused_without_ascend_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_offers", {})
    with pytest.raises(extension.RefusedError, match=r"fix: pip install ascend-communicator, and add ascend_communicator to"):
        engine.check("hccl", "transport")
    assert hccl.HcclEngine.on_device
