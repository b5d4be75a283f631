# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantized checkpoints as vLLM's configuration sees them: which are detected, and which are
refused in one line."""

import json
import sys
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from ascend_platform import host, installation
from ascend_platform.platform import NPUPlatform
from ascend_quantization import formats
from ascend_quantization.common import DESCRIPTION, NAME
from ascend_quantization.formats import modelslim
from ascend_quantization.methods import kv_cache
from ascend_quantization.methods.kv_cache import Int8CacheMethod
from harness.engines.configuration import engine_config
from harness.models import small as small_models
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.models.utils import get_draft_quant_config


@pytest.fixture
def model(tmp_path):
    """Write a model's configuration, and perhaps a description; return its directory."""

    def write(description=None, **changes):
        tmp_path.joinpath("config.json").write_text(json.dumps(small_models.TINY | changes))
        if description is not None:
            tmp_path.joinpath(DESCRIPTION).write_text(json.dumps(description))
        return str(tmp_path)

    return write


def chip_is_310p(monkeypatch):
    monkeypatch.setattr(host, "chip", lambda: "Ascend310P3")
    monkeypatch.setattr(installation, "chip_name", host.chip)


WEIGHT = "model.layers.0.mlp.down_proj.weight"


def test_quantized_weights_of_unquantized_layers_are_refused():
    layer = "model.layers.0.self_attn"
    description = {
        f"{layer}.{name}.weight": "W8A8_DYNAMIC" for name in ("o_proj", "compressor.wkv")
    }
    description |= {
        f"model.layers.{number}.mlp.experts.0.gate_proj.weight": "W8A8_DYNAMIC"
        for number in (0, 61)
    }
    description |= {f"{layer}.compressor.norm.weight": "FLOAT"}
    config = modelslim.ModelSlimConfig(description)
    config._asked |= {f"{layer}.o_proj", "model.layers.0.mlp.experts"}
    module = torch.nn.Module()
    for path in (
        "model",
        "model.layers",
        "model.layers.0",
        layer,
        f"{layer}.compressor",
        "model.layers.0.mlp",
    ):
        parent, _, name = path.rpartition(".")
        module.get_submodule(parent).add_module(name, torch.nn.Module())
    with pytest.raises(
        ValueError,
        match=(
            r"compressor\.wkv\.weight as W8A8_DYNAMIC, and vLLM keeps that layer unquantized; fix: "
        ),
    ):
        config.check_loaded(module)
    config.description[f"{layer}.compressor.wkv.weight"] = "FLOAT"
    config.check_loaded(module)


def test_layers_of_a_draft_model_have_schemes():
    """vLLM names the layers of a drafter with ``method: draft_model`` after ``draft_model.``."""
    config = modelslim.ModelSlimConfig({WEIGHT: "W8A8_DYNAMIC"})
    layer = RowParallelLinear.__new__(RowParallelLinear)
    name = WEIGHT.removesuffix(".weight")
    assert config.get_quant_method(layer, f"draft_model.{name}").scheme.name == "W8A8_DYNAMIC"
    assert config._asked == {name}


@pytest.mark.parametrize("name", ["wk", "weights_proj"])
def test_quantized_indexer_weights_are_refused_before_loading(name):
    """The indexer's wk of DeepSeek-V3.2 has no quantization method in vLLM: its integers would be
    loaded as numbers."""
    weight = f"model.layers.0.self_attn.indexer.{name}.weight"
    assert modelslim.ModelSlimConfig({weight: "FLOAT"}).description
    with pytest.raises(
        ValueError,
        match=(
            rf"indexer\.{name}\.weight as W8A8_DYNAMIC, and vLLM keeps that layer unquantized;"
            r" fix: "
        ),
    ):
        modelslim.ModelSlimConfig({weight: "W8A8_DYNAMIC"})


def test_modelslim_drafter_is_detected(model, tmp_path):
    drafter = tmp_path / "eagle3"
    drafter.mkdir()
    drafter_config = {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}
    config = small_models.TINY | drafter_config | {"num_hidden_layers": 1}
    (drafter / "config.json").write_text(json.dumps(config))
    names = [f"midlayer.self_attn.{part}_proj.weight" for part in "qkv"]
    description = {"group_size": 0} | dict.fromkeys(names, "W8A8_DYNAMIC") | {"fc.weight": "FLOAT"}
    (drafter / DESCRIPTION).write_text(json.dumps(description))
    drafts = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": 2}
    target = model()
    result = engine_config(target, speculative_config=drafts)
    assert result.model_config.quantization is None
    draft = result.speculative_config.draft_model_config
    assert draft.quantization == NAME
    draft.hf_config.target_layer_count = 2  # vLLM's model sets it, and numbers its layer so.
    config = get_draft_quant_config(result)
    layer = QKVParallelLinear.__new__(QKVParallelLinear)
    method = config.get_quant_method(layer, "model.layers.2.self_attn.qkv_proj")
    assert method.scheme.name == "W8A8_DYNAMIC"
    assert config.description["model.fc.weight"] == "FLOAT"
    assert config.description["group_size"] == 0
    both = engine_config(model({WEIGHT: "W8A8"}), speculative_config=drafts)
    assert both.model_config.quantization == both.quant_config.get_name() == NAME


def test_modelslim_checkpoint_is_detected(model):
    config = engine_config(model({WEIGHT: "W8A8"}))
    assert config.model_config.quantization == NAME
    assert config.quant_config.description == {WEIGHT: "W8A8"}
    assert engine_config(model({WEIGHT: "W8A8"}), quantization=NAME).quant_config.get_name() == NAME


@pytest.mark.parametrize(
    ("description", "named"),
    [
        (
            {WEIGHT: "W4A4_DYNAMIC"},
            (
                f"W4A4_DYNAMIC .such as {WEIGHT}.; supported: W8A8, W8A8_DYNAMIC, W8A16, W4A16,"
                " W4A8_DYNAMIC"
            ),
        ),
        (
            {WEIGHT: "W8A8", "fa_quant_type": "FAKQuant"},
            "KV cache or attention quantization FAKQuant; supported: C8",
        ),
        (
            {WEIGHT: "W8A8", "kv_cache_type": "KV4"},
            "KV cache or attention quantization KV4; supported: C8",
        ),
    ],
)
def test_unsupported_descriptions_are_refused_in_one_line(model, description, named):
    with pytest.raises(ValueError, match=rf"{DESCRIPTION} [^\n]*{named}[^\n]*"):
        engine_config(model(description))


def test_option_without_a_description_is_refused(model):
    with pytest.raises(
        ValueError,
        match=(
            rf"--quantization {NAME} is for ModelSlim checkpoints, which have a file {DESCRIPTION}"
        ),
    ):
        engine_config(model(), quantization=NAME)


def test_other_chips_and_dtypes_are_refused(model, monkeypatch):
    with pytest.raises(ValueError, match="float32 is not supported for quantization method ascend"):
        engine_config(model({WEIGHT: "W8A8"}), dtype="float32")
    chip_is_310p(monkeypatch)
    with pytest.raises(
        ValueError,
        match=(
            r"of W4A16, which are supported on Atlas A2, Atlas A3 and Ascend 950; this NPU is"
            r" Ascend310P3; .* of W8A8"
        ),
    ):
        engine_config(model({WEIGHT: "W8A8", "x.weight": "W4A16"}))
    engine_config(model({WEIGHT: "W8A8"}), dtype="float16")
    engine_config(model({WEIGHT: "FLOAT"}))


def compressed(weights, inputs=None, form="pack-quantized", **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    } | more


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
FP8 = INT4 | {"num_bits": 8, "type": "float"}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
TENSOR = TOKEN | {"strategy": "tensor", "dynamic": False}


def with_outputs(config, outputs):
    config["config_groups"]["group_0"]["output_activations"] = outputs
    return config


def transforms(location):
    args = {"targets": ["Linear"], "location": location}
    return {"config_groups": {"R4": {"type": "hadamard", "apply": [args]}}}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            compressed(FP8, FP8 | {"strategy": "tensor"}, "float-quantized"),
            "8-bit float weights .channel. with 8-bit",
        ),
        (compressed(INT4 | {"num_bits": 3}), "3-bit int weights"),
        (
            compressed(INT4 | {"num_bits": 8}, TOKEN | {"symmetric": False}, "int-quantized"),
            "8-bit int weights .channel. with 8-bit int",
        ),
        (
            compressed(INT4, kv_cache_scheme={"num_bits": 8, "type": "float"}),
            "a quantized KV cache .kv_cache_scheme.; supported: quantized weights and",
        ),
        (
            compressed(FP8, form="float-quantized", transform_config=transforms("input")),
            "transforms of input .transform_config.; supported: quantized",
        ),
        (
            compressed(INT4, transform_config=transforms("k_cache")),
            "transforms of k_cache .transform_config.; supported: quantized",
        ),
        (
            with_outputs(compressed(FP8, form="float-quantized"), TENSOR),
            "quantized outputs .output_activations.; supported: quantized",
        ),
        (with_outputs(compressed(INT4), TENSOR), "quantized outputs .output_activations."),
    ],
)
def test_unsupported_compressed_tensors_are_refused_in_one_line(model, config, named):
    with pytest.raises(ValueError, match=rf"compressed-tensors asks for [^\n]*{named}"):
        engine_config(model(quantization_config=config))
    # The weights include this one.
    with_transforms = compressed(INT4, transform_config=transforms("weight_input"))
    result = engine_config(model(quantization_config=with_transforms))
    assert result.model_config.quantization == "compressed-tensors"


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            AWQ | {"version": "gemv"},
            "the AWQ checkpoint has weights in the layout of gemv kernels; supported: gemm; fix: ",
        ),
        (AWQ | {"bits": 8}, "the AWQ checkpoint has 8-bit weights; supported: 4 bits"),
        (GPTQ | {"bits": 3}, "the GPTQ checkpoint has 3-bit weights; supported: 4 and 8 bits"),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            r"weights in format marlin \(checkpoint_format\); supported: gptq, gptq_v2",
        ),
        (
            GPTQ | {"desc_act": True},
            r"activation ordering \(desc_act=True\) is no longer supported",
        ),
        (
            GPTQ | {"lm_head": True},
            "a quantized output head .lm_head.; supported: output heads that are not quantized",
        ),
    ],
)
def test_unsupported_awq_and_gptq_checkpoints_are_refused(model, config, named):
    with pytest.raises(ValueError, match=rf"[^\n]*{named}"):
        engine_config(model(quantization_config=config))


@pytest.mark.parametrize(
    ("config", "asked"),
    [(AWQ, "awq"), (GPTQ, "gptq_marlin"), (GPTQ | {"sym": False, "bits": 8}, None)],
)
def test_awq_and_gptq_checkpoints_are_detected(model, monkeypatch, config, asked):
    tensors = {"model.layers.0.mlp.down_proj.qweight": torch.zeros(1, dtype=torch.int32)}
    path = model(quantization_config=config)
    safetensors.torch.save_file(tensors, f"{path}/model.safetensors")
    result = engine_config(path, quantization=asked)
    assert result.model_config.quantization == f"auto_{config['quant_method']}"
    chip_is_310p(monkeypatch)
    with pytest.raises(
        ValueError, match=f"W{config['bits']}A16, which are supported on .* this NPU is Ascend310P3"
    ):
        engine_config(path)


def test_vllm_without_a_name_serves_only_unquantized_models(model, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ascend_quantization.formats.modelslim", None)
    monkeypatch.delattr(formats, "modelslim", raising=False)
    formats.register.cache_clear()
    engine_config(model())
    with pytest.raises(
        ValueError,
        match=(
            r"the model is quantized \(compressed-tensors\), and .* cannot load quantized weights"
        ),
    ):
        engine_config(model(quantization_config=compressed(INT4)))
    directory = model()
    (tmp_path / DESCRIPTION).write_text("{}")
    with pytest.raises(
        ValueError,
        match=r"the model is quantized \(ascend\), .*; fix: pip install --upgrade vllm-ascend-all",
    ):
        engine_config(directory)
    formats.register.cache_clear()


def test_other_methods_are_refused_by_name(model):
    with pytest.raises(
        ValueError,
        match=(
            "methods ascend, compressed-tensors, auto_awq, auto_gptq, fp8, mxfp8, modelopt_mxfp8,"
            " gpt_oss_mxfp4, deepseek_v4_fp8; the model has 'fbgemm_fp8'"
        ),
    ):
        engine_config(
            model(quantization_config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})
        )
    assert NPUPlatform.supported_quantization == []


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]},
        {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]},
        None,
    ],
    ids=["ModelOpt", "MiniMax", "at load"],
)
def test_mxfp8_is_refused_on_this_chip(model, config):
    options = {"quantization_config": config} if config else {}
    asked = {} if config else {"quantization": "mxfp8"}
    with pytest.raises(
        ValueError, match="weights of W8A8_MXFP8, which are supported on Ascend 950; this NPU is"
    ):
        engine_config(model(**options), **asked)


def attention(**changes):
    impl = SimpleNamespace(int8_cache=True, title="this one")
    plain = {
        "impl": impl,
        "head_size": 64,
        "head_size_v": 64,
        "num_kv_heads": 2,
        "dtype": torch.float16,
    }
    layer = torch.nn.Module()
    for name, value in (plain | changes).items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"impl": SimpleNamespace(title="the built-in attention")},
            "which the built-in attention does not support and the fused attention does",
        ),
        (
            {"head_size": 48, "head_size_v": 48},
            "an int8 KV cache with head size 48; multiples of 32",
        ),
    ],
)
def test_unsupported_int8_caches_are_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        Int8CacheMethod("x").create_weights(attention(**changes))


@pytest.mark.parametrize("rank", [0, 1])
def test_int8_cache_scales_are_loaded_per_rank(monkeypatch, rank):
    monkeypatch.setattr(kv_cache, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(kv_cache, "get_tensor_model_parallel_world_size", lambda: 2)
    layer, method = attention(), Int8CacheMethod("x")
    method.create_weights(layer)
    assert layer.kv_cache_torch_dtype == torch.int8
    scales = torch.rand(4 * 64)
    kv_cache.load_part(layer.k_cache_scale, scales)
    with pytest.raises(ValueError, match=r"no kv_cache_scale for x .v."):
        method.process_weights_after_loading(layer)
    method.create_weights(layer)
    kv_cache.load_part(layer.k_cache_scale, scales)
    kv_cache.load_part(layer.v_cache_scale, torch.tensor([0.5]))
    kv_cache.load_part(layer.v_cache_offset, torch.tensor(3.0))
    method.process_weights_after_loading(layer)
    assert torch.equal(layer.k_cache_scale.data, scales.view(2, -1)[rank].half())
    assert layer.k_cache_offset is None
    assert (layer.v_cache_offset == 3).all()
    with pytest.raises(
        ValueError,
        match="a KV cache scale has 100 elements; supported: one, or a multiple of the 128",
    ):
        kv_cache.load_part(
            torch.nn.Parameter(torch.zeros(128), requires_grad=False), torch.zeros(100)
        )


def test_other_values_of_weight_nz_are_refused(model):
    with pytest.raises(
        ValueError, match=r"ascend\.platform\.weight_nz is 'yes'; supported: true, false"
    ):
        engine_config(model(), additional_config={"ascend": {"platform": {"weight_nz": "yes"}}})
