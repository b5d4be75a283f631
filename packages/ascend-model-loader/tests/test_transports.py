"""Pieces over HCCL and Mooncake: right bytes, and a server that is stopped or killed between a piece's header and its bytes."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_platform import extension
from harness import npus
from harness.weights.peers import as_bytes, room, weights

PROGRAM = Path(__file__).with_name("transport_cases.py")
NAMES = ["hccl", "mooncake"]


@pytest.fixture(scope="module")
def played() -> dict[str, Any]:
    pytest.importorskip("mooncake.engine", exc_type=ImportError, reason="Mooncake lacks a library: apt-get install libibverbs1")
    done = npus.run(2, sys.executable, str(PROGRAM), timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    (found,) = npus.results(done.stdout)
    return dict(found)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_the_peers_also_after_a_client_that_has_gone(played: dict[str, Any], name: str) -> None:
    found = played[name]
    assert (found["whole"]["error"], found["whole"]["arrived"]) == ("", 1)
    assert found["whole"]["phases"] == ["manifest", f"peer to NPU, {name}"]
    assert re.match(f"by {name}: (the peer |mooncake's read |HCCL has failed)", found["the control ends"]["error"])
    assert found["and again"]["error"] == ""


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_meet_its_checksum_is_not_taken(played: dict[str, Any], name: str) -> None:
    assert "does not meet its checksum" in played[name]["changed since"]["error"]


@pytest.mark.parametrize(
    ("name", "case", "said", "seconds"),
    [
        ("hccl", "stopped", "by hccl: the peer sent nothing for 1 s", 4),
        ("hccl", "killed", "by hccl: (the peer |HCCL has failed: )", 4),
        ("mooncake", "stopped", r"by mooncake: (mooncake's read of \d+ bytes has failed|the peer sent nothing)", 9),
        ("mooncake", "killed", "by mooncake: (mooncake's read|the peer )", 9),
    ],
)
def test_peer_that_ends_between_header_and_bytes_is_a_line_in_time(
    played: dict[str, Any], name: str, case: str, said: str, seconds: float
) -> None:
    found = played[name][case]
    assert re.match(said, found["error"]), found
    assert "\n" not in found["error"]
    assert found["seconds"] < seconds
    assert found["right"]
    assert 0.1 < found["arrived"] < 0.95


@pytest.mark.parametrize("name", NAMES)
def test_next_transport_is_tried_where_a_peer_does_not_serve_one(played: dict[str, Any], name: str) -> None:
    found = played[name]["the next transport"]
    assert (found["error"], found["arrived"]) == ("", 1)
    assert found["phases"] == ["manifest", f"peer to NPU, {name} (failed)", "peer to NPU"]


@pytest.mark.parametrize(
    ("transport", "said"),
    [
        ("hccl", "by hccl: hccl moves bytes between NPUs, and the weights are on cpu, by tcp: it"),
        ("mooncake", "by mooncake: it answers: pieces are served by tcp, not by mooncake, by tcp: it"),
    ],
)
def test_transport_that_cannot_be_is_a_reason_in_the_line(serving: Any, transport: str, said: str) -> None:
    served = serving()
    into = room()
    served.fetch(into, transport=(transport, "tcp"))
    assert as_bytes(into) == as_bytes(weights())
    served.server.gate.shut(1)
    with pytest.raises(Exception, match="asleep"):
        served.fetch(into, transport=(transport, "tcp"))


def test_mooncake_that_is_not_installed_is_a_clear_line(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Exception, match=r"^by mooncake: Mooncake's transfer engine is not installed; run: pip install mooncake"):
        serving().fetch(room(), transport="mooncake")


def test_hccl_that_is_not_offered_is_a_clear_line(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(extension._offers, "hccl.link", raising=False)
    served = serving(device="npu")
    served.device = torch.device("npu", 0)
    with pytest.raises(Exception, match=r"^by hccl: hccl is ascend-communicator's, which is "):
        served.fetch(room("npu"), transport="hccl")
