# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""VLLM_PLUGINS: the table of values in docs/plugins.md, held row by row against vLLM."""

import functools
import json
import os
import re
import subprocess
import sys

import pytest
from harness import checkout
from harness.engines import npus

PAGE = (checkout.ROOT / "docs" / "plugins.md").read_text()
HEAD = (
    "| `VLLM_PLUGINS` | NPU | components active beside the platform | what it says"
    " |\n|---|---|---|---|\n"
)
TABLE = PAGE.partition(HEAD)[2].partition("\n\n")[0]
ROWS = [[cell.strip() for cell in row[1:-1].split("|")] for row in TABLE.splitlines()]
SIBLINGS = [
    "ascend-attention",
    "ascend-cli",
    "ascend-communicator",
    "ascend-kv-connector",
    "ascend-model-loader",
    "ascend-models",
    "ascend-patches",
    "ascend-quantization",
]


def value(cell: str) -> str | None:
    return {"not set": None, '`""`': ""}.get(cell, cell[1:-1])


@functools.cache
def outcomes() -> list:
    """Results of tools/versions/wheel_probe.py for each row, in one process, because torch is
    imported once for all rows."""
    values = json.dumps([value(row[0]) for row in ROWS])
    environ = {name: text for name, text in os.environ.items() if not name.startswith("VLLM_")}
    command = [
        sys.executable,
        str(checkout.TOOLS / "versions" / "wheel_probe.py"),
        "filter",
        values,
    ]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=300, check=True
    )
    return npus.results(done.stdout)[-1]["chosen"]


def test_table_covers_all_forms_of_the_variable() -> None:
    values = [value(row[0]) for row in ROWS]
    assert len(values) == len({*values}) >= 14
    assert {
        None,
        "",
        "ascend",
        "ascend,ascend_attention",
        "ascend, ascend_attention",
        "ascend_attention",
    } <= {*values}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: ROWS[number][0])
def test_row_of_the_table_matches_vllm(number: int) -> None:
    _, npu, active, says = ROWS[number]
    names, states, line = outcomes()[number]
    expected = {"all": SIBLINGS, "none": []}.get(active, [active])
    assert names == {"platform": npu == "yes", "active": expected}
    if npu == "no":
        assert says == f"`{line}`"
    elif says:
        component, _, state = says.partition(": ")
        assert states[component] == state.strip("`")


def test_every_plugin_is_named() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (ascend-[\w-]+)", PAGE, re.MULTILINE)
    from ascend_platform.plugins import COMPONENTS

    assert {name: entry_point for entry_point, name in listed} == COMPONENTS
