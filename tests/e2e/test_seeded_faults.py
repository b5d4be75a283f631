# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Faults that cost a decode step much on an NPU show in the table of `tools/check launches`: a plugin
seeds each of them."""

import os
from pathlib import Path
from typing import Any

import pytest
from harness.compare import launches
from harness.project.distributions import write_metadata

REGISTER = """
def register():
    from ascend_platform import extension

    extension.offer("attention.dense", "seeded_faults.Backend")
"""
FAULTS: dict[str, set[str]] = {
    "none": set(),
    "bucketize": {"ai_cpu"},
    "mask": {"masked"},
    "wait": {"waits"},
    "compilation": {"compilations", "waits"},
}
"""Each fault, and the fields in which it shows. torch_npu waits for the device where jit_compile
changes."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The decode step of a dense model with each fault."""
    directory = tmp_path_factory.mktemp("plugin")
    directory.joinpath("seeded_fault_plugin.py").write_text(REGISTER)
    points = "[vllm.general_plugins]\nseeded_faults = seeded_fault_plugin:register\n"
    write_metadata(directory, "seeded-faults", entry_points=points)
    paths = [str(directory), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    case = launches.CASES["dense"] | {"name": "dense", "layers": [2]}
    result = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        for fault in FAULTS:
            more = {"VLLM_PLUGINS": "ascend,seeded_faults", "SEEDED_FAULT": fault}
            runs = launches.count([case], tmp_path_factory.mktemp(fault), **more)
            result[fault] = runs["dense"][0]["decode"]
    return result


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_shows(steps: dict[str, dict[str, Any]], fault: str) -> None:
    fields = ("ai_cpu", "masked", "waits", "compilations")
    assert {field for field in fields if steps[fault][field]} == FAULTS[fault]


def test_faults_take_modelled_time(steps: dict[str, dict[str, Any]]) -> None:
    """35 us of each layer's bucketize, by the law of the AI CPU."""
    times = {fault: sum(step["modelled"].values()) for fault, step in steps.items()}
    assert times["bucketize"] > times["none"] + 2 * 35
    assert steps["compilation"]["compilations"] == 2  # One of each layer.
