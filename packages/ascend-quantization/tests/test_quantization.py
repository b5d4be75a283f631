# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantization schemes against float64, and the storage of checkpoint formats."""

import functools

import pytest
import torch
import torch_npu
from ascend_platform import host
from ascend_quantization import base
from ascend_quantization.formats import awq_gptq
from ascend_quantization.formats.compressed_tensors import reader
from ascend_quantization.schemes import SCHEMES, floats
from harness.models import quantize
from harness.models.quantize import Spec
from vllm.config import VllmConfig, set_current_vllm_config

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
    matrices = [
        quantize.matrix(torch.randn(OUT, IN) * 0.1 + 0.02, spec, dtype) for _ in range(experts or 1)
    ]
    inputs = torch.tensor(-1.5), torch.tensor(4.0)
    stored = [
        quantize.of_ascend(matrix, torch.linspace(-1, 1, OUT), inputs, dtype) for matrix in matrices
    ]
    names = SCHEMES[spec.scheme].stored(described(spec), "x")
    given = {name: torch.stack([each[name] for each in stored]).npu() for name in names}
    return matrices, given if experts else {name: tensor[0] for name, tensor in given.items()}


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


def test_every_registered_scheme_is_compared_with_float64():
    """Those of integers; test_float_schemes.py compares the others."""
    schemes = {n: each for n, each in SCHEMES.items() if not isinstance(each, floats.FloatScheme)}
    assert {spec.scheme for spec in SPECS} == {*schemes}
    assert {spec.scheme for spec in OF_EXPERTS} == {
        name for name, scheme in schemes.items() if scheme.experts
    }


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_linear_layer(spec, dtype):
    scheme = SCHEMES[spec.scheme]
    (matrix,), given = drawn(spec, dtype)
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
    assert distance(actual, values @ matrix.numbers().T + bias.double()) < bound
    changes = [wrong_scale] + [swapped] * (spec.bits == 4) + [no_zero] * (not spec.symmetric)
    for change in changes:  # Each of these errors is far above the bound.
        assert distance(actual, values @ change(matrix).numbers().T + bias.double()) > 3 * bound
    if spec.inputs == "static":
        shifted = values + (quantize.input_steps((torch.tensor(-1.5), torch.tensor(4.0)), dtype)[0])
        assert distance(actual, shifted @ matrix.numbers().T + bias.double()) > bound
        # For the other ranks, which do not add the bias.
        later = scheme.load(given, dtype, "x", False)
        assert not later["quant_bias"].any()


@pytest.mark.parametrize(
    ("given", "form"),
    [({}, "FRACTAL_NZ"), ({"weight_nz": False}, "ND"), ({"weight_nz": True}, "FRACTAL_NZ")],
)
def test_weights_in_fractal_nz(given, form):
    config = VllmConfig(additional_config={"ascend": {"platform": given}})
    scheme, (matrix,), tensors = SCHEMES["W8A8_DYNAMIC"], *drawn(Spec(8, "dynamic"), torch.float16)
    with set_current_vllm_config(config):
        packed = scheme.load(tensors, torch.float16, "x", True)
    assert torch_npu.get_npu_format(packed["weight"]).name == form
    # Blocks of 32 do not divide 48.
    narrow = base.transpose_int8(torch.zeros(48, IN, dtype=torch.int8).npu())
    assert torch_npu.get_npu_format(narrow).name == "ND"
    x = torch.randn(5, IN).half()
    actual = scheme.apply(x.npu(), packed, None)
    assert (
        distance(actual, quantized_inputs(x, matrix.spec, torch.float16) @ matrix.numbers().T)
        < torch.finfo(torch.float16).eps
    )


def test_rows_of_a_310p_are_in_fractal_nz(monkeypatch):
    """npu_quant_matmul's documentation: there a matrix is transposed before it is cast."""
    monkeypatch.setattr(host, "chip", lambda: "Ascend310P3")
    scheme, (matrix,), tensors = SCHEMES["W8A8"], *drawn(Spec(8, "static"), torch.float16)
    tensors["deq_scale"] = tensors["deq_scale"].to(torch.int32).view(torch.float32)
    packed = scheme.load(tensors, torch.float16, "x", True)
    assert torch_npu.get_npu_format(packed["weight"]).name == "FRACTAL_NZ"
    assert packed["weight"].stride() == (1, IN)
    rows = torch.zeros(OUT, 48, dtype=torch.int8).npu()
    narrow = base.transpose_int8(rows)
    assert torch_npu.get_npu_format(narrow).name == "ND"
    assert (narrow.stride(), narrow.data_ptr()) == ((1, 48), rows.data_ptr())
    x, bias = torch.randn(5, IN).half(), torch.linspace(-1, 1, OUT).half()
    exact = quantized_inputs(x, matrix.spec, torch.float16) @ matrix.numbers().T + bias.double()
    assert distance(scheme.apply(x.npu(), packed, None), exact) < torch.finfo(torch.float16).eps


def test_updated_weights_stay_in_fractal_nz():
    """A reload copies a layer's new tensors into its parameters (vLLM's ``layerwise.py``)."""
    scheme, (matrix,), tensors = SCHEMES["W8A8_DYNAMIC"], *drawn(Spec(8, "dynamic"), torch.float16)
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
        distance(actual, quantized_inputs(x, matrix.spec, torch.float16) @ matrix.numbers().T)
        < torch.finfo(torch.float16).eps
    )


def wrong_scale(matrix):
    return quantize.Matrix(matrix.spec, matrix.values, matrix.scale * 1.1, matrix.zero)


def swapped(matrix):
    return quantize.Matrix(
        matrix.spec,
        matrix.values.unflatten(1, (-1, 2)).flip(-1).flatten(1),
        matrix.scale,
        matrix.zero,
    )


def no_zero(matrix):
    return quantize.Matrix(matrix.spec, matrix.values, matrix.scale, matrix.zero * 0)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("spec", OF_EXPERTS, ids=str)
@pytest.mark.parametrize("counts", [[3, 0, 4], [7]], ids=str)
def test_experts(spec, dtype, counts):
    scheme = SCHEMES[spec.scheme]
    matrices, given = drawn(spec, dtype, experts=len(counts))
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
    numbers = torch.stack([matrix.numbers() for matrix in matrices])
    assert (
        distance(actual, torch.einsum("mk,mnk->mn", values, numbers[expert]))
        < torch.finfo(dtype).eps
    )


# Of three forms: by npu_grouped_matmul_swiglu_quant_v2, then by npu_dequant_swiglu_quant if 64 divides
# the inner size and it is 512 or more, then by npu_swiglu.
@pytest.mark.parametrize(
    ("inner", "weight_nz", "form"),
    [
        (64, True, "FRACTAL_NZ"),
        (32, True, "FRACTAL_NZ"),
        (512, False, "ND"),
        (528, False, "ND"),
        (448, False, "ND"),
        (32, False, "ND"),
    ],
)
def test_swiglu_of_int8_experts(inner, weight_nz, form):
    given = {"ascend": {"platform": {"weight_nz": weight_nz}}}
    config = VllmConfig(additional_config=given)
    scheme, dtype = SCHEMES["W8A8_DYNAMIC"], torch.float16
    torch.manual_seed(1)
    matrices = []
    for out, inputs in ((2 * inner, IN), (OUT, inner)):
        weight_matrices = [
            quantize.matrix(torch.randn(out, inputs) * 0.1, Spec(8, "dynamic"), dtype)
            for _ in range(2)
        ]
        stored = base.Quantized(
            *(
                torch.stack([getattr(matrix, n) for matrix in weight_matrices]).npu()
                for n in ("values", "scale", "zero")
            )
        )
        with set_current_vllm_config(config):
            packed = scheme.pack(scheme.checked(stored, "x"), dtype)
        assert torch_npu.get_npu_format(packed["weight"]).name == form
        matrices.append((torch.stack([matrix.numbers() for matrix in weight_matrices]), packed))
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
    matrix = quantize.matrix(torch.randn(OUT, IN) + 0.3, spec, torch.float16)
    result = reader(spec.bits)(
        {
            name: tensor.npu()
            for name, tensor in quantize.of_compressed(matrix, None, torch.float16).items()
        }
    )
    assert torch.equal(result.weight.cpu(), matrix.values)
    assert torch.equal(result.scale.cpu(), matrix.scale)
    assert spec.symmetric or torch.equal(result.zero_point.cpu(), matrix.zero)


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
    matrix = quantize.matrix(torch.randn(OUT, IN) + 0.3, spec, torch.float16)
    if form == "awq":
        given, read = quantize.of_awq(matrix, torch.float16), awq_gptq.read_awq
    else:
        given = quantize.of_gptq(matrix, torch.float16, second=form == "gptq_v2")
        offset = 0 if form == "gptq_v2" else awq_gptq.ONES[spec.bits]
        read = functools.partial(
            awq_gptq.read_gptq, bits=spec.bits, symmetric=spec.symmetric, offset=offset
        )
    result = read({name: tensor.npu() for name, tensor in given.items()})
    assert torch.equal(result.weight.cpu(), matrix.values)
    assert torch.equal(result.scale.cpu().float(), matrix.scale)
    assert spec.symmetric or torch.equal(result.zero_point.cpu(), matrix.zero)
    # experts
    several = read({name: torch.stack((tensor, tensor)).npu() for name, tensor in given.items()})
    assert torch.equal(several.weight[1], result.weight)


def test_first_gptq_format_with_zeros_of_0():
    """GPTQModel subtracts 1 from a word of eight zeros at once, which borrows from the next where a
    zero is 0."""
    zero = torch.tensor([[-8.0, 3, -8, -8, 0, 7, -8, 5]]).T
    matrix = quantize.Matrix(
        Spec(4, symmetric=False), torch.zeros(8, 32, dtype=torch.int8), torch.ones(8, 1), zero
    )
    result = awq_gptq.read_gptq(
        quantize.of_gptq(matrix, torch.float16), bits=4, symmetric=False, offset=awq_gptq.ONES[4]
    )
    assert torch.equal(result.zero_point, zero)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_rank_with_a_single_group_has_scales_per_channel(dtype):
    """CANN takes only group sizes below the number of inputs; the emulator refuses others."""
    spec = Spec(4, group=IN, symmetric=False)
    (matrix,), given = drawn(spec, dtype)
    packed = SCHEMES[spec.scheme].load(given, dtype, "x", True)
    x = torch.randn(5, IN).to(dtype)
    assert (
        distance(SCHEMES[spec.scheme].apply(x.npu(), packed, None), x.double() @ matrix.numbers().T)
        < torch.finfo(dtype).eps
    )
