# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""A configuration is completed, then refused or not, and only then the process is prepared."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ascend_platform.config import model_runner
from ascend_platform.errors import RefusedError
from ascend_platform.observability import metrics
from ascend_platform.platform import NPUPlatform
from ascend_platform.plugins import registry, slots
from harness.engines.configuration import engine_config
from vllm.config import CompilationMode


def process_state() -> dict[str, Any]:
    """State that the platform changes: variables, directories of sockets and registries."""
    return {
        "environment": dict(os.environ),
        "directories": sorted(Path(tempfile.gettempdir()).glob("vllm-*")),
        "components": dict(registry._statuses),
        "slots": dict(slots._offers),
        "metrics": len(metrics._configs),
        "runners": dict(model_runner._chosen),
    }


def by_inductor(config: Any) -> None:
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    config.compilation_config.backend = "inductor"


def on_too_many_npus(config: Any) -> None:
    config.parallel_config.world_size = 4096


def with_an_unknown_component(config: Any) -> None:
    config.additional_config = {"ascend": {"patchez": {}}}


def with_a_wrong_timeout(config: Any) -> None:
    given = {"deterministic": True, "connect_timeout": 1}
    config.additional_config = {"ascend": {"communicator": given}}


@pytest.fixture
def temporary() -> Iterator[str]:
    """Shorter than ``tmp_path``: the names of sockets in it are limited."""
    with tempfile.TemporaryDirectory(prefix="t") as directory:
        yield directory


@pytest.mark.parametrize(
    "change", [by_inductor, on_too_many_npus, with_an_unknown_component, with_a_wrong_timeout]
)
def test_refused_configuration_changes_nothing_else(model, monkeypatch, temporary, change):
    config = engine_config(model())
    # As in a process without an engine. Other processes have no directory in that of this test.
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    config.instance_id = change.__name__
    change(config)
    before = process_state()
    with pytest.raises(RefusedError):
        NPUPlatform.check_and_update_config(config)
    assert process_state() == before
