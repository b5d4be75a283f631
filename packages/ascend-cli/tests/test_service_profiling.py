# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Symbols for msServiceProfiler: existing functions, in a file that is written if requested."""

import functools
import importlib
import inspect
import sys

import pytest
import yaml
from ascend_cli import service_profiling
from ascend_cli.service_profiling import SWITCH, symbols
from ascend_platform.config import runners
from packaging.version import Version
from vllm import __version__


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(SWITCH, "profile.json")
    return tmp_path / "home"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """The name of the pip package's form; the tool itself wants CANN's toolkit."""
    (tmp_path / "msserviceprofiler").mkdir()
    (tmp_path / "msserviceprofiler" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("msserviceprofiler", None)


def file_of(home):
    return home / ".config" / "vllm_ascend" / f"service_profiling_symbols.{__version__}.yaml"


@pytest.mark.parametrize("each", symbols(), ids=lambda each: each.symbol)
def test_the_functions_are_there(each):
    module, _, names = each.symbol.partition(":")
    function = functools.reduce(getattr, names.split("."), importlib.import_module(module))
    assert inspect.isfunction(function)


def test_each_runner_that_engines_may_have_is_measured():
    runner = "ascend_platform.runners.{}.runner:NPUModelRunner.execute_model"
    measured = {each.symbol for each in symbols()}
    assert (runner.format("v1") in measured) == runners.has_v1()
    assert (runner.format("v2") in measured) == (Version(__version__) >= Version("0.33"))


def test_the_file_says_what_to_time(home, tool):
    service_profiling.register()
    contents = yaml.safe_load(file_of(home).read_text())
    assert [each["symbol"] for each in contents] == [each.symbol for each in symbols()]
    assert contents[0] == {
        "symbol": "vllm.v1.core.sched.scheduler:Scheduler.schedule",
        "handler": "msserviceprofiler.vllm_profiler.vllm_v1.batch_hookers:schedule",
        "name": "batchFrameworkProcessing",
    }
    assert {"symbol", "domain", "name"} == set(contents[-1])


def test_a_changed_file_stays(home, tool):
    file_of(home).parent.mkdir(parents=True)
    file_of(home).write_text("mine")
    service_profiling.register()
    assert file_of(home).read_text() == "mine"


def test_without_the_switch_nothing_is_written(home, tool, monkeypatch):
    monkeypatch.delenv(SWITCH)
    service_profiling.register()
    assert not home.exists()


def test_without_the_tool_one_line_says_so(home, log_lines):
    service_profiling.register()
    assert not home.exists()
    ((_, line),) = log_lines
    assert SWITCH in line
    assert "pip install msserviceprofiler" in line
