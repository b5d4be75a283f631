# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Addresses in a request's parameters: which of them may be contacted."""

import time
from typing import Any

import pytest
from ascend_kv_connector.p2p import trusted_addresses
from ascend_kv_connector.p2p.params import TransferParams
from ascend_kv_connector.p2p.trusted_addresses import TrustedAddresses

parse = TransferParams.parse

SECRET = b"sixteen bytes or more"


def params(*hosts: str, **more: Any) -> TransferParams:
    sent = {
        "remote_engine_id": "p",
        "remote_request_id": "r",
        "remote_ranks": [[host, 7000] for host in hosts],
    }
    return parse(sent | more)


@pytest.mark.parametrize(
    ("options", "hosts", "allowed"),
    [
        ({}, ["127.0.0.1", "127.0.0.2", "::1", "localhost"], True),
        ({}, ["127.0.0.1", "10.0.0.1"], False),
        ({}, ["prefill"], False),
        ({}, ["169.254.169.254"], False),
        ({"insecure": True}, ["10.0.0.1", "prefill"], True),
        ({"insecure": True, "local": True}, ["127.0.0.1"], True),
        ({"insecure": True, "local": True}, ["127.0.0.1", "10.0.0.1"], False),
        (
            {"peers": ["10.0.0.0/8", "prefill", "fd00::/8"]},
            ["10.1.2.3", "prefill", "fd00::7"],
            True,
        ),
        ({"peers": ["10.0.0.0/8"]}, ["11.1.2.3"], False),
        ({"peers": ["10.0.0.0/8"], "insecure": True}, ["11.1.2.3"], False),
        ({"peers": ["10.0.0.0/8"]}, ["prefill"], False),
        ({"peers": ["10.0.0.0/8"]}, ["0.0.0.0/0"], False),
        ({"peers": ["10.0.0.0/8"]}, ["fd00::7"], False),
    ],
)
def test_ranks_without_a_secret(options: dict[str, Any], hosts: list[str], allowed: bool) -> None:
    message = TrustedAddresses(**options).refusal(params(*hosts))
    assert ("" if allowed else "which is not in option peers") in message
    assert (message == "") == allowed


def test_ranks_are_signed_with_the_secret() -> None:
    one, other = TrustedAddresses(SECRET), TrustedAddresses(SECRET, peers=["10.0.0.0/8"])
    sent = one.sign(params("10.0.0.1", remote_num_tokens=7))
    # Routers and vLLM add to them.
    assert one.refusal(parse(sent.to_dict() | {"remote_prefill_cached_tokens": 3})) == ""
    assert other.refusal(sent) == ""
    assert "10.0.0.1, which is not" in TrustedAddresses(SECRET, peers=["prefill"]).refusal(sent)
    forged = [
        params("10.0.0.1"),
        parse(sent.to_dict() | {"remote_ranks": [["10.0.0.2", 7000]]}),
        parse(sent.to_dict() | {"remote_num_tokens": 8}),
        # Another instance, also the next one at these addresses, and another request of its.
        parse(sent.to_dict() | {"remote_engine_id": "q"}),
        parse(sent.to_dict() | {"remote_request_id": "s"}),
        parse(sent.to_dict() | {"remote_reader": "d"}),
        parse(sent.to_dict() | {"remote_prompt_digest": "0" * 32}),
    ]
    forged += [
        parse(sent.to_dict() | {"remote_signature": ""}),
        parse(sent.to_dict() | {"remote_signature": None}),
        TrustedAddresses(b"another secret..").sign(params("10.0.0.1")),
    ]
    for each in forged:
        assert (
            one.refusal(each) == "has remote_ranks that no instance with this one's secret has sent"
        )
    assert TrustedAddresses().sign(params("h")) == params("h")


def test_signatures_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever has seen one could repeat it for as long as the secret is used."""
    trusted = TrustedAddresses(SECRET)
    sent = trusted.sign(params("10.0.0.1"))
    now = time.time()
    monkeypatch.setattr(trusted_addresses.time, "time", lambda: now + 901)
    assert "were signed over 900 s ago, or the two machines' clocks differ" in trusted.refusal(sent)
    assert "no instance with" in trusted.refusal(
        parse(sent.to_dict() | {"remote_expires": int(now) + 10_000})
    )


def test_metaserver_is_one_of_the_configuration() -> None:
    trusted = TrustedAddresses(insecure=True, metaservers=["http://router:8000/v1/metaserver"])
    assert trusted.refusal(parse({"metaserver": "http://router:8000/v1/metaserver"})) == ""
    for url in (
        "http://router:8000/v1/metaserver2",
        "http://169.254.169.254/latest",
        "http://127.0.0.1:1",
    ):
        assert (
            trusted.refusal(parse({"metaserver": url}))
            == f"has metaserver {url}, which is not in option metaserver"
        )
    assert "\n" not in TrustedAddresses().refusal(
        parse({"metaserver": "http://a\nERROR forged line"})
    )
    assert len(TrustedAddresses().refusal(parse({"metaserver": "http://a" * 100_000}))) < 400
