# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantization schemes against float64, and refused configurations through vLLM's own
configuration."""

import functools
import json
import sys
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import torch_npu
from ascend_platform import host, quantization
from ascend_platform.config import options
from ascend_platform.platform import NPUPlatform
from ascend_platform.quantization import base
from ascend_platform.quantization.common import DESCRIPTION, NAME
from ascend_platform.quantization.formats import awq_gptq, modelslim
from ascend_platform.quantization.formats.compressed_tensors import reader
from ascend_platform.quantization.methods import kv_cache
from ascend_platform.quantization.methods.kv_cache import Int8CacheMethod
from ascend_platform.quantization.schemes import SCHEMES
from harness.configuration import engine_config
from harness.models import quantize
from harness.models import small as small_models
from harness.models.quantize import Spec

HALVES = [torch.float16, torch.bfloat16]
IN, OUT = 256, 64
SPECS = [
    Spec(8, "static"),
    Spec(8, "dynamic"),
    Spec(8),
    Spec(8, symmetric=False),
    Spec(8, group=64, symmetric=False),
    Spec(4),
    Spec(4, symmetric=False),
    Spec(4, group=32, symmetric=False),
    Spec(4, group=128, packed=True),
    Spec(4, "dynamic"),
    Spec(4, "dynamic", group=64),
]
OF_EXPERTS = [
    spec for spec in SPECS if spec.inputs != "static" and (spec.bits == 4 or not spec.group)
]


def described(spec):
    """The description's entries for a layer called x."""
    second = (
        {"x.weight_scale_second": spec.scheme}
        if spec.scheme == "W4A8_DYNAMIC" and spec.group
        else {}
    )
    packed = {"x.weight_packed": spec.scheme} if spec.packed else {}
    return {"version": "1.0.0"} | second | packed


def drawn(spec, dtype, *, experts=0):
    """A random matrix (or one per expert), and its tensors in a ModelSlim checkpoint."""
    torch.manual_seed(0)
    made = [
        quantize.matrix(torch.randn(OUT, IN) * 0.1 + 0.02, spec, dtype) for _ in range(experts or 1)
    ]
    inputs = torch.tensor(-1.5), torch.tensor(4.0)
    stored = [quantize.of_ascend(own, torch.linspace(-1, 1, OUT), inputs, dtype) for own in made]
    names = SCHEMES[spec.scheme].stored(described(spec), "x")
    given = {name: torch.stack([each[name] for each in stored]).npu() for name in names}
    return made, given if experts else {name: tensor[0] for name, tensor in given.items()}


def quantized_inputs(x, spec, dtype):
    x = x.double()
    if spec.inputs == "dynamic":
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale
    if spec.inputs == "static":
        scale, offset = quantize.input_steps((torch.tensor(-1.5), torch.tensor(4.0)), dtype)
        return ((x / scale + offset).round().clamp(-128, 127) - offset) * scale
    return x


def distance(actual, expected):
    """Relative error."""
    return ((actual.cpu().double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_linear_layer(spec, dtype):
    scheme = SCHEMES[spec.scheme]
    (own,), given = drawn(spec, dtype)
    if spec.inputs == "static" and dtype == torch.float16:  # as vLLM's parameter converts the bits
        given["deq_scale"] = given["deq_scale"].to(torch.int32).view(torch.float32)
    packed = scheme.load(given, dtype, "x", True)
    assert set(packed) == set(scheme.packed)
    # Converted once, because npu_quant_matmul would convert a float32 scale for float16 in each
    # call.
    if spec.inputs == "static":
        assert packed["deq_scale"].dtype == (
            torch.int64 if dtype == torch.float16 else torch.float32
        )
    x = (torch.randn(5, IN) * 0.8).to(dtype)
    bias = torch.linspace(-1, 1, OUT).to(dtype)
    actual = scheme.apply(x.npu(), packed, None if spec.inputs == "static" else bias.npu())
    assert actual.dtype == dtype
    values = quantized_inputs(x, spec, dtype)
    bound = torch.finfo(dtype).eps
    assert distance(actual, values @ own.numbers().T + bias.double()) < bound
    changes = [wrong_scale] + [swapped] * (spec.bits == 4) + [no_zero] * (not spec.symmetric)
    for change in changes:  # Each of these errors is far above the bound.
        assert distance(actual, values @ change(own).numbers().T + bias.double()) > 3 * bound
    if spec.inputs == "static":
        shifted = values + (quantize.input_steps((torch.tensor(-1.5), torch.tensor(4.0)), dtype)[0])
        assert distance(actual, shifted @ own.numbers().T + bias.double()) > bound
        # For the other ranks, which do not add the bias.
        later = scheme.load(given, dtype, "x", False)
        assert not later["quant_bias"].any()


@pytest.mark.parametrize(
    ("given", "form"),
    [({}, "FRACTAL_NZ"), ({"weight_nz": False}, "ND"), ({"weight_nz": True}, "FRACTAL_NZ")],
)
def test_weights_in_fractal_nz(monkeypatch, given, form):
    monkeypatch.setitem(options._given, "platform", given)
    scheme, (own,), tensors = SCHEMES["W8A8_DYNAMIC"], *drawn(Spec(8, "dynamic"), torch.float16)
    packed = scheme.load(tensors, torch.float16, "x", True)
    assert torch_npu.get_npu_format(packed["weight"]).name == form
    # Blocks of 32 do not divide 48.
    narrow = base.transpose_int8(torch.zeros(48, IN, dtype=torch.int8).npu())
    assert torch_npu.get_npu_format(narrow).name == "ND"
    x = torch.randn(5, IN).half()
    actual = scheme.apply(x.npu(), packed, None)
    assert (
        distance(actual, quantized_inputs(x, own.spec, torch.float16) @ own.numbers().T)
        < torch.finfo(torch.float16).eps
    )


def test_updated_weights_stay_in_fractal_nz():
    """A reload copies a layer's new tensors into its parameters (vLLM's ``layerwise.py``)."""
    scheme, (own,), tensors = SCHEMES["W8A8_DYNAMIC"], *drawn(Spec(8, "dynamic"), torch.float16)
    packed = scheme.load(
        tensors | {"weight": torch.zeros_like(tensors["weight"])}, torch.float16, "x", True
    )
    address = packed["weight"].data_ptr()
    for name, new in scheme.load(tensors, torch.float16, "x", True).items():
        packed[name].copy_(new)
    assert (torch_npu.get_npu_format(packed["weight"]).name, packed["weight"].data_ptr()) == (
        "FRACTAL_NZ",
        address,
    )
    x = torch.randn(5, IN).half()
    actual = scheme.apply(x.npu(), packed, None)
    assert (
        distance(actual, quantized_inputs(x, own.spec, torch.float16) @ own.numbers().T)
        < torch.finfo(torch.float16).eps
    )


def test_other_values_of_weight_nz_are_refused(model):
    with pytest.raises(
        ValueError, match=r"ascend\.platform\.weight_nz\" is 'yes'; supported: true, false"
    ):
        engine_config(model(), additional_config={"ascend": {"platform": {"weight_nz": "yes"}}})


def wrong_scale(own):
    return quantize.Matrix(own.spec, own.values, own.scale * 1.1, own.zero)


def swapped(own):
    return quantize.Matrix(
        own.spec, own.values.unflatten(1, (-1, 2)).flip(-1).flatten(1), own.scale, own.zero
    )


def no_zero(own):
    return quantize.Matrix(own.spec, own.values, own.scale, own.zero * 0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("spec", OF_EXPERTS, ids=str)
@pytest.mark.parametrize("counts", [[3, 0, 4], [7]], ids=str)
def test_experts(spec, dtype, counts):
    scheme = SCHEMES[spec.scheme]
    made, given = drawn(spec, dtype, experts=len(counts))
    packed = scheme.pack(scheme.checked(scheme.read(given), "x"), dtype)
    assert set(packed) == set(scheme.packed)
    down = scheme.pack_down(scheme.checked(scheme.read(given), "x"), dtype)
    if spec.scheme == "W8A8_DYNAMIC":  # of npu_grouped_matmul's dtype, converted once
        assert down["weight_scale"].dtype == (dtype if dtype == torch.bfloat16 else torch.float32)
    x = torch.randn(sum(counts), IN).to(dtype)
    actual = scheme.grouped(x.npu(), packed, torch.tensor(counts).npu())
    values, expert = (
        quantized_inputs(x, spec, dtype),
        torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)),
    )
    numbers = torch.stack([own.numbers() for own in made])
    assert (
        distance(actual, torch.einsum("mk,mnk->mn", values, numbers[expert]))
        < torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("inner", [32, 64])  # the second by npu_dequant_swiglu_quant
def test_swiglu_of_int8_experts(inner):
    scheme, dtype = SCHEMES["W8A8_DYNAMIC"], torch.float16
    torch.manual_seed(1)
    matrices = []
    for out, inputs in ((2 * inner, IN), (OUT, inner)):
        made = [
            quantize.matrix(torch.randn(out, inputs) * 0.1, Spec(8, "dynamic"), dtype)
            for _ in range(2)
        ]
        stored = base.Quantized(
            *(
                torch.stack([getattr(own, n) for own in made]).npu()
                for n in ("values", "scale", "zero")
            )
        )
        matrices.append(
            (
                torch.stack([own.numbers() for own in made]),
                scheme.pack(scheme.checked(stored, "x"), dtype),
            )
        )
    x, expert = torch.randn(6, IN).to(dtype), torch.tensor([0, 0, 1, 1, 1, 1])
    (first, first_packed), (second, second_packed) = matrices
    actual = scheme.swiglu(first_packed, second_packed, x.npu(), torch.tensor([2, 4]).npu())
    gate, up = torch.einsum(
        "mk,mnk->mn", quantized_inputs(x, Spec(8, "dynamic"), dtype), first[expert]
    ).chunk(2, -1)
    hidden = quantized_inputs(torch.nn.functional.silu(gate) * up, Spec(8, "dynamic"), dtype)
    assert (
        distance(actual, torch.einsum("mk,mnk->mn", hidden, second[expert])) < 0.01
    )  # A value near a tie may be rounded differently.


@pytest.mark.parametrize(
    "spec", [Spec(8, symmetric=False), Spec(4, group=32, symmetric=False), Spec(4)], ids=str
)
def test_packed_words_of_compressed_tensors(spec):
    own = quantize.matrix(torch.randn(OUT, IN) + 0.3, spec, torch.float16)
    found = reader(spec.bits)(
        {
            name: tensor.npu()
            for name, tensor in quantize.of_compressed(own, None, torch.float16).items()
        }
    )
    assert torch.equal(found.weight.cpu(), own.values)
    assert torch.equal(found.scale.cpu(), own.scale)
    assert spec.symmetric or torch.equal(found.zero_point.cpu(), own.zero)


@pytest.mark.parametrize(
    ("form", "spec"),
    [
        ("awq", Spec(4, group=64, symmetric=False)),
        ("awq", Spec(4, group=64)),
        ("gptq", Spec(4, group=64, symmetric=False)),
        ("gptq_v2", Spec(4, group=64, symmetric=False)),
        ("gptq", Spec(4, symmetric=True)),
        ("gptq", Spec(8, group=128, symmetric=False)),
    ],
    ids=str,
)
def test_packed_words_of_awq_and_gptq(form, spec):
    own = quantize.matrix(torch.randn(OUT, IN) + 0.3, spec, torch.float16)
    if form == "awq":
        given, read = (
            quantize.of_awq(own, torch.float16),
            functools.partial(awq_gptq.read_awq, symmetric=spec.symmetric),
        )
    else:
        given = quantize.of_gptq(own, torch.float16, second=form == "gptq_v2")
        offset = 0 if form == "gptq_v2" else awq_gptq.ONES[spec.bits]
        read = functools.partial(
            awq_gptq.read_gptq, bits=spec.bits, symmetric=spec.symmetric, offset=offset
        )
    found = read({name: tensor.npu() for name, tensor in given.items()})
    assert torch.equal(found.weight.cpu(), own.values)
    assert torch.equal(found.scale.cpu().float(), own.scale)
    assert spec.symmetric or torch.equal(found.zero_point.cpu(), own.zero)
    # experts
    several = read({name: torch.stack((tensor, tensor)).npu() for name, tensor in given.items()})
    assert torch.equal(several.weight[1], found.weight)


def test_first_gptq_format_with_zeros_of_0():
    """GPTQModel subtracts 1 from a word of eight zeros at once, which borrows from the next where a
    zero is 0."""
    zero = torch.tensor([[-8.0, 3, -8, -8, 0, 7, -8, 5]]).T
    own = quantize.Matrix(
        Spec(4, symmetric=False), torch.zeros(8, 32, dtype=torch.int8), torch.ones(8, 1), zero
    )
    found = awq_gptq.read_gptq(
        quantize.of_gptq(own, torch.float16), bits=4, symmetric=False, offset=awq_gptq.ONES[4]
    )
    assert torch.equal(found.zero_point, zero)


@pytest.fixture
def model(tmp_path):
    """Write a model's configuration, and perhaps a description; return its directory."""

    def write(description=None, **changes):
        tmp_path.joinpath("config.json").write_text(json.dumps(small_models.TINY | changes))
        if description is not None:
            tmp_path.joinpath(DESCRIPTION).write_text(json.dumps(description))
        return str(tmp_path)

    return write


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
    made = torch.nn.Module()
    for path in (
        "model",
        "model.layers",
        "model.layers.0",
        layer,
        f"{layer}.compressor",
        "model.layers.0.mlp",
    ):
        parent, _, name = path.rpartition(".")
        made.get_submodule(parent).add_module(name, torch.nn.Module())
    with pytest.raises(
        ValueError,
        match=(
            r"compressor\.wkv\.weight as W8A8_DYNAMIC, and vLLM keeps that layer unquantized; fix: "
        ),
    ):
        config.check_loaded(made)
    config.description[f"{layer}.compressor.wkv.weight"] = "FLOAT"
    config.check_loaded(made)


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
    monkeypatch.setattr(host, "chip", lambda: "Ascend310P3")
    with pytest.raises(
        ValueError,
        match=(
            r"of W4A16, which are supported on Atlas A2 and Atlas A3; this NPU is Ascend310P3; .*"
            r" of W8A8"
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
            "a KV cache of 8-bit float; supported: the model's",
        ),
    ],
)
def test_unsupported_compressed_tensors_are_refused_in_one_line(model, config, named):
    with pytest.raises(ValueError, match=rf"compressed-tensors asks for [^\n]*{named}"):
        engine_config(model(quantization_config=config))
    assert (
        engine_config(model(quantization_config=compressed(INT4))).model_config.quantization
        == "compressed-tensors"
    )


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
    found = engine_config(path, quantization=asked)
    assert found.model_config.quantization == f"auto_{config['quant_method']}"
    monkeypatch.setattr(host, "chip", lambda: "Ascend310P3")
    with pytest.raises(
        ValueError, match=f"W{config['bits']}A16, which are supported on .* this NPU is Ascend310P3"
    ):
        engine_config(path)


def test_a_vllm_that_lacks_a_name_serves_unquantized_models_only(model, monkeypatch, tmp_path):
    monkeypatch.setattr(quantization, "_import_error", None)
    monkeypatch.setitem(sys.modules, "ascend_platform.quantization.formats.modelslim", None)
    monkeypatch.delattr(quantization.formats, "modelslim", raising=False)
    quantization.register.cache_clear()
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
        match=r"the model is quantized \(ascend\), .*; fix: pip install --upgrade ascend-platform",
    ):
        engine_config(directory)
    quantization.register.cache_clear()


def test_other_methods_are_refused_by_name(model):
    with pytest.raises(
        ValueError,
        match=(
            "methods ascend, compressed-tensors, auto_awq, auto_gptq, fp8, gpt_oss_mxfp4; the model"
            " has 'fbgemm_fp8'"
        ),
    ):
        engine_config(
            model(quantization_config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})
        )
    assert NPUPlatform.supported_quantization == []


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


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_rank_with_a_single_group_has_scales_per_channel(dtype):
    """CANN takes only group sizes below the number of inputs; the emulator refuses others."""
    spec = Spec(4, group=IN, symmetric=False)
    (own,), given = drawn(spec, dtype)
    packed = SCHEMES[spec.scheme].load(given, dtype, "x", True)
    x = torch.randn(5, IN).to(dtype)
    assert (
        distance(SCHEMES[spec.scheme].apply(x.npu(), packed, None), x.double() @ own.numbers().T)
        < torch.finfo(dtype).eps
    )
