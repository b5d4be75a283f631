# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""KV connectors in vLLM's configuration: which are served, which are refused, and what checks their
options."""

import pytest
from ascend_platform.plugins import registry, slots
from harness.engines.configuration import engine_config


@pytest.fixture
def connectors(monkeypatch):
    """Registers the connectors of ascend-kv-connector; undone after the test."""
    import ascend_kv_connector
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # Once per process, and not while nothing is registered.
    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setattr(slots, "_offers", {})
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    return ascend_kv_connector.register


def transfer(connector, **more):
    return {"kv_transfer_config": {"kv_connector": connector, "kv_role": "kv_both"} | more}


def test_connectors_of_other_devices_are_refused(model, connectors):
    with pytest.raises(
        ValueError, match=r"ExampleConnector is not supported .* need .* is not loaded; fix: pip"
    ):
        engine_config(model(), **transfer("ExampleConnector"))
    connectors()
    with pytest.raises(
        ValueError, match="ExampleConnector is not supported on Ascend NPUs; supported: AscendP2P"
    ):
        engine_config(model(), **transfer("ExampleConnector"))


def test_connector_checks_its_options_before_the_engine_starts(model, connectors):
    connectors()
    with pytest.raises(
        ValueError, match=r"kv_connector_extra_config has no key 'leese'; fix: use 'lease'"
    ):
        engine_config(
            model(), **transfer("AscendP2PConnector", kv_connector_extra_config={"leese": 1})
        )
    with pytest.raises(ValueError, match="transport is 'carrier pigeon'; supported: mooncake"):
        engine_config(
            model(),
            **transfer(
                "AscendP2PConnector", kv_connector_extra_config={"transport": "carrier pigeon"}
            ),
        )


def test_kv_offloading_and_multi_connector_use_npu_connectors(model, connectors):
    ours = "ascend_kv_connector.offloading"
    with pytest.raises(
        ValueError, match=r"OffloadingConnector is not supported on Ascend NPUs; .* is not loaded"
    ):
        engine_config(model(), kv_offloading_size=1)
    connectors()
    config = engine_config(model(), kv_offloading_size=1).kv_transfer_config
    assert (config.kv_connector, config.kv_connector_module_path) == ("OffloadingConnector", ours)
    with pytest.raises(ValueError, match="cpu_bytes_to_use is not set"):
        engine_config(model(), **transfer("OffloadingConnector"))
    host = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
    }
    several = transfer("MultiConnector", kv_connector_extra_config={"connectors": [host]})
    config = engine_config(model(), **several).kv_transfer_config
    assert config.kv_connector_extra_config["connectors"][0]["kv_connector_module_path"] == ours
    host |= {"kv_connector": "NixlConnector", "kv_connector_module_path": None}
    with pytest.raises(ValueError, match="NixlConnector is not supported on Ascend NPUs"):
        engine_config(model(), **several)
    with pytest.raises(
        ValueError, match=r"MultiConnector: kv_connector_extra_config.connectors is None"
    ):
        engine_config(model(), **transfer("MultiConnector"))


def test_canonical_layout_of_host_memory_is_refused(model, connectors):
    connectors()
    options = {"cpu_bytes_to_use": 1 << 30, "canonical_layout": True}
    tiers = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": []}
    for extra in (options, options | tiers):
        with pytest.raises(ValueError, match=r"canonical_layout is not supported .*; fix: remove"):
            engine_config(
                model(), **transfer("OffloadingConnector", kv_connector_extra_config=extra)
            )


@pytest.mark.parametrize(
    ("tiers", "line"),
    [
        ([{"type": "ascend_disk"}], r"tiers\[0\] has no path; fix: set it"),
        (
            [{"type": "fs"}, {"type": "ascend_disk", "path": "/x", "thread": 4}],
            r"secondary_tiers\[1\] has no key 'thread'; fix: use 'threads'",
        ),
        (
            [{"type": "ascend_mooncake", "rest": "1 s"}],
            r"tiers\[0\].rest is '1 s'; supported: a number above 0",
        ),
        ({"type": "ascend_disk"}, "secondary_tiers is {.*}; supported: a list of objects"),
    ],
)
def test_entries_of_tiers_are_checked(model, connectors, tiers, line):
    connectors()
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 30}
    extra["secondary_tiers"] = tiers
    with pytest.raises(ValueError, match=line):
        engine_config(model(), **transfer("OffloadingConnector", kv_connector_extra_config=extra))


def test_entry_of_a_tier_is_accepted(model, connectors):
    connectors()
    tier = {
        "type": "ascend_disk",
        "path": "/x",
        "quota": 1 << 30,
        "threads": 4,
    }
    extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 30}
    extra["secondary_tiers"] = [tier | {"backpressure": {}}]
    engine_config(model(), **transfer("OffloadingConnector", kv_connector_extra_config=extra))


def test_module_path_of_vllm_ascend_is_replaced_by_its_counterpart(model, connectors, log_lines):
    connectors()
    there = {
        "kv_connector_module_path": "vllm_ascend.distributed.mooncake_connector",
        "kv_connector_extra_config": {"leese": 1},
    }
    with pytest.raises(ValueError, match="no key 'leese'"):  # the counterpart has been asked
        engine_config(model(), **transfer("MooncakeConnectorV1", **there))
    assert any(
        "ignoring kv_connector_module_path vllm_ascend.distributed.mooncake_connector" in line
        for _, line in log_lines
    )


def test_connectors_without_states_are_refused_for_such_models(model, connectors):
    connectors()
    mamba = {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
    }
    directory = model(**mamba, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16, mamba_expand=1)
    for name in ("OffloadingConnector", "AscendStoreConnector"):
        line = (
            f"KV connector {name} does not support models with state-space or linear attention"
            " layers; fix: use AscendP2PConnector, which does"
        )
        with pytest.raises(ValueError, match=line):
            engine_config(directory, **transfer(name))
    local = {"kv_connector_extra_config": {"insecure": True}}
    assert (
        engine_config(directory, **transfer("AscendP2PConnector", **local)).kv_transfer_config
        is not None
    )
