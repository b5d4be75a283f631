# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The general plugins as vLLM calls them: in any order, more than once, without heavy imports."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.project.distributions import write_metadata

PLUGINS = [
    "ascend_attention",
    "ascend_cli",
    "ascend_communicator",
    "ascend_kv_connector",
    "ascend_model_loader",
    "ascend_models",
    "ascend_patches",
    "ascend_quantization",
]
ORDERS = [PLUGINS[i:] + PLUGINS[:i] for i in range(len(PLUGINS))] + [PLUGINS[::-1]]
SCRIPT = """
import json, sys
from importlib.metadata import entry_points
points = {point.name: point for point in entry_points(group="vllm.general_plugins")}
for name in sys.argv[1:] * 2:
    assert points[name].load()() is None
loaded = {name.partition(".")[0] for name in sys.modules}
from ascend_platform.plugins import COMPONENTS, registry
states = {name: registry.state(name) for name in COMPONENTS if name != "ascend-platform"}
print(json.dumps([sorted(loaded & {"torch", "torch_npu", "vllm", "numpy"}), states]))
"""


def register(order: list[str], **variables: str) -> tuple[list[str], dict[str, str]]:
    """Heavy modules in sys.modules, and each component's state, after two calls of each
    `register()`."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VLLM_PLUGINS", "VLLM_VERSION")
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *order],
        env=environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    heavy, states = json.loads(done.stdout)
    return heavy, states


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order[0].removeprefix("ascend_"))
def test_register_in_any_order_twice(order: list[str]) -> None:
    heavy, states = register(order)
    assert heavy == []
    assert len(states) == len(PLUGINS)
    assert all(state.startswith("active") for state in states.values()), states


@pytest.mark.parametrize("version", ["0.30.9", "0.99.0"])
def test_all_are_disabled_with_an_unsupported_vllm(version: str) -> None:
    heavy, states = register(PLUGINS, VLLM_VERSION=version)
    assert heavy == []
    required = importlib.metadata.requires("ascend-platform") or []
    (declared,) = (it for it in required if it.startswith("vllm"))
    of_source = (
        "VLLM_TARGET_DEVICE=empty VLLM_SKIP_VERSION_SUFFIX=1 pip install --no-binary vllm"
        f" '{declared}'"
    )
    expected = f"disabled: requires {declared}, found {version}; fix: {of_source}"
    assert states == dict.fromkeys(states, expected)


def test_every_component_has_features() -> None:
    _, states = register(PLUGINS)
    assert not [name for name, state in states.items() if "no features" in state]
    assert re.fullmatch(r"active \([1-9]\d* patch(es)?\)", states["ascend-patches"])


def test_plugins_called_active_are_those_that_vllm_loads(tmp_path: Path) -> None:
    points = "[vllm.general_plugins]\nascend_attention = other:register\nother = other:register\n"
    # vLLM does not compare requirements.
    write_metadata(tmp_path, "other-wheel", requires=["vllm<0.1"], entry_points=points)
    (tmp_path / "other.py").write_text("def register(): pass\n")
    script = """
import json, os
from ascend_cli import plugins
from vllm.plugins import load_plugins_by_group
found = []
for allowed in (None, "", "ascend", "ascend, ascend_attention", "ascend_attention,ascend,no_such"):
    if allowed is not None:
        os.environ["VLLM_PLUGINS"] = allowed
    theirs = [[group, name, plugin.__module__.partition(".")[0]] for group in plugins.GROUPS for name, plugin in
              load_plugins_by_group(group).items()]
    ours = [[plugin.group, plugin.name, plugin.distribution] for plugin in plugins.plugins() if plugin.state == "active"]
    found.append([allowed, sorted(theirs), sorted(ours)])
print(json.dumps(found))
"""
    environ = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(tmp_path), environ.get("PYTHONPATH")])
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    for allowed, theirs, ours in json.loads(done.stdout.splitlines()[-1]):
        names = {"other-wheel": "other"}
        assert theirs == [
            [group, name, names.get(wheel, wheel.replace("-", "_"))] for group, name, wheel in ours
        ]
        assert bool(theirs) == (allowed != "")
