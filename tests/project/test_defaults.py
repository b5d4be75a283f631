# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Defaults for speed: each has evidence, and a switch that exists."""

import dataclasses
import importlib.metadata
import json
from typing import Any

import pytest
from ascend_platform import options
from ascend_platform.errors import RefusedError
from ascend_platform.plugins import COMPONENTS
from harness import checkout
from vllm import envs
from vllm.config import CompilationConfig
from vllm.engine.arg_utils import EngineArgs

defaults = checkout.import_tool("generated_docs.defaults")
DATA = defaults.data()
ROWS = {each["what"]: each for each in DATA["default"]}
VARIABLES = (checkout.ROOT / "docs" / "environment-variables.md").read_text()


@pytest.fixture(scope="module", autouse=True)
def components() -> None:
    for point in importlib.metadata.entry_points(group="vllm.general_plugins"):
        if point.name in COMPONENTS.values():
            point.load()()


def exists(off: dict[str, str]) -> bool:
    """Whether a switch is an option here, of vLLM's configuration or its command line, or a
    variable that is documented or vLLM's."""
    kind, name = next(iter(off.items()))
    if kind == "option":
        _, namespace, key = name.split(".")
        try:
            options.check({"ascend": {namespace: {key: json.loads(off["value"])}}})
        except RefusedError:
            return False
        return True
    if kind == "serve":
        names = {field.name for field in dataclasses.fields(EngineArgs)}
        return name.removeprefix("--").replace("-", "_") in names
    if kind == "config":
        value: Any = CompilationConfig()
        for part in name.split(".")[1:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return name.startswith("compilation_config.")
    known = f"`{name}" in VARIABLES or name in envs.environment_variables
    return kind == "variable" and known


@pytest.mark.parametrize("what", ROWS)
def test_each_default_has_evidence_and_a_switch_that_exists(what: str) -> None:
    row = ROWS[what]
    assert exists(row["off"])
    assert all(row[key] for key in ("source", "chip", "number", "why"))


@pytest.mark.parametrize(
    "off",
    [
        {"option": "ascend.platform.weight_mz", "value": "false"},
        {"option": "ascend.platform.weight_nz", "value": '"no"'},
        {"config": "compilation_config.pass_config.fuse_norms", "value": "false"},
        {"serve": "--eager"},
        {"variable": "TASK_QUEUES", "value": "1"},
    ],
    ids=str,
)
def test_a_switch_that_does_not_exist_is_found(off: dict[str, str]) -> None:
    assert not exists(off)


def test_options_of_speed_are_in_the_table() -> None:
    """An option of the platform decides how fast a step is, unless it is here."""
    unlisted = {"ascend.platform.fp8"}  # decides what weights are converted to
    named = {each["off"].get("option") for each in DATA["default"]}
    keys = {key for key, *_ in options.rows() if key.startswith("ascend.platform.")}
    assert keys - unlisted == {name for name in named if name and ".platform." in name}


def test_published_features_are_built_or_say_why_not() -> None:
    for each in DATA["published"]:
        assert each["source"]
        assert each["number"]
        assert each["state"]
