# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Shims for other versions of vLLM: each is needed by the lowest supported version, used only where
needed, and correct."""

import importlib
import importlib.metadata
import importlib.util
import tomllib
from typing import Any

import pytest
from ascend_platform.plugins import COMPONENTS
from ascend_platform.plugins.requirements import declared
from harness import checkout
from packaging.specifiers import SpecifierSet
from packaging.version import Version

MINORS = list(tomllib.loads((checkout.TOOLS / "versions" / "compat.toml").read_text()))


def admitted(distribution: str) -> SpecifierSet:
    """The range of vLLM versions that an installed wheel requires, itself or by ascend-platform."""
    return next(each.specifier for each in declared(distribution) if each.name == "vllm")


def shims() -> list[Any]:
    """Every shim of every wheel that has a module of shims."""
    result = []
    for distribution in COMPONENTS:
        package = distribution.replace("-", "_")
        module = f"{package}.overrides.shims"
        if importlib.util.find_spec(f"{package}.overrides"):
            for name, shim in importlib.import_module(module).SHIMS.items():
                result.append(pytest.param(distribution, shim, id=f"{distribution}:{name}"))
    return result


@pytest.mark.parametrize("distribution", COMPONENTS)
def test_wheels_are_for_the_versions_that_the_suite_runs_on(distribution: str) -> None:
    lowest, highest = MINORS[0], MINORS[-1]
    major, _, minor = highest.partition(".")
    assert admitted(distribution) == SpecifierSet(f">={lowest},<{major}.{int(minor) + 1}")


@pytest.mark.parametrize(("distribution", "shim"), shims())
def test_shim_is_needed_by_the_lowest_supported_vllm(distribution: str, shim: Any) -> None:
    """When this fails, delete the shim: write its ``otherwise`` where it is called."""
    (lowest,) = (Version(each.version) for each in admitted(distribution) if each.operator == ">=")
    assert lowest < Version(shim.until), (
        f"vLLM {lowest} has what {shim.function.__name__} makes up for"
    )


@pytest.mark.parametrize(("distribution", "shim"), shims())
def test_shim_is_used_only_by_versions_that_need_it(distribution: str, shim: Any) -> None:
    installed = Version(importlib.metadata.version("vllm"))
    assert shim.needed == (installed < Version(shim.until))
