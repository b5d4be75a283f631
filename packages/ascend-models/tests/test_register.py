# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The entry point, called as vLLM does, what it offers, and the names of vLLM that are replaced."""

import dataclasses
import pkgutil
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from ascend_platform import extension
from ascend_platform.config import architectures
from ascend_platform.overrides import guard, table
from ascend_platform.plugins import registry, slots
from vllm.model_executor.models.registry import ModelRegistry
from vllm.plugins import load_general_plugins

NAME, DRAFTER, KIMI = "DeepseekV4ForCausalLM", "DeepSeekV4MTPModel", "KimiLinearForCausalLM"
INKLING = "InklingForCausalLM", "InklingForConditionalGeneration"
MINIMAX = "MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"
GLM5_NEXT = ("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration")
OF_VLLM = {
    **{name: f"vllm.models.glm5next:{name}" for name in GLM5_NEXT},
    NAME: f"vllm.models.deepseek_v4:{NAME}",
    DRAFTER: "vllm.models.deepseek_v4:DeepSeekV4MTP",
    **{name: f"vllm.models.inkling:{name}" for name in INKLING},
    KIMI: f"vllm.models.kimi_k3:{KIMI}",
    **{name: f"vllm.models.minimax_m3:{name}" for name in MINIMAX},
}
MODULES = {
    NAME: "deepseek_v4.model",
    DRAFTER: "deepseek_v4.mtp",
    **dict.fromkeys(GLM5_NEXT, "glm5_next.model"),
    **dict.fromkeys(INKLING, "inkling.model"),
    KIMI: "kimi_linear.model",
    **dict.fromkeys(MINIMAX, "minimax_m3.model"),
}


@pytest.fixture(autouse=True)
def nothing_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    load_general_plugins()  # A process does it once, and its later tests need the wheels.
    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setattr(slots, "_offers", {})
    for name, path in OF_VLLM.items():
        monkeypatch.setitem(ModelRegistry.models, name, None)
        ModelRegistry.register_model(name, path)


def join() -> None:
    (entry_point,) = entry_points(group="vllm.general_plugins", name="ascend_models")
    register = entry_point.load()
    register()
    register()


@pytest.mark.parametrize("name", MODULES)
def test_without_the_wheel_its_models_are_refused_in_one_line_that_names_it(name: str) -> None:
    line = architectures.refusal(name)
    assert line.startswith(f"{name} needs ascend-models, which is ")
    assert "fix: " in line
    assert "\n" not in line


@pytest.mark.parametrize(("name", "module"), MODULES.items())
def test_with_the_wheel_its_models_replace_those_of_vllm(name: str, module: str) -> None:
    join()
    assert extension.state("ascend-models") == "active"
    assert architectures.refusal(name) == ""
    architectures.register()
    assert architectures.refusal(name) == ""
    assert ModelRegistry.models[name].module_name == f"ascend_models.{module}"
    for slot in ("model", "model_check"):
        path = extension.offered(f"{slot}.{name}")
        if slot == "model_check" and name == DRAFTER:
            continue
        assert path is not None
        assert callable(pkgutil.resolve_name(path))


def test_register_imports_no_heavy_modules() -> None:
    script = (
        "import ascend_models, sys; ascend_models.register(); print({'torch', 'vllm', 'numpy'} &"
        " {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_disabled_with_unsupported_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_VERSION", "0.99")
    join()
    assert extension.state("ascend-models").startswith("disabled: requires vllm")
    assert extension.offered(f"model.{NAME}") is None


def test_overrides_fit_the_installed_vllm() -> None:
    assert len(table.rows("ascend_models")) == 27
    extension.check_overrides("ascend_models")


@pytest.fixture
def changed_source(monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes vLLM's source of the first row another than the supported one; returns its target."""
    first, *rest = table.rows("ascend_models")
    changed = dataclasses.replace(first, sources={"0.32": "another source"})
    monkeypatch.setattr(table, "of_wheels", lambda: {"ascend_models": (changed, *rest)})
    monkeypatch.setattr(guard, "_problem", guard._problem.__wrapped__)
    return first.target


def test_a_changed_target_is_refused_in_one_line(changed_source: str) -> None:
    with pytest.raises(
        extension.RefusedError, match=r"has changed: found \w+, expected another source; fix: pip"
    ) as caught:
        extension.install_overrides("ascend_models")
    assert f"target {changed_source} has changed" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("changed_source")
def test_models_of_a_vllm_with_other_source_are_refused_in_one_line() -> None:
    join()
    line = architectures.refusal(NAME)
    assert line.startswith(f"{NAME}: vLLM 0.")
    assert "is not supported by ascend-models" in line
    assert extension.state("ascend-models") == "active"
    assert "; fix: pip install --upgrade " in line
    assert "\n" not in line
