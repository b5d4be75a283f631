# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Entry point, called as vLLM does, and the platform's checks of the load format."""

import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest
from ascend_model_loader import FORMATS, options
from ascend_platform import extension
from ascend_platform.config import unsupported
from ascend_platform.plugins import registry, slots
from vllm.config.load import LoadConfig


@pytest.fixture(autouse=True)
def nothing_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setattr(slots, "_offers", {})
    monkeypatch.delenv(options.SECRET_ENV, raising=False)


def join() -> None:
    (entry_point,) = entry_points(group="vllm.general_plugins", name="ascend_model_loader")
    register = entry_point.load()
    register()
    register()


@pytest.mark.parametrize("name", FORMATS)
def test_entry_point_registers_format_and_options_are_validated(name: str) -> None:
    join()
    assert extension.state("ascend-model-loader") == "active"
    unsupported.check_load_format(LoadConfig(load_format=name))
    with pytest.raises(extension.RefusedError, match="has no key 'peer'; fix: use 'peers'"):
        unsupported.check_load_format(
            LoadConfig(load_format=name, model_loader_extra_config={"peer": "a:1"})
        )


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_refused_without_the_wheel(name: str) -> None:
    with pytest.raises(
        extension.RefusedError,
        match=rf"^--load-format {name} needs ascend-model-loader, which is .*",
    ):
        unsupported.check_load_format(LoadConfig(load_format=name))


@pytest.mark.parametrize("name", ["auto", "sharded_state", "runai_streamer"])
def test_vllm_formats_are_unaffected(name: str) -> None:
    unsupported.check_load_format(
        LoadConfig(load_format=name, model_loader_extra_config={"what": "ever"})
    )


def test_sharded_state_with_quantization_is_refused() -> None:
    with pytest.raises(
        extension.RefusedError, match=r"^--load-format sharded_state supports unquantized weights"
    ):
        unsupported.check_load_format(LoadConfig(load_format="sharded_state"), True)


def test_register_imports_no_heavy_modules() -> None:
    script = (
        "import ascend_model_loader, sys; ascend_model_loader.register(); print({'msgspec',"
        " 'xxhash'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_disabled_with_unsupported_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_VERSION", "0.99")
    join()
    assert extension.state("ascend-model-loader").startswith("disabled: requires vllm")


def test_report_table_has_a_row_per_phase() -> None:
    from ascend_model_loader.report import Report

    report: Any = Report()
    with report.phase("one") as phase:
        phase.bytes = 2_000_000
    with pytest.raises(ValueError, match="no"), report.phase("two"):
        raise ValueError("no")
    report.phases[0].seconds, report.phases[1].seconds = 0.004, 1.5
    assert report.table().split("\n") == [
        "phase         seconds      bytes  GB/s",
        "one             0.004  2,000,000  0.50",
        "two (failed)    1.500",
    ]
