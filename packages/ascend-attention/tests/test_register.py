"""The entry point, found and called as vLLM does it."""

from importlib.metadata import entry_points

from ascend_platform import extension
from vllm.utils.import_utils import resolve_obj_by_qualname


def test_entry_point_offers_the_fused_attention(monkeypatch):
    for name in ("_states", "_offers"):
        monkeypatch.setattr(extension, name, {})
    (entry_point,) = entry_points(group="vllm.general_plugins", name="ascend_attention")
    register = entry_point.load()
    register()
    register()
    assert extension.state("ascend-attention") == "active"
    assert resolve_obj_by_qualname(extension.offered("attention.dense")).get_name() == "CUSTOM"


def test_it_stands_aside_when_vllm_is_another(monkeypatch):
    for name in ("_states", "_offers"):
        monkeypatch.setattr(extension, name, {})
    monkeypatch.setenv("VLLM_VERSION", "0.99")
    (entry_point,) = entry_points(group="vllm.general_plugins", name="ascend_attention")
    entry_point.load()()
    assert extension.state("ascend-attention").startswith("standing aside: it needs vllm")
    assert extension.offered("attention.dense") is None
