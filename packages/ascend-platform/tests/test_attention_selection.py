# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Which attention serves a layer: by head sizes and counts, features, sequence lengths and chip."""

from types import SimpleNamespace

import pytest
import torch
from ascend_platform import extension, host
from ascend_platform.attention.selector import BUILT_IN, describe_backend, select_backend
from ascend_platform.platform import NPUPlatform
from ascend_platform.plugins import slots
from harness.engines.configuration import engine_config
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig, get_attn_backend

DENSE = AttentionSelectorConfig(
    head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None
)


def test_another_attention_backend_is_refused_by_name():
    with pytest.raises(
        ValueError,
        match="FLASH_ATTN is not supported on Ascend NPUs; fix: remove --attention-backend",
    ):
        NPUPlatform.get_attn_backend_cls(AttentionBackendEnum.FLASH_ATTN, DENSE)


def test_built_in_attention_serves_when_nothing_is_offered(monkeypatch):
    monkeypatch.setattr(slots, "_offers", {})
    path, why = select_backend(DENSE, None)
    assert path == BUILT_IN["dense"]
    assert select_backend(DENSE._replace(attn_type="encoder_only"), None)[0] == BUILT_IN["encoder"]
    assert why == f"built-in PyTorch (ascend-attention is {extension.state('ascend-attention')})"


FUSED = {
    "attention.dense": "ascend_attention.dense.FusedAttentionBackend",
    "attention.sinks": "ascend_attention.sinks.SinkAttentionBackend",
    "attention.encoder": "ascend_attention.encoder.FusedEncoderAttentionBackend",
    "attention.latent": "ascend_attention.latent.FusedLatentAttentionBackend",
    "attention.latent_sparse": "ascend_attention.sparse_latent.FusedSparseLatentAttentionBackend",
}
LATENT = {"use_mla": True, "head_size": 576}
SPARSE = LATENT | {"use_sparse": True}


@pytest.mark.parametrize(
    ("change", "asked", "path", "why"),
    [
        ({}, {}, FUSED["attention.dense"], "fused (ascend-attention "),
        ({"has_sliding_window": True}, {}, FUSED["attention.dense"], "fused"),
        ({"attn_type": "encoder_decoder"}, {}, FUSED["attention.dense"], "fused"),
        ({"has_sink": True}, {}, FUSED["attention.sinks"], "fused"),
        ({"attn_type": "encoder_only"}, {}, FUSED["attention.encoder"], "fused"),
        (
            {"attn_type": "encoder_only", "dtype": torch.float32},
            {},
            FUSED["attention.encoder"],
            "fused",
        ),
        (
            {"dtype": torch.float32},
            {},
            BUILT_IN["dense"],
            "built-in PyTorch (fused attention disabled: dtype not",
        ),
        ({"has_sink": True, "dtype": torch.float16}, {}, BUILT_IN["dense"], "built-in PyTorch"),
        ({"has_sink": True, "head_size": 192}, {}, BUILT_IN["dense"], "built-in PyTorch"),
        (LATENT, {}, FUSED["attention.latent"], "fused (ascend-attention "),
        (
            LATENT | {"head_size": 320},
            {},
            BUILT_IN["latent"],
            "built-in PyTorch (fused attention disabled: head_size not",
        ),
        (
            LATENT | {"dtype": torch.float32},
            {},
            BUILT_IN["latent"],
            "built-in PyTorch (fused attention disabled: dtype not",
        ),
        (SPARSE, {}, FUSED["attention.latent_sparse"], "fused (ascend-attention "),
        (
            SPARSE | {"dtype": torch.float32},
            {},
            BUILT_IN["latent_sparse"],
            "built-in PyTorch (fused attention disabled: dtype not",
        ),
        (
            {},
            {"alibi": True},
            BUILT_IN["dense"],
            "built-in PyTorch (fused attention disabled: ALiBi not supported",
        ),
        (
            {},
            {"cap": 30.0},
            BUILT_IN["dense"],
            "built-in PyTorch (fused attention disabled: logits soft cap not",
        ),
    ],
)
def test_registered_attention_falls_back_to_the_built_in_one(monkeypatch, change, asked, path, why):
    pytest.importorskip("ascend_attention")
    monkeypatch.setattr(slots, "_offers", FUSED)
    text = SimpleNamespace(attn_logit_softcapping=asked.get("cap"))
    model = SimpleNamespace(
        uses_alibi=asked.get("alibi", False), hf_text_config=text, architecture="LlamaForCausalLM"
    )
    result, reason = select_backend(DENSE._replace(**change), model)
    assert result == path
    assert reason.startswith(why)


HEADS = (
    "built-in PyTorch (fused attention disabled: head_size {} not supported with one query head for"
    " each key-value head)"
)
LENGTH = "built-in PyTorch (fused attention disabled: max_model_len above 262144 not supported)"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "ranks", "length", "why"),
    [
        (4, 4, 64, 1, 256, "fused (ascend-attention "),
        (4, 4, 96, 1, 256, HEADS.format(96)),
        (4, 2, 96, 1, 256, "fused (ascend-attention "),
        (4, 4, 256, 2, 256, HEADS.format(256)),
        # Qwen3.5: a rank has 2 heads, and one that it shares.
        (16, 2, 256, 8, 256, "fused (ascend-attention "),
        (16, 2, 256, 16, 256, HEADS.format(256)),
        (4, 2, 128, 1, 262144, "fused (ascend-attention "),
        (4, 2, 128, 1, 262145, LENGTH),
    ],
)
def test_heads_of_a_rank_and_lengths_decide_on_fused_attention(
    model, heads, kv_heads, size, ranks, length, why
):
    pytest.importorskip("ascend_attention")
    path = model(
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        max_position_embeddings=length,
    )
    config = engine_config(path)
    config.parallel_config.tensor_parallel_size = ranks  # more than there are NPUs here
    assert describe_backend(config).startswith(why)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (LATENT | {"use_sparse": True, "use_rswa": True}, "R-SWA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        (LATENT | {"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"attn_type": "encoder"}, "attention type encoder not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
    ],
)
def test_attention_that_nobody_has_is_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        select_backend(DENSE._replace(**change), None)


def test_dtype_auto_is_one_of_the_chip(model, ascend310p):
    assert engine_config(model(dtype="bfloat16")).model_config.dtype == torch.float16
    with pytest.raises(
        ValueError,
        match=r"dtype bfloat16 is not supported on Ascend310P3; supported: float16, float32; fix",
    ):
        engine_config(model(), dtype="bfloat16")


@pytest.mark.parametrize("slot", ["dense", "sinks", "encoder"])
def test_built_in_attention_serves_chips_without_fused_kernels(monkeypatch, ascend310p, slot):
    pytest.importorskip("ascend_attention")
    monkeypatch.setattr(slots, "_offers", FUSED)
    change = {"dense": {}, "sinks": {"has_sink": True}, "encoder": {"attn_type": "encoder_only"}}[
        slot
    ]
    path, why = select_backend(DENSE._replace(**change), None)
    assert path == BUILT_IN[slot]
    assert "fused attention disabled: Ascend310P3 has no npu_fus" in why
    monkeypatch.setattr(host, "chip", lambda: "Ascend950PR_9599")
    assert "built-in" not in select_backend(DENSE._replace(**change), None)[1]


def test_kv_cache_of_a_connector_is_not_in_fractal_nz(model, ascend310p, monkeypatch):
    """Connectors and tiers take the order of other chips; blocks have equal bytes."""
    pytest.importorskip("ascend_attention")
    pytest.importorskip("ascend_kv_connector")
    offer = {"attention.dense_fractal": "ascend_attention.fractal.FractalAttentionBackend"}
    monkeypatch.setattr(slots, "_offers", slots._offers | FUSED | offer)
    path = model(dtype="float16")
    assert describe_backend(engine_config(path)).startswith("fused")
    config = engine_config(path, kv_offloading_size=1)
    with set_current_vllm_config(config):
        layer = get_attn_backend(64, torch.float16, "auto")
    assert f"{layer.__module__}.{layer.__qualname__}" == BUILT_IN["dense"]
    why = "built-in PyTorch (fused attention disabled: KV connector not supported)"
    assert describe_backend(config) == why
