# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The entry point, found and called as in vLLM."""

from importlib.metadata import entry_points

import pytest
from ascend_platform import extension
from ascend_platform.plugins import registry, slots
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

BASE = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"


@pytest.fixture(autouse=True)
def nothing_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setattr(slots, "_offers", {})


def test_entry_point_offers_the_communicator() -> None:
    assert current_platform.get_device_communicator_cls() == BASE
    (entry_point,) = entry_points(group="vllm.general_plugins", name="ascend_communicator")
    register = entry_point.load()
    register()
    register()
    assert extension.state("ascend-communicator") == "active"
    assert issubclass(
        resolve_obj_by_qualname(current_platform.get_device_communicator_cls()),
        resolve_obj_by_qualname(BASE),
    )
    assert (
        current_platform.get_device_communicator_cls()
        == "ascend_communicator.communicator.HCCLCommunicator"
    )


def test_disabled_with_another_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_VERSION", "0.99")
    (entry_point,) = entry_points(group="vllm.general_plugins", name="ascend_communicator")
    entry_point.load()()
    assert extension.state("ascend-communicator").startswith("disabled: requires vllm")
    assert current_platform.get_device_communicator_cls() == BASE
