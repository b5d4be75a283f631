# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``vllm-ascend doctor kv --peer``: whether a prefill instance can be reached, and why not."""

import argparse
import socket
from collections.abc import Callable

import msgspec
import pytest
from ascend_kv_connector import doctor
from ascend_transfer.auth import CurveKeys
from harness.engines.ports import free_port


@pytest.fixture(autouse=True)
def _seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ASCEND_KV_SECRET", raising=False)


def titles(peer: str | None) -> list[tuple[str, str]]:
    return [
        (title, level)
        for title, level, *_ in doctor.check(argparse.Namespace(category="kv", peer=peer))
    ]


@pytest.mark.parametrize(
    ("listens", "level"), [("127.0.0.1", "ok"), ("", "warn")], ids=["loopback", "all addresses"]
)
def test_instance_that_answers(
    listens: str, level: str, instances: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance on this machine whose data port is open to others, as Mooncake's is."""
    monkeypatch.setattr(doctor, "other_addresses", lambda: ["127.0.0.2"])
    (rank,) = instances("p").produce().producers
    with socket.create_server((listens, 0)) as listener:
        session = f"127.0.0.1:{listener.getsockname()[1]}"
        rank._cache_info = msgspec.structs.replace(rank._cache_info, session=session)
        results = list(doctor.check_peer("127.0.0.1", rank.server.port, b""))
    assert [(title, level) for title, level, *_ in results] == [
        ("control port", "ok"),
        ("model", "ok"),
        ("data port", level),
    ]
    assert ("accepts connections at 127.0.0.2 too, without the secret" in results[2][2]) == (
        level == "warn"
    )
    assert (
        results[1][2]
        == "m, weights of unknown fingerprint; 4 regions of int16, 80 elements a token, read"
        " directly"
    )


def test_data_port_that_is_closed(instances: Callable) -> None:
    (rank,) = instances("p", expose_cache=False).produce().producers
    # the in-memory transport has no port
    results = list(doctor.check_peer("127.0.0.1", rank.server.port, b""))
    assert [level for _, level, *_ in results] == ["ok", "ok", "fail"]
    assert results[1][2].endswith("staged")


def test_nothing_listens() -> None:
    port = free_port()
    ((title, level, text, fix),) = doctor.check_peer("127.0.0.1", port, b"")
    assert (title, level, text) == (
        "control port",
        "fail",
        f"127.0.0.1:{port}: nothing listens at its address (5 attempts)",
    )
    assert "VLLM_ASCEND_KV_SECRET, here not set" in fix


def test_another_secret(instances: Callable) -> None:
    (rank,) = instances("p", keys=CurveKeys(b"sixteen bytes or more")).produce().producers
    (result,) = doctor.check_peer("127.0.0.1", rank.server.port, b"another secret of 16")
    assert result[1] == "fail"
    assert "authentication failed" in result[2]
    assert [
        level
        for _, level, *_ in doctor.check_peer(
            "127.0.0.1", rank.server.port, b"sixteen bytes or more"
        )
    ][:2] == ["ok"] * 2


def test_arguments() -> None:
    assert titles(None) == [("prefill instance", "warn")]
    assert list(doctor.check(argparse.Namespace(category=None))) == []


@pytest.mark.parametrize(
    "peer",
    [
        "nowhere",
        ":99999",
        ":14579",
        "[]:14579",
        "127.0.0.1:99999",
        "127.0.0.1:0",
        f"127.0.0.1:{'1' * 5000}",
        "host:",
        "a:b",
    ],
    ids=lambda peer: peer[:20],
)
def test_peer_that_is_no_address(peer: str) -> None:
    ((title, level, text, fix),) = doctor.check(argparse.Namespace(category="kv", peer=peer))
    assert (title, level, text) == ("prefill instance", "fail", f"{peer!r} is no HOST:PORT")
    assert fix.endswith("ports are 1 to 65535")


@pytest.mark.parametrize("host", ["a b", "http://a", "*", "a\nb"])
def test_host_that_is_no_name(host: str) -> None:
    ((title, level, text, fix),) = doctor.check(
        argparse.Namespace(category="kv", peer=f"{host}:14579")
    )
    name = host.replace("\n", "?")
    assert (title, level, text) == ("control port", "fail", f"{name}:14579 is no address")
    assert fix.startswith("name the host")


def test_secret_that_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ASCEND_KV_SECRET", "short")
    (result,) = doctor.check(argparse.Namespace(category="kv", peer="127.0.0.1:14579"))
    assert result == (
        "secret",
        "fail",
        "VLLM_ASCEND_KV_SECRET has a secret of 5 bytes",
        "use one of at least 16",
    )


def test_machine_whose_name_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere.invalid")
    assert isinstance(doctor.other_addresses(), list)
