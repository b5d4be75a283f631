# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's own layers with the tensors of quantized checkpoints, against float64: biases, rules for
single layers, and what is refused."""

import json
from types import SimpleNamespace

import ascend_platform.ops.gemma_layernorm
import ascend_platform.ops.layernorm  # noqa: F401
import pytest
import torch
from ascend_quantization.formats.awq_gptq import NPUAWQConfig, NPUGPTQConfig
from ascend_quantization.formats.compressed_tensors import NPUCompressedTensorsConfig
from ascend_quantization.formats.modelslim import ModelSlimConfig
from harness.models import quantize
from harness.models.quantize import Spec
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
)
from vllm.model_executor.models.utils import PPMissingLayer, WeightsMapper

IN, OUT = 256, 64
HALVES = [torch.float16, torch.bfloat16]
RANGE = torch.tensor(-1.5), torch.tensor(4.0)
DYNAMIC, STATIC = "W8A8_DYNAMIC", "W8A8"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))


def build(make, config, dtype=torch.float16):
    """A module that vLLM makes for a model in this dtype with the quantization configuration."""
    vllm_config, before = VllmConfig(), torch.get_default_dtype()
    vllm_config.quant_config = config
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(vllm_config):
            return make()
    finally:
        torch.set_default_dtype(before)


def load(module, tensors):
    """Load by the parameters' own loaders those that the module has, as AutoWeightsLoader does, and
    convert them."""
    for name, tensor in tensors.items():
        parameter = getattr(module, name, None)
        if parameter is None:
            assert name.endswith("bias"), name
        elif hasattr(parameter, "weight_loader"):
            parameter.weight_loader(parameter, tensor)
        else:
            parameter.data.copy_(tensor)
    module.to("npu")
    if method := getattr(module, "quant_method", None):
        method.process_weights_after_loading(module)
    return module


def drawn(spec, bias, dtype):
    """A random matrix, and its tensors in a ModelSlim checkpoint."""
    matrix = quantize.matrix(torch.randn(OUT, IN) * 0.1, spec, dtype)
    return matrix, quantize.of_ascend(matrix, bias, RANGE, dtype)


def rounded(x, spec, dtype):
    x = x.double()
    if spec.inputs == "dynamic":
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale
    scale, offset = quantize.input_steps(RANGE, dtype)
    return ((x / scale + offset).round().clamp(-128, 127) - offset) * scale


def distance(actual, expected):
    """Relative error."""
    return ((actual.cpu().double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("spec", [Spec(8, "static"), Spec(8, "dynamic")], ids=str)
def test_bias_is_added_once(spec, skipped, dtype):
    """With skip_bias_add, as in Falcon, the caller adds it."""
    bias = torch.linspace(-1, 1, OUT).to(dtype)
    matrix, tensors = drawn(spec, bias, dtype)
    options = {"quant_config": ModelSlimConfig({"x.weight": spec.scheme}), "prefix": "x"}
    options |= {"skip_bias_add": skipped, "params_dtype": dtype}
    layer = build(lambda: ReplicatedLinear(IN, OUT, **options), options["quant_config"], dtype)
    load(layer, tensors | {"bias": bias})
    x = (torch.randn(5, IN) * 0.8).to(dtype)
    product, added = layer(x.npu())
    assert (added is not None) == skipped
    exact = rounded(x, spec, dtype) @ matrix.numbers().T + bias.double()
    assert distance(product if added is None else product + added, exact) < torch.finfo(dtype).eps


@pytest.mark.parametrize("scheme", [DYNAMIC, "FLOAT"])
def test_biases_that_only_the_checkpoint_has(scheme):
    """ModelSlim undoes the bias of a norm by one in the layers that read it (anti-outlier)."""
    dtype, bias = torch.float16, torch.linspace(-1, 1, OUT).half()
    matrix, tensors = drawn(Spec(8, "dynamic"), None, dtype)
    if scheme == "FLOAT":
        tensors = {"weight": matrix.numbers().to(dtype)}
    config = ModelSlimConfig({"x.weight": scheme, "x.bias": "FLOAT"})
    options = {"bias": False, "quant_config": config, "prefix": "x", "return_bias": False}
    layer = build(lambda: ReplicatedLinear(IN, OUT, params_dtype=dtype, **options), config)
    load(layer, tensors | {"bias": bias})
    x = torch.randn(5, IN).to(dtype)
    values = x.double() if scheme == "FLOAT" else rounded(x, Spec(8, "dynamic"), dtype)
    exact = values @ matrix.numbers().T + bias.double()
    assert distance(layer(x.npu()), exact) < torch.finfo(dtype).eps


def norms(config, *biases, reader="gate", of=RMSNorm):
    """A model of norms with these biases, and a layer without one."""
    model = torch.nn.Module()
    for number, bias in enumerate(biases):
        norm = build(lambda: of(IN), config)
        model.add_module(f"layernorm{number}", load(norm, {"bias": bias}))
    model.mlp = torch.nn.Module()
    layer = build(lambda: ReplicatedLinear(IN, 4, bias=False), config)
    model.mlp.add_module(reader, layer)
    return model


@pytest.mark.parametrize("of", [RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("residual", [None, torch.ones(5, IN)], ids=["alone", "residual"])
def test_biases_of_norms_are_added(residual, of):
    config = ModelSlimConfig(
        {"a.layernorm.bias": "FLOAT", "a.layernorm.weight": "FLOAT", "x.weight": STATIC}
    )
    bias = torch.linspace(-1, 1, IN).half()
    model = norms(config, bias, torch.zeros(IN), of=of)
    norm, other = model.layernorm0, model.layernorm1
    config.check_loaded(model)
    assert other.bias is None  # It was zero.
    x = torch.randn(5, IN).half()
    total = x.double() if residual is None else x.double() + residual
    exact = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    more = [] if residual is None else [residual.half().npu()]
    layers = [each(x.npu(), *more) for each in (norm, other)]
    if residual is not None:
        assert distance(layers[0][1], total) < 1e-3
        layers = [each[0] for each in layers]
    assert distance(layers[0], exact + bias.double()) < 1e-3
    assert distance(layers[1], exact) < 1e-3


@pytest.mark.parametrize("reader", ["gate", "kv_b_proj"])
def test_biases_of_norms_that_a_layer_cannot_undo_are_refused(reader):
    """The router is no quantized layer; latent attention takes only kv_b_proj's matrix."""
    names = "a.layernorm.bias", f"mlp.{reader}.weight", f"mlp.{reader}.bias"
    config = ModelSlimConfig(dict.fromkeys(names, "FLOAT"))
    if reader == "kv_b_proj":
        config.get_quant_method(ReplicatedLinear.__new__(ReplicatedLinear), "mlp.kv_b_proj")
    config.check_loaded(norms(config, torch.zeros(IN), reader=reader))
    with pytest.raises(
        ValueError, match=rf"has mlp\.{reader}\.bias, .* vLLM's layer has no bias; fix: quantize"
    ):
        config.check_loaded(norms(config, torch.ones(IN), reader=reader))


def test_biases_of_layers_on_other_stages_are_not_missed():
    config = ModelSlimConfig(dict.fromkeys(("a.norm.weight", "a.norm.bias", "norm.bias"), "FLOAT"))
    model = norms(config, torch.ones(IN))
    model.norm = PPMissingLayer()
    config.check_loaded(model)
    assert model.layernorm0.bias is not None


def test_fields_of_a_description_keep_their_names():
    """The Transformers backend puts a prefix before all names."""
    fields = {"version": "1.0.0", "group_size": 64}
    config = ModelSlimConfig(fields | {"layers.0.x.weight": "W4A8_DYNAMIC"})
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"": "model."}))
    assert config.description.items() >= fields.items()
    assert config.description["model.layers.0.x.weight"] == "W4A8_DYNAMIC"


def group(targets, weights, inputs=None):
    return {"targets": targets, "weights": weights, "input_activations": inputs}


def compressed(*groups, form="pack-quantized"):
    return NPUCompressedTensorsConfig.from_config(
        {
            "format": form,
            "config_groups": {str(number): matrix for number, matrix in enumerate(groups)},
        }
    )


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TENSOR = INT8 | {"strategy": "tensor", "dynamic": False}
TOKEN = INT8 | {"strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    "make",
    [
        lambda: ModelSlimConfig({"self_attn.kv_b_proj.weight": STATIC}),
        lambda: compressed(group(["Linear"], INT8, TENSOR), form="int-quantized"),
    ],
    ids=["ModelSlim", "compressed-tensors"],
)
def test_static_inputs_of_an_absorbed_matrix_are_refused(make):
    layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
    with pytest.raises(
        ValueError, match=r"kv_b_proj is W8A8, whose static inputs .* supported: W8A8_DYNAMIC, FLO"
    ):
        make().get_quant_method(layer, "self_attn.kv_b_proj")


def test_static_inputs_of_a_layer_of_that_name_without_mla(tmp_path):
    """As in MiniCPM3."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "head_dim": 8}))
    config = VllmConfig(model_config=ModelConfig(str(tmp_path), skip_tokenizer_init=True))
    layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
    with set_current_vllm_config(config):
        described = ModelSlimConfig({"self_attn.kv_b_proj.weight": STATIC})
        assert described.get_quant_method(layer, "self_attn.kv_b_proj").scheme.name == STATIC


PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
QKV = "model.layers.0.self_attn.qkv_proj"


def method(config):
    config.packed_modules_mapping = PARTS
    return config.get_quant_method(QKVParallelLinear.__new__(QKVParallelLinear), QKV)


def test_fused_matrices_of_two_schemes_are_refused():
    config = compressed(group([r"re:.*q_proj"], INT8, TOKEN), group([r"re:.*[kv]_proj"], INT8))
    with pytest.raises(ValueError, match=f"the matrices of {QKV} have different schemes; fix: "):
        method(config)


GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("rule", "scheme", "group_size", "symmetric"),
    [
        ({"bits": 8}, "W8A16", 128, True),
        ({"group_size": 32}, "W4A16", 32, True),
        ({"sym": False}, "W4A16", 128, False),
    ],
)
def test_rules_of_gptq_for_parts_of_a_fused_layer(rule, scheme, group_size, symmetric):
    result = method(NPUGPTQConfig.from_config(GPTQ | {"dynamic": {r".*\.[qkv]_proj": rule}}))
    assert (result.scheme.name, result.group_size) == (scheme, group_size)
    assert result.read.keywords["symmetric"] is symmetric
    config = NPUGPTQConfig.from_config(GPTQ | {"dynamic": {r"-:.*\.[qkv]_proj": {}}})
    assert type(method(config)).__name__ == "UnquantizedLinearMethod"
    one = NPUGPTQConfig.from_config(GPTQ | {"dynamic": {r"+:.*\.v_proj": rule}})
    with pytest.raises(ValueError, match=r"different rules \(dynamic\) for .*q_proj, .*v_proj, wh"):
        method(one)


def test_zeros_of_awq_are_read():
    """As AutoAWQ's kernels do, also with ``zero_point`` false."""
    matrix = quantize.matrix(
        torch.randn(OUT, IN) + 0.3, Spec(4, group=64, symmetric=False), HALVES[0]
    )
    config = NPUAWQConfig.from_config({"bits": 4, "group_size": 64, "zero_point": False})
    result = method(config).read(quantize.of_awq(matrix, HALVES[0]))
    assert torch.equal(result.zero_point, matrix.zero)
