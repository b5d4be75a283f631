# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Registration, slots and options of components, with real distribution metadata in a directory on
sys.path."""

import copy
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from ascend_platform import extension, options
from ascend_platform.plugins import COMPONENTS, registry, slots
from harness.project.distributions import write_metadata
from harness.project.signatures import signatures


@pytest.fixture(autouse=True)
def no_components(monkeypatch):
    """No component, no option, and no current configuration of vLLM, which tests of connectors keep
    until the session's end."""
    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setattr(slots, "_offers", {})
    for name in ("_tables", "_listeners"):
        monkeypatch.setattr(options, name, {})
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("VLLM_VERSION", raising=False)
    vllm = sys.modules.get("vllm.config")
    with vllm.set_current_vllm_config(None) if vllm else nullcontext():
        yield


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a distribution's metadata so that importlib.metadata finds it first."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name, version="1.0", requires=()):
        write_metadata(tmp_path, name, version, requires)

    return install


def test_component_with_met_requirements_is_set_up_once(installed):
    installed(
        "wheel-a",
        requires=[
            "packaging>=1",
            "no-such-thing; extra == 'more'",
            "no-such-thing; python_version < '3'",
        ],
    )
    calls = []
    extension.join("wheel-a", "ascend_a", lambda: calls.append(1), note="no features")
    extension.join("wheel-a", "ascend_a", lambda: calls.append(2))
    assert calls == [1]
    assert extension.state("wheel-a") == "active (no features)"


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        (
            "packaging<1",
            ["packaging<1", extension.version("packaging"), "pip install 'packaging<1'"],
        ),
        (
            "no-such-thing>=2",
            ["no-such-thing>=2", "not installed", "pip install 'no-such-thing>=2'"],
        ),
    ],
)
def test_component_with_unmet_requirement_is_disabled(installed, log_lines, requirement, message):
    installed("wheel-a", requires=[requirement])
    extension.join("wheel-a", "ascend_a", lambda: pytest.fail("set up with an unmet requirement"))
    ((level, line),) = log_lines
    assert level == "WARNING"
    assert "wheel-a 1.0 disabled: requires " in line
    assert all(part in line for part in message)
    assert extension.state("wheel-a").startswith("disabled: ")


def test_setup_that_raises_does_not_reach_vllm(installed, log_lines):
    installed("wheel-a")
    extension.join("wheel-a", "ascend_a", lambda: 1 / 0)
    assert "ZeroDivisionError" in extension.state("wheel-a")
    assert len(log_lines) == 1


@pytest.mark.parametrize(
    ("override", "holds"), [("0.32.5.dev3", True), ("0.33.0", False), ("0.32.0+empty", True)]
)
def test_vllm_version_overrides_the_installed_one(installed, monkeypatch, override, holds):
    installed("wheel-a", requires=["vllm>=0.32,<0.33"])
    installed("vllm", version="0.1")
    assert "found 0.1" in extension.unmet("wheel-a")
    monkeypatch.setenv("VLLM_VERSION", override)
    assert (extension.unmet("wheel-a") == "") is holds


def test_slot_has_one_implementation():
    assert extension.offered("attention.dense") is None
    extension.offer("attention.dense", "a.B")
    extension.offer("attention.dense", "a.B")
    assert extension.offered("attention.dense") == "a.B"
    with pytest.raises(ValueError, match=r"taken by a\.B"):
        extension.offer("attention.dense", "c.D")


def test_summary_names_every_component_with_its_state(installed, monkeypatch):
    for name in COMPONENTS:
        installed(name, requires=["packaging<1"] if name == "ascend-patches" else [])
    monkeypatch.setenv(
        "VLLM_PLUGINS", "ascend,ascend_attention,ascend_patches, ascend_model_loader"
    )
    for name, entry_point in COMPONENTS.items():
        if name in ("ascend-platform", "ascend-attention", "ascend-patches"):
            extension.join(name, entry_point)
    parts = registry.summary("fused").split(" | ")
    assert parts[1] == "platform 1.0 active"
    assert parts[2] == "attention 1.0 active"
    assert parts[3] == "cli 1.0 off (filtered out by VLLM_PLUGINS)"
    assert parts[4] == "communicator 1.0 off (filtered out by VLLM_PLUGINS)"
    assert parts[6].startswith("model-loader 1.0 off (VLLM_PLUGINS has a space")
    assert parts[8].startswith("patches 1.0 disabled: requires packaging<1")
    assert parts[10] == "attention: fused"
    assert f"torch-npu {extension.version('torch-npu')}" in parts[11]
    assert "\n" not in registry.summary("fused")


def test_summary_names_a_component_of_another_project(installed):
    installed("wheel-a")
    assert "wheel-a" not in registry.summary("fused")
    extension.join("wheel-a", "wheel_a")
    assert "wheel-a 1.0 active" in registry.summary("fused").split(" | ")


def test_missing_component_is_not_installed(monkeypatch):
    monkeypatch.setitem(COMPONENTS, "ascend-nothing", "ascend_nothing")
    assert extension.state("ascend-nothing") == "not installed"


def test_options_are_defaults_under_what_is_given():
    from vllm.config import VllmConfig, set_current_vllm_config

    extension.join("wheel-a", "ascend_a", options={"size": 1, "name": "x"})
    config = VllmConfig()
    config.additional_config = {"ascend": {"a": {"size": 2}}, "other": 1}
    with set_current_vllm_config(config):
        assert extension.config("a") == {"size": 2, "name": "x"}
    options.configure(config.additional_config)
    assert extension.config("a") == {"size": 1, "name": "x"}  # Of no engine.


def test_options_are_parsed_once_on_the_configuration():
    from vllm.config import VllmConfig

    options.register("platform", options.Platform)
    config = VllmConfig(additional_config={"ascend": {"platform": {"numa_bind": False}}})
    key = config.compute_hash()
    table = options.of(options.Platform, config)
    assert not table.numa_bind
    assert options.of(options.Platform, config) is table
    assert config.additional_config == {"ascend": {"platform": {"numa_bind": False}}}
    assert config.compute_hash() == key
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert isinstance(copied.additional_config, options.Parsed)
        assert options.of(options.Platform, copied) == table


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": {"sise": 2}}, r"ascend\.a has no key 'sise'; fix: use 'size'"),
        ({"b": {}}, r"ascend has no key 'b'; fix: use one of a"),
        ({"a": 3}, r"ascend\.a must be an object, not 3"),
        ([], r"must be an object, not \[\]"),
    ],
)
def test_unknown_option_is_refused_with_the_nearest_known(given, message):
    extension.join("wheel-a", "ascend_a", options={"size": 1})
    with pytest.raises(ValueError, match=message):
        options.configure({"ascend": given})


def test_interface_is_the_recorded_one():
    """An addition raises API_VERSION's second number, any other change its first; then update the
    record."""
    record = Path(__file__).parent / f"extension_{extension.API_VERSION}.txt"
    lines = [
        line
        for name in sorted(extension.__all__)
        for line in signatures(name, getattr(extension, name))
    ]
    assert "\n".join(lines) == record.read_text().rstrip()


def test_names_of_the_interface_before_are_kept():
    tests = Path(__file__).parent
    before = {
        line.partition("(")[0] for line in (tests / "extension_1.8.txt").read_text().splitlines()
    }
    now = (tests / f"extension_{extension.API_VERSION}.txt").read_text().splitlines()
    assert before <= {line.partition("(")[0] for line in now}


@pytest.mark.parametrize(
    ("api", "upgrade"),
    [
        ("1.0", None),
        ("1.2", None),
        ("1.9", None),
        ("1.10", "vllm-ascend-all"),
        ("2.0", "vllm-ascend-all"),
        ("0.9", "wheel-a"),
    ],
)
def test_component_for_an_incompatible_interface_is_disabled(installed, log_lines, api, upgrade):
    assert extension.API_VERSION == "1.9"
    installed("wheel-a")
    extension.join("wheel-a", "ascend_a", api=api)
    if upgrade is None:
        assert (extension.state("wheel-a"), log_lines) == ("active", [])
        return
    message = (
        f"written for version {api} of ascend_platform.extension, found 1.9; fix: pip install"
        f" --upgrade {upgrade}"
    )
    assert extension.state("wheel-a") == f"disabled: {message}"
    assert log_lines == [("WARNING", f"wheel-a 1.0 {extension.state('wheel-a')}")]


def test_later_minor_version_of_the_interface_is_compatible(installed, monkeypatch):
    monkeypatch.setattr(registry, "API_VERSION", "1.4")
    for name, api in {"wheel-a": "1.0", "wheel-b": "1.4", "wheel-c": "1.5"}.items():
        installed(name)
        extension.join(name, name, api=api)
    assert [extension.state(f"wheel-{letter}").partition(":")[0] for letter in "abc"] == [
        "active",
        "active",
        "disabled",
    ]


def test_unknown_argument_of_join_does_not_raise(installed, log_lines):
    installed("wheel-a")
    extension.join("wheel-a", "ascend_a", lambda: pytest.fail("set up"), api="1.0", colour="green")
    assert extension.state("wheel-a").startswith(
        "disabled: ascend_platform.extension.join takes no colour; fix: pip"
    )
    installed("wheel-b")
    extension.join("wheel-b", "ascend_b", lambda: pytest.fail("set up"), api="one")
    assert extension.state("wheel-b").startswith("disabled: ValueError")


def test_attention_refuses_what_it_has_not():
    from vllm.v1.attention.backend import AttentionType

    class Attention(extension.AttentionImplBase):
        title = "the attention of somebody"

    one = Attention(
        8, 64, 0.125, num_kv_heads=2, kv_sharing_target_layer_name="layers.0", sinks=None
    )
    assert (one.num_heads, one.num_kv_heads, one.head_size, one.writes_cache) == (8, 2, 64, False)
    with pytest.raises(
        extension.RefusedError,
        match="needs sliding window, attention sinks; the attention of somebody supports ",
    ):
        Attention(8, 64, 0.125, sliding_window=4096, sinks=[1.0])
    Attention.serves = frozenset(
        {extension.AttentionFeature.SLIDING_WINDOW, extension.AttentionFeature.ENCODER_ONLY}
    )
    windowed = Attention(8, 64, 0.125, sliding_window=4096, attn_type=AttentionType.ENCODER_ONLY)
    assert (windowed.sliding_window, windowed.sinks, windowed.soft_cap) == (4096, None, None)
    with pytest.raises(
        extension.RefusedError,
        match="supports causal decoder attention, encoder-only attention, sliding window",
    ):
        Attention(8, 64, 0.125, sliding_window=4096, sinks=[1.0])
    Attention.dcp_world_size, Attention.supports_dcp = 2, True
    with pytest.raises(
        extension.RefusedError, match="needs decode context parallelism with sliding window;"
    ):
        Attention(8, 64, 0.125, sliding_window=4096)


@pytest.mark.parametrize(
    ("old", "new"), [("DenseBackend", "AttentionBackendBase"), ("DenseImpl", "AttentionImplBase")]
)
def test_deprecated_names_are_aliases(old, new):
    with pytest.warns(
        DeprecationWarning, match=f"ascend_platform.extension.{old} is deprecated; use {new}"
    ):
        assert getattr(extension, old) is getattr(extension, new)
    assert old not in extension.__all__
    assert not hasattr(extension, "NoSuchName")
