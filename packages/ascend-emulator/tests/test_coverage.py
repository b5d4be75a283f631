# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The registry: three states and no fourth, names that torch_npu asks for, and operators that tests
have run."""

import importlib.metadata
import os
import re
from pathlib import Path

import pytest
from ascend_emulator import build, cann_names, coverage

DOCUMENT = Path(__file__).parents[3] / "docs" / "emulator-capability.md"
# torch_npu's macros call these without looking them up by name.
UNNAMED = {"aclCreateFloatArray", "aclDestroyFloatArray"}
# Names that torch_npu looks up from 2.11 on.
NEWER = {"aclnnTopkV2"}
# Its Python calls this.
DRIVER = {"drvGetDevNum"}
# HCCL's own callers use these (vllm-ascend's pyhccl, for one); torch_npu does without.
HCCL = {
    f"Hccl{name}"
    for name in (
        "Barrier",
        "CommInitClusterInfo",
        "CommSuspend",
        "GetErrorString",
        "GetRankId",
        "GetRankSize",
    )
}


@pytest.fixture(scope="module")
def points():
    return coverage.entry_points()


def test_every_name_has_one_of_three_states(points):
    assert {point.state for point in points} == {"computed", "bookkeeping", "refuses"}
    assert len({point.name for point in points}) == len(points) > 1000
    assert all(bool(point.family) == (point.state != "refuses") for point in points)


def test_nothing_is_there_that_no_program_can_ask_for(points):
    """Names that torch_npu does not look up are declared for other programs."""
    unasked = {
        point.name for point in points if not point.asked and not point.name.startswith("aclop::")
    }
    assert unasked - cann_names.public_names().keys() - NEWER == UNNAMED | DRIVER
    assert {point.name for point in points} >= HCCL


def test_operators_are_computed_or_refuse(points):
    operators = [
        point
        for point in points
        if point.name.startswith("aclnn")
        and cann_names.has_two_functions(point.name)
        and not point.name.endswith("CalculateSizeAndFormat")
    ]
    assert {point.state for point in operators} == {"computed", "refuses"}
    assert {
        point.state
        for point in points
        if point.name.startswith(("aclopCompileAndExecute", "aclop::"))
    } == {"computed"}


def test_libraries_answer_to_every_name_that_is_asked_for():
    library = (build.library_dir() / f"lib{build.CORE}.so").read_bytes()
    missing = [name for name in cann_names.wheel_names() if f"\0{name}\0".encode() not in library]
    assert missing == sorted(cann_names.ABSENT)


def sums(markdown):
    """The table's figures: label to computed, bookkeeping, refuses."""
    rows = re.findall(r"^\| ([\w() ]+) \| (\d+) \| (\d+) \| (\d+) \|$", markdown, re.MULTILINE)
    return {label: tuple(map(int, figures)) for label, *figures in rows}


def test_table_sums_up(points):
    table = sums(coverage.report(markdown=True))
    total = table.pop("all")
    assert total == tuple(map(sum, zip(*table.values(), strict=True)))
    asked = [point.state for point in points if point.asked]
    assert total == tuple(asked.count(state) for state in ("computed", "bookkeeping", "refuses"))


def test_both_forms_of_the_report_have_the_same_figures():
    plain = re.findall(r"^(\S.*?)  +(\d+)  +(\d+)  +(\d+)$", coverage.report(), re.MULTILINE)
    assert {label: tuple(map(int, figures)) for label, *figures in plain} == sums(
        coverage.report(markdown=True)
    )


@pytest.mark.skipif(
    not DOCUMENT.exists() or importlib.metadata.version("torch-npu") != "2.13.0",
    reason="the document is of a checkout and torch-npu 2.13.0",
)
def test_documentation_has_the_figures_of_this_version():
    assert sums(DOCUMENT.read_text()) == sums(coverage.report(markdown=True)), (
        "tools/docs-tables has new figures for docs/emulator-capability.md"
    )


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the document is of a checkout")
def test_versions_page_has_the_figures_of_the_installed_version(points):
    page, installed = (
        (DOCUMENT.parent / "reports" / "emulator-versions.md").read_text(),
        importlib.metadata.version("torch-npu"),
    )
    row = re.search(
        rf"^\| {re.escape(installed)} \| (\d+) \| (\d+) / (\d+) / (\d+) \|", page, re.MULTILINE
    )
    if row is None:
        pytest.skip(f"the page has no figures of torch-npu {installed}")
    states = [point.state for point in points if point.asked]
    assert [*map(int, row.groups())] == [
        len(states),
        *map(states.count, ("computed", "bookkeeping", "refuses")),
    ]


def test_every_entry_point_was_run(points, whole_session):
    """Comes last. Of a part of the tests nothing can be said."""
    if not whole_session:
        pytest.skip("only some of the tests run")
    trace = Path(os.environ["ASCEND_EMULATOR_CALLS"])
    assert trace.exists(), "a call was carried out before the tests were collected, without a trace"
    there = {point.name for point in points if point.state != "refuses"}
    assert there - set(trace.read_text().split()) == set()
