"""The entry point, found and called as vLLM does it."""

from importlib.metadata import entry_points

import pytest
from ascend_platform import extension
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

BASE = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"


@pytest.fixture(autouse=True)
def nothing_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_states", "_offers"):
        monkeypatch.setattr(extension, name, {})


def test_entry_point_offers_the_communicator_which_the_platform_takes() -> None:
    assert current_platform.get_device_communicator_cls() == BASE
    (entry_point,) = entry_points(group="vllm.general_plugins", name="ascend_communicator")
    register = entry_point.load()
    register()
    register()
    assert extension.state("ascend-communicator") == "active"
    assert issubclass(resolve_obj_by_qualname(current_platform.get_device_communicator_cls()), resolve_obj_by_qualname(BASE))
    assert current_platform.get_device_communicator_cls() == "ascend_communicator.communicator.HCCLCommunicator"


def test_it_stands_aside_when_vllm_is_another_and_the_platform_takes_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_VERSION", "0.99")
    (entry_point,) = entry_points(group="vllm.general_plugins", name="ascend_communicator")
    entry_point.load()()
    assert extension.state("ascend-communicator").startswith("standing aside: it needs vllm")
    assert current_platform.get_device_communicator_cls() == BASE
