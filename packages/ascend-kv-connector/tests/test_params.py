# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""``kv_transfer_params`` are parsed in one module, into a type without invalid values."""

import ast
import inspect
from pathlib import Path
from typing import Any

import ascend_kv_connector
import pytest
from ascend_kv_connector.p2p import params
from ascend_kv_connector.p2p.params import KEYS, NO_PARAMS, TransferParams
from harness.kv.scheduling import ANSWER, NOTHING, request, scheduler

SOURCE = {
    "do_remote_prefill": True,
    "remote_engine_id": "p",
    "remote_request_id": "far",
    "remote_ranks": [["10.0.0.1", 7000]],
    "remote_num_tokens": 21,
    "remote_prompt_digest": "d",
}


def test_keys_are_known_to_one_module() -> None:
    top = Path(inspect.getfile(ascend_kv_connector)).parent
    # The conformance suite is for any connector.
    other_modules = [
        path
        for path in top.rglob("*.py")
        if path != Path(inspect.getfile(params)) and path.parent.name != "testing"
    ]
    # These two are also keys of an option and of a message.
    keys = set(KEYS) - {"metaserver", "request_id"}
    uses = [
        f"{path.relative_to(top)}:{node.lineno}: {node.value}"
        for path in other_modules
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in keys
    ]
    assert len(other_modules) > 30
    assert uses == []


@pytest.mark.parametrize("lease", [2**63, -5, float("nan"), float("inf"), 1e300, True])
def test_lease_of_a_client_is_a_number_to_calculate_with(lease: float) -> None:
    near = request(params=dict(ANSWER, remote_lease=lease))
    consumer = scheduler()
    consumer.on_new_request(near)
    assert consumer.get_num_new_matched_tokens(near, 0) == (21, True)
    assert consumer.build_connector_meta(NOTHING).renewed == []


def test_parameters_are_the_same_after_a_round_trip() -> None:
    parsed = TransferParams.parse(SOURCE)
    assert (parsed.source.engine, parsed.source.ranks) == ("p", (("10.0.0.1", 7000),))
    assert (parsed.invalid_source, parsed.invalid_reader) == ("", "")
    assert parsed.to_dict() == SOURCE | {"do_remote_decode": False}
    assert TransferParams.parse(parsed.to_dict()) == parsed
    assert TransferParams.parse(None) == TransferParams.parse({}) == NO_PARAMS


@pytest.mark.parametrize(
    ("changed", "source", "reader"),
    [
        ({"remote_num_tokens": "21"}, "remote_num_tokens '21'", ""),
        ({"remote_ranks": "a\nb" * 900}, "remote_ranks 'a", ""),
        ({"remote_ranks": [["h", 1.5]]}, "remote_ranks [['h', 1.5]]", ""),
        ({"remote_ranks": [["h", 65536]]}, "remote_ranks [['h', 65536]]", ""),
        ({"metaserver": 3}, "metaserver 3", ""),
        ({"metaserver": "http://r", "remote_ranks": None}, "", ""),
        ({"remote_reader": 7}, "", "remote_reader 7"),
        ({"remote_request_id": "x" * 513}, "remote_request_id 'xxx", ""),
        ({"remote_engine_id": "x" * 513}, "remote_engine_id 'xxx", ""),
        ({"remote_reader": "x" * 513}, "", "remote_reader 'xxx"),
        ({"remote_ranks": [["x" * 513, 1]]}, "remote_ranks [['xxx", ""),
        ({"remote_num_tokens": 10**400}, "remote_num_tokens 1000", ""),
        ({"remote_reader": "r", "remote_prompt_digest": 7}, "remote_prompt_digest 7", "digest 7"),
    ],
)
def test_invalid_values_are_named_in_one_line(
    changed: dict[str, Any], source: str, reader: str
) -> None:
    parsed = TransferParams.parse(SOURCE | changed)
    for refusal, part in ((parsed.invalid_source, source), (parsed.invalid_reader, reader)):
        assert part in refusal
        assert bool(refusal) == bool(part)
        assert "\n" not in refusal
        assert len(refusal) < 400
    for key in changed:
        if key in refusal:
            assert getattr(parsed, key) is None
