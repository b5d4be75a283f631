# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""HCCL options in the configuration: refused values, environment variables and group options."""

import math
import os
from typing import Any

import pytest
from ascend_communicator import Options, _take_options
from ascend_communicator.communicator import (
    HCCLCommunicator,
    expansion_mode,
    warn_of_vector_cores,
)
from ascend_communicator.moe.manager import buffer_mib_of_environment
from ascend_platform import extension
from vllm.config import VllmConfig, set_current_vllm_config


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HCCL_DETERMINISTIC", "HCCL_CONNECT_TIMEOUT"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"groups": 3}, "groups is 3; supported: an object; fix: correct or remove it"),
        (
            {"groups": {"xp": {}}},
            "groups has no key 'xp'; fix: use one of tp, pp, dp, ep, eplb, etp, edp, mc2",
        ),
        ({"groups": {"tp": 4}}, "groups.tp must be an object, not 4; fix: write {…} there"),
        (
            {"groups": {"tp": {"qos": 4}}},
            "groups.tp has no key 'qos'; fix: use one of buffer_size, exec_timeout, expansion_mode",
        ),
        (
            {"groups": {"tp": {"buffer_size": 0}}},
            "groups.tp.buffer_size is 0; supported: an integer from 1 to 2147483647 (MiB); fix:"
            " correct or remove it",
        ),
        (
            {"groups": {"tp": {"exec_timeout": "9"}}},
            "groups.tp.exec_timeout is '9'; supported: an integer from 1 to 2147483647 (seconds);"
            " fix: correct or remove it",
        ),
        (
            {"deterministic": "yes"},
            "deterministic is 'yes'; supported: true, false; fix: correct or remove it",
        ),
        (
            {"connect_timeout": 20},
            "connect_timeout is 20; supported: an integer from 120 to 7200 (seconds), null; fix:"
            " correct or remove it",
        ),
        (
            {"connect_timeout": True},
            "connect_timeout is True; supported: an integer from 120 to 7200 (seconds), null; fix:"
            " correct or remove it",
        ),
    ],
)
def test_unsupported_values_are_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(extension.RefusedError) as caught:
        extension.parse_options(Options, given, "additional_config ascend.communicator")
    assert str(caught.value) == f"additional_config ascend.communicator.{message}"


def test_hccl_environment_variables() -> None:
    _take_options(vars(Options()))
    assert [os.environ.get(name) for name in ("HCCL_DETERMINISTIC", "HCCL_CONNECT_TIMEOUT")] == [
        None,
        None,
    ]
    _take_options(vars(Options(deterministic=True, connect_timeout=300)))
    assert [os.environ.get(name) for name in ("HCCL_DETERMINISTIC", "HCCL_CONNECT_TIMEOUT")] == [
        "true",
        "300",
    ]


@pytest.mark.parametrize(("value", "expected"), [(None, 200), ("", 200), ("64", 64)])
def test_buffer_size(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: int) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", value or "")
    if value is None:
        monkeypatch.delenv("HCCL_BUFFSIZE")
    assert buffer_mib_of_environment() == expected


@pytest.mark.parametrize("value", ["200M", "0", "-1", "1.5"])
def test_buffer_size_that_is_no_number_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", value)
    with pytest.raises(extension.RefusedError) as caught:
        buffer_mib_of_environment()
    assert str(caught.value) == (
        f"HCCL_BUFFSIZE is {value!r}; supported: an integer from 1 (MiB); fix: set such a number, or"
        " unset it (its default is 200)"
    )


def test_group_options_reach_hccl(scenarios: dict[str, Any]) -> None:
    for group, options in scenarios["options"][0]["given"].items():
        assert options == {"dp": {"hccl_buffer_size": 64, "hccl_exec_timeout": 3}, "ep": {}}[group]
    waited, message = scenarios["options"][0]["waited"]
    assert 2.5 < waited < 15  # 1836 s by default
    assert "HcclAllReduce" in message


def config_with(layout: dict[str, Any]) -> VllmConfig:
    config = VllmConfig()
    for name, value in ({"distributed_executor_backend": "mp"} | layout).items():
        setattr(config.parallel_config, name, value)
    config.parallel_config.world_size = math.prod(
        layout.get(f"{each}_parallel_size", 1) for each in ("tensor", "pipeline")
    )
    return config


@pytest.mark.parametrize(
    ("layout", "group", "variable", "expected"),
    [
        ({"tensor_parallel_size": 2}, "tp", None, {"hccl_op_expansion_mode": 3}),
        ({"tensor_parallel_size": 2}, "ep", None, {}),
        ({"tensor_parallel_size": 2}, "tp", "AI_CPU", {}),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "tp", None, {}),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "tp", None, {}),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "tp", None, {}),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "tp", None, {}),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "tp", None, {}),
        ({}, "tp", None, {}),
    ],
)
def test_lone_tensor_parallelism_uses_the_vector_cores(
    monkeypatch: pytest.MonkeyPatch,
    layout: dict[str, Any],
    group: str,
    variable: str | None,
    expected: dict[str, int],
) -> None:
    """Not where an NPU has other groups, whose collectives may overlap."""
    monkeypatch.delenv("HCCL_OP_EXPANSION_MODE", raising=False)
    if variable:
        monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", variable)
    with set_current_vllm_config(config_with(layout)):
        assert expansion_mode(group) == expected


def test_expansion_mode_of_a_group() -> None:
    given = Options(groups={"tp": {"expansion_mode": "default"}, "ep": {"expansion_mode": "AIV"}})
    modes = [given.hccl_config(group)["hccl_op_expansion_mode"] for group in ("tp", "ep")]
    assert modes == [0, 3]


@pytest.mark.parametrize(
    ("layout", "group", "mode", "is_warned"),
    [
        ({"tensor_parallel_size": 2}, "tp", "AIV", False),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "tp", "default", False),
        ({"tensor_parallel_size": 2, "data_parallel_size": 2}, "tp", "AIV", True),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "ep", "AIV", True),
    ],
)
def test_the_option_of_several_groups_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
    layout: dict[str, Any],
    group: str,
    mode: str,
    is_warned: bool,
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(
        extension.logger, "warning", lambda text, *values: messages.append(text % values)
    )
    given = Options(groups={group: {"expansion_mode": mode}})
    with set_current_vllm_config(config_with(layout)):
        warn_of_vector_cores(group, given.hccl_config(group))
    where = f"ascend.communicator.groups.{group}.expansion_mode is AIV beyond"
    assert [text.startswith(where) for text in messages] == [True] * is_warned


@pytest.mark.parametrize("exchanges", [False, True])
def test_the_option_of_mc2_is_warned_of(monkeypatch: pytest.MonkeyPatch, exchanges: bool) -> None:
    """By the communicator of the expert parallel group, whose all2all manager creates MC2's."""
    messages: list[str] = []
    monkeypatch.setattr(
        extension.logger, "warning", lambda text, *values: messages.append(text % values)
    )
    communicator = HCCLCommunicator.__new__(HCCLCommunicator)
    communicator.unique_name, communicator.rank_in_group, communicator.use_all2all = (
        "ep:0",
        0,
        exchanges,
    )
    config = config_with({"tensor_parallel_size": 2, "enable_expert_parallel": True})
    options = {"groups": {"mc2": {"expansion_mode": "AIV"}}}
    config.additional_config = {"ascend": {"communicator": options}}
    with set_current_vllm_config(config):
        communicator._set_options()
    where = "ascend.communicator.groups.mc2.expansion_mode is AIV beyond"
    assert [text.startswith(where) for text in messages] == [True] * exchanges
