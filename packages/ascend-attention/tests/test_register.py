# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The entry point, found and called as in vLLM."""

from importlib.metadata import entry_points

from ascend_platform import extension
from ascend_platform.plugins import registry, slots
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.utils.import_utils import resolve_obj_by_qualname


def test_entry_point_offers_the_fused_attention(monkeypatch):
    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setattr(slots, "_offers", {})
    (entry_point,) = entry_points(group="vllm.general_plugins", name="ascend_attention")
    register = entry_point.load()
    register()
    register()
    assert extension.state("ascend-attention") == "active"
    for kind in ("dense", "sinks", "encoder"):
        assert (
            resolve_obj_by_qualname(extension.offered(f"attention.{kind}")).get_name() == "CUSTOM"
        )
    assert issubclass(
        resolve_obj_by_qualname(extension.offered("attention.vision")), MMEncoderAttention
    )


def test_disabled_with_another_vllm(monkeypatch):
    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setattr(slots, "_offers", {})
    monkeypatch.setenv("VLLM_VERSION", "0.99")
    (entry_point,) = entry_points(group="vllm.general_plugins", name="ascend_attention")
    entry_point.load()()
    assert extension.state("ascend-attention").startswith("disabled: requires vllm")
    assert extension.offered("attention.dense") is None
