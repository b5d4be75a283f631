"""HCCL between the NPUs of two processes: what is read, and what becomes of a read whose peer says or sends nothing."""

import sys
from pathlib import Path

import pytest
from ascend_kv_connector import hccl, transport
from ascend_platform import extension
from harness import npus


def test_bytes_come_and_errors_do_in_time() -> None:
    done = npus.run(2, sys.executable, str(Path(__file__).parent / "run_hccl_reads.py"), VLLM_PLUGINS="", timeout=120)
    found = npus.by_name(done)
    right = {"some": 4, "after a refusal": 1, "after nothing was sent": 1, "after it was stopped": 1}
    assert found["read"]["right"] == {name: [True] * count for name, count in right.items()}
    assert (found["not registered here"]["cause"], found["not registered here"]["quarantine"]) == (
        "memory that is not registered",
        "0",
    )
    assert (found["not registered there"]["kind"], found["not registered there"]["quarantine"]) == ("transport", "0")
    assert "bytes were asked for that are in no buffer there" in found["not registered there"]["cause"]
    assert found["another secret"]["cause"].startswith("it does not take this instance's secret")
    assert found["another secret"]["seconds"] < 5
    assert found["nothing is sent"]["cause"] == "HCCL has not received 4194304 bytes in time"
    assert found["nothing is sent"]["quarantine"] == "60.0"
    assert found["stopped"]["cause"].startswith("no answer in ")
    for name in ("nothing is sent", "stopped"):
        assert 0.4 < found[name]["seconds"] < 5
    assert found["killed"]["kind"] in ("peer", "transport")  # whichever is the first to notice, the connection or HCCL
    assert found["killed"]["seconds"] < 5
    assert (found["killed"]["sum"], found["killed"]["closed"] < 10) == (4950, True)
    assert (found["gone"]["kind"], found["gone"]["cause"][:18]) == ("peer", "it does not listen")


def test_it_is_refused_without_ascend_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_offers", {})
    with pytest.raises(extension.RefusedError, match=r"run: pip install ascend-communicator, and have ascend_communicator in"):
        transport.check("hccl")
    assert hccl.HcclTransport.on_device
