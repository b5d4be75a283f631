# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The option ascend.platform.mla_prolog: what refuses it, what disables the operator, and the order
of elements stored."""

import json

import pytest
from ascend_platform import chips, extension, host
from ascend_platform.attention import mla_prolog
from ascend_platform.plugins import slots
from harness.models import by_type, small
from transformers import AutoConfig
from vllm.config import CompilationConfig, CompilationMode, KVTransferConfig, LoRAConfig
from vllm.engine.arg_utils import EngineArgs

ON = {"additional_config": {"ascend": {"platform": {"mla_prolog": True}}}}


@pytest.fixture
def configure(tmp_path):
    def make(name="deepseek-v3, mla_prolog", arguments=ON, **changes):
        if name:
            family, given = by_type.DECODERS[name]
            kind = {"DeepseekV3": "deepseek_v3", "DeepseekV32": "deepseek_v32"}[family]
            AutoConfig.for_model(
                kind, architectures=[f"{family}ForCausalLM"], **by_type.COMMON | given | changes
            ).save_pretrained(tmp_path)
        else:
            tmp_path.joinpath("config.json").write_text(json.dumps(small.TINY))
        return EngineArgs(
            **{"model": str(tmp_path), "skip_tokenizer_init": True, "dtype": "bfloat16"} | arguments
        ).create_engine_config()

    return make


@pytest.mark.parametrize(
    ("name", "changes", "arguments", "message"),
    [
        ("", {}, {}, "with a model without latent attention"),
        ("deepseek-v3.2, selected tokens", {}, {}, "or with sparse latent attention"),
        (
            "deepseek-v3, mla_prolog",
            {},
            {"dtype": "float16"},
            "with --dtype float16; supported: bfloat16",
        ),
        (
            "deepseek-v3, mla_prolog",
            {"hidden_size": 6656},
            {},
            "with hidden_size 6656; supported: 1024, 2048, .*, 8192",
        ),
        (
            "deepseek-v3, mla_prolog",
            {"q_lora_rank": None},
            {},
            "with q_lora_rank None; supported: 1536, 2048",
        ),
        (
            "deepseek-v3, mla_prolog",
            {"num_attention_heads": 12, "num_key_value_heads": 12},
            {},
            "with num_attention_heads 12;",
        ),
    ],
)
def test_models_that_the_operator_does_not_take_are_refused(
    configure, name, changes, arguments, message
):
    with pytest.raises(
        ValueError,
        match=rf"ascend\.platform\.mla_prolog is not supported .*{message}.*fix: remove it",
    ):
        configure(name, ON | arguments, **changes)


def test_sizes_of_cann_9_1_are_taken(configure):
    """DeepSeek-V2's hidden size, and the heads of a model with 192 elements."""
    sizes = {"hidden_size": 5120, "q_lora_rank": 2048, "qk_nope_head_dim": 192}
    assert extension.uses_mla_prolog(configure(**sizes))


def test_it_needs_ascend_attention(configure, monkeypatch):
    monkeypatch.delitem(slots._offers, mla_prolog.SLOT)
    with pytest.raises(
        ValueError, match=r"mla_prolog is not supported with ascend-attention .*; fix: remove it"
    ):
        configure()


def test_only_the_option_decides_the_order(configure, monkeypatch):
    """Instances for prefills and decodes have different layouts, and exchange KV caches."""
    off, on = configure(arguments={}), configure()
    assert (
        extension.rope_order(off),
        extension.uses_mla_prolog(off),
        mla_prolog.describe(off),
    ) == ("pairs", False, "")
    assert (extension.rope_order(on), extension.uses_mla_prolog(on)) == ("halves", True)
    assert mla_prolog.describe(on) == ", decodes with npu_mla_prolog_v3"
    for attribute, value, reason in (
        ("lora_config", LoRAConfig(), "LoRA"),
        (
            "kv_transfer_config",
            KVTransferConfig(kv_connector="A", kv_role="kv_producer"),
            "a prefill instance",
        ),
        (
            "compilation_config",
            CompilationConfig(mode=CompilationMode.VLLM_COMPILE),
            "torch.compile",
        ),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(on, attribute, value)
            assert (extension.rope_order(on), extension.uses_mla_prolog(on)) == ("halves", False)
            assert mla_prolog.describe(on) == f", npu_mla_prolog_v3 disabled: {reason}"
    # The fused attention has blocks of 128, which the operator accepts.
    blocks = configure(arguments=ON | {"block_size": 64})
    assert (extension.rope_order(blocks), extension.uses_mla_prolog(blocks)) == ("halves", False)
    assert mla_prolog.describe(blocks) == ", npu_mla_prolog_v3 disabled: built-in attention"
    monkeypatch.setattr(on, "quant_config", object())  # of some layers or all
    assert (
        mla_prolog.describe(on)
        == ", decodes with npu_mla_prolog_v3 in layers with bfloat16 or W8A8_DYNAMIC projections"
    )
    monkeypatch.setattr(on.parallel_config, "decode_context_parallel_size", 2)
    assert mla_prolog.reason_against(on) == "decode context parallelism"
    monkeypatch.setattr(host, "chip_family", lambda: chips.ChipFamily("none", ()))
    assert mla_prolog.reason_against(on) == f"{host.chip()} has no npu_mla_prolog_v3"
