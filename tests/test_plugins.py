"""The general plugins as vLLM calls them: in any order, more than once, in processes that must stay light."""

import json
import os
import subprocess
import sys

import pytest

PLUGINS = ["ascend_attention", "ascend_communicator", "ascend_kv_connector", "ascend_model_loader", "ascend_patches"]
ORDERS = [PLUGINS[i:] + PLUGINS[:i] for i in range(len(PLUGINS))] + [PLUGINS[::-1]]
SCRIPT = """
import json, sys
from importlib.metadata import entry_points
points = {point.name: point for point in entry_points(group="vllm.general_plugins")}
for name in sys.argv[1:] * 2:
    assert points[name].load()() is None
loaded = {name.partition(".")[0] for name in sys.modules}
from ascend_platform import extension
states = {name: extension.state(name) for name in extension.COMPONENTS if name != "ascend-platform"}
print(json.dumps([sorted(loaded & {"torch", "torch_npu", "vllm", "numpy"}), states]))
"""


def register(order: list[str], **variables: str) -> tuple[list[str], dict[str, str]]:
    """Heavy modules that were imported, and each component's state, after `register()` of each was called twice."""
    environ = {name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", "VLLM_VERSION")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *order], env=environ | variables, capture_output=True, text=True, check=True
    )
    heavy, states = json.loads(done.stdout)
    return heavy, states


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order[0].removeprefix("ascend_"))
def test_register_in_any_order_twice(order: list[str]) -> None:
    heavy, states = register(order)
    assert heavy == []
    assert len(states) == len(PLUGINS)
    assert all(state.startswith("active") for state in states.values()), states


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0"])
def test_all_stand_aside_of_another_vllm(version: str) -> None:
    heavy, states = register(PLUGINS, VLLM_VERSION=version)
    assert heavy == []
    for state in states.values():
        assert state.startswith("standing aside")
        assert version in state
        assert "0.32" in state


def test_components_without_features_say_so() -> None:
    _, states = register(PLUGINS)
    assert [name for name, state in states.items() if "no features" in state] == [
        "ascend-communicator",
        "ascend-kv-connector",
        "ascend-model-loader",
    ]
    assert states["ascend-patches"] == "active (0 patches)"
