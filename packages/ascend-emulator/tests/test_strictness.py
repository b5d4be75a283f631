# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Arguments of plain operators are refused at the call, with operator, argument, found and allowed,
and all goes on after it."""

import re
import sys

import pytest
import torch
from cann_calls import Calls
from torch.nn import functional


def npu(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype).npu()


@pytest.fixture(autouse=True)
def no_failed_stream():
    """No stream has failed after any of these tests."""
    yield
    torch.npu.synchronize()
    assert npu(3).sum().item() == 3


def refusal(call, *arguments):
    """The message of the error that the call raises, without a synchronization."""
    with pytest.raises(RuntimeError) as caught:
        call(*arguments)
    return str(caught.value)


HALVES, INTEGERS = ("BFloat16", "Half", "Float"), ("Byte", "Char", "Short", "Int", "Long")


@pytest.mark.parametrize(
    ("call", "dtype", "named"),
    [
        (lambda x: x @ x, torch.int32, ("aclnnMatmul: self is Int (DT_INT32)", *HALVES)),
        (
            lambda x: torch.bmm(x[None], x[None]),
            torch.float64,
            ("aclnnBatchMatMul: self is Double (DT_DOUBLE)", *HALVES),
        ),
        (
            lambda x: torch.addmm(x, x, x),
            torch.int64,
            ("aclnnAddmm: self is Long (DT_INT64)", *HALVES),
        ),
        (functional.silu, torch.int64, ("aclnnSilu: self is Long (DT_INT64)", *HALVES)),
        (functional.gelu, torch.int32, ("aclnnGelu: self is Int (DT_INT32)", *HALVES)),
        (functional.mish, torch.float64, ("aclnnMish: self is Double (DT_DOUBLE)", *HALVES)),
        (torch.frac, torch.float64, ("aclnnFrac: self is Double (DT_DOUBLE)", *HALVES)),
        (
            torch.bitwise_not,
            torch.float16,
            ("aclnnBitwiseNot: self is Half (DT_FLOAT16)", *INTEGERS, "Bool"),
        ),
        (
            torch.neg,
            torch.bool,
            (
                "aclnnNeg: self is Bool (DT_BOOL)",
                *HALVES,
                "Double",
                "Char",
                "Int",
                "Long",
                "ComplexFloat",
                "ComplexDouble",
            ),
        ),
        (
            lambda x: x.tril_(),
            torch.complex64,
            (
                "aclnnInplaceTril: self is ComplexFloat (DT_COMPLEX64)",
                *HALVES,
                "Double",
                *INTEGERS,
                "Bool",
            ),
        ),
    ],
)
def test_dtype_is_refused_at_the_call(call, dtype, named):
    message = refusal(call, npu(4, 4, dtype=dtype))
    operator, *dtypes = named
    assert f"[ascend-emulator] {operator}; allowed: {', '.join(dtypes)}" in message


# Arguments that Atlas A3 refuses in PyTorch's own tests
# (tools/generated_docs/emulator_verdicts.toml), and those that it accepts.
ON_HARDWARE = {
    "aclnnDot: self": (
        lambda x: torch.dot(x[0], x[0]),
        (torch.float64, torch.int16, torch.int64),
        torch.int32,
    ),
    "aclnnRemainderTensorTensor: self": (
        lambda x: x % x,
        (torch.int8, torch.int16, torch.uint8),
        torch.int32,
    ),
    "aclnnInplaceMaskedFillScalar: self": (
        lambda x: x.masked_fill_(x == 1, 0),
        (torch.float64, torch.int16, torch.uint8),
        torch.int8,
    ),
    "aclnnDiv: other": (lambda x: x / x, (torch.complex64,), torch.float32),
    "aclnnGcd: self": (torch.gcd, (torch.int8, torch.uint8), torch.int16),
    "aclnnNeg: self": (torch.neg, (torch.int16, torch.uint8), torch.int8),
    "aclnnSign: self": (torch.sign, (torch.int8, torch.int16, torch.uint8), torch.int64),
    "aclnnExp: self": (torch.exp, (torch.int8, torch.int16, torch.int32, torch.uint8), torch.int64),
    "aclnnErf: self": (torch.erf, (torch.int8, torch.int16, torch.int32, torch.uint8), torch.int64),
    "aclnnExpm1: self": (torch.expm1, (torch.float64, torch.int32), torch.int64),
    "aclnnTanh: self": (torch.tanh, (torch.float64,), torch.int32),
    "aclnnRelu: self": (functional.relu, (torch.float64, torch.int16), torch.int8),
    "aclnnSort: self": (torch.sort, (torch.float64,), torch.int64),
    "aclnnMaxDim: self": (lambda x: x.max(1), (torch.float64, torch.int32), torch.int64),
    "aclnnMaxPool2dWithMask: self": (
        lambda x: functional.max_pool2d(x[None], 2),
        (torch.float64,),
        torch.float16,
    ),
    "aclnnMaxPool3dWithArgmax: self": (
        lambda x: functional.max_pool3d(x[None, None], (1, 2, 2)),
        (torch.float64,),
        torch.float16,
    ),
    "aclnnCat: tensors": (lambda x: torch.cat([x, x]), (torch.complex128,), torch.complex64),
    "aclnnArange: out": (
        lambda x: torch.arange(3, dtype=x.dtype, device="npu"),
        (torch.int8, torch.int16),
        torch.int32,
    ),
    "aclnnVarMean: self": (torch.var_mean, (torch.bfloat16,), torch.float16),
    "aclnnMedian: self": (torch.median, (torch.bfloat16, torch.float64), torch.float16),
    "aclnnNanMedian: self": (torch.nanmedian, (torch.bfloat16,), torch.float16),
    "aclnnKthvalue: self": (lambda x: x.kthvalue(1), (torch.bfloat16,), torch.float16),
    "aclnnSearchSorted: sequence": (
        lambda x: torch.searchsorted(x[0], x),
        (torch.bfloat16,),
        torch.float16,
    ),
    "aclnnInplacePut: self": (
        lambda x: x.put_(torch.tensor([0]).npu(), x[0, :1].clone()),
        (torch.bfloat16, torch.int64),
        torch.float16,
    ),
}


@pytest.mark.parametrize("named", ON_HARDWARE)
def test_dtypes_are_those_that_hardware_takes(named):
    call, refused, accepted = ON_HARDWARE[named]
    call(*[npu(4, 4, dtype=accepted)] * (2 if call is torch.gcd else 1))
    for dtype in refused:
        message = refusal(call, *[npu(4, 4, dtype=dtype)] * (2 if call is torch.gcd else 1))
        assert re.search(
            rf"\[ascend-emulator\] {named} is \w+ \(DT_\w+\); (a real dtype is )?allowed", message
        )


def test_complex32_is_refused_everywhere_but_in_complex():
    half = npu(3, dtype=torch.float16)
    value = torch.complex(half, half)
    for call in (
        lambda: value + value,
        lambda: value[::2].clone(),
        lambda: value == value,
        lambda: torch.stack([value, value]),
    ):
        assert "a tensor is ComplexHalf (DT_COMPLEX32); only aclnnComplex takes it" in refusal(call)


LARGE = 1 << 20  # The dry run uses smaller tensors.


@pytest.mark.parametrize("size", [3, LARGE])
@pytest.mark.parametrize(
    ("call", "dtype", "named"),
    [
        (
            lambda x: x.acos_(),
            torch.int16,
            "aclnnInplaceAcos: result type Float can't be cast to the desired output type Short",
        ),
        (
            lambda x: x.sqrt_(),
            torch.int64,
            "aclnnInplaceSqrt: result type Float can't be cast to the desired output type Long",
        ),
        (
            lambda x: torch.linalg.cross(x[:3], x[:3]),
            torch.bool,
            "aclnnLinalgCross: \"cross\" not implemented for 'Bool'",
        ),
        (
            lambda x: x.addcdiv_(x, x),
            torch.int32,
            "aclnnInplaceAddcdiv: Integer division with addcdiv is no longer supported",
        ),
        (
            lambda x: torch.lerp(x, x, x),
            torch.int64,
            "aclnnLerp: \"lerp_kernel_tensor\" not implemented for 'Long'",
        ),
    ],
)
def test_what_aten_says_about_dtypes_is_an_error_of_the_call(call, dtype, named, size):
    x = npu(size, dtype=dtype)
    for _ in range(2):  # A refusal is not cached as a success.
        assert f"[ascend-emulator] {named}" in refusal(call, x)


def test_what_aten_says_about_shapes_is_an_error_of_the_call():
    calls = Calls()
    x, y, out = npu(4, 6), npu(4, 5), npu(4, 6)
    torch.npu.synchronize()
    status, _, message = calls.workspace("MseLoss", x, y, 0, out)
    assert status == 161002
    assert message.startswith(
        "[ascend-emulator] aclnnMseLoss: The size of tensor a (6) must match the size of tensor"
        " b (5)"
    )
    status, _, message = calls.workspace("MseLoss", x, out, 0, y)
    assert status == 161002


ERRORS_OF_VALUES = {
    "index 5 is out of bounds": "x[torch.tensor([5]).npu()]",
    "group_index ends at row 0; it must be 4": (
        "npu.npu_dynamic_quant(x, smooth_scales=x[:0], group_index=torch.zeros(0).int().npu())"
    ),
    # The table has three blocks of 16 tokens.
    "request 0 has 4 queries from 0 on and 49 keys": (
        "npu.npu_lightning_indexer(x[:, None], torch.ones(6, 16, 1, 128).half().npu(), x[:, :1].contiguous(),"
        " actual_seq_lengths_query=torch.tensor([4]).int().npu(),"
        " actual_seq_lengths_key=torch.tensor([49]).int().npu(), layout_query='TND',"
        " block_table=torch.zeros(1, 3).int().npu(), layout_key='PA_BSND', sparse_mode=3)"
    ),
}


def test_errors_of_values_remain_errors_of_the_stream(run):
    """Each in a process, as a stream ends with its error."""
    script = """
import os, torch, torch_npu as npu
x = torch.ones(4, 128).half()
for call in CALLS:
    if not os.fork():
        x = x.npu()
        y = eval(call)
        print("called", flush=True)
        torch.npu.synchronize()
    os.wait()
"""
    script = script.replace("CALLS", repr([*ERRORS_OF_VALUES.values()]))
    done = run("run", "--", sys.executable, "-c", script)
    assert done.stdout.count("called") == len(ERRORS_OF_VALUES), done.stderr
    for message in ERRORS_OF_VALUES:
        assert message in done.stderr


def test_more_than_eight_dimensions_are_refused_everywhere():
    x = npu(2).view(*[1] * 11, 2)
    for call in (lambda: x + 1, lambda: x[..., ::2].clone(), lambda: functional.silu(x)):
        assert "has 12 dimensions; allowed: up to 8" in refusal(call)
    assert (npu(*[1] * 8) + 1).item() == 2


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (
            lambda: functional.max_pool2d(npu(1, 1, 9, 9), 2, dilation=2),
            "dilation is [2, 2]; it must be 1",
        ),
        (
            lambda: functional.max_pool3d(npu(1, 1, 9, 9, 9), 2, dilation=2, return_indices=True),
            "dilation is [2, 2, 2]; it must",
        ),
        (
            lambda: functional.group_norm(npu(1, 4, 3), 2, eps=-0.5),
            "eps is -0.5; it must be above 0",
        ),
        (lambda: torch.topk(npu(), 1), "self has 0 dimensions; allowed: 1 to 8"),
        (
            lambda: torch.gather(npu(3), 0, npu(0, dtype=torch.uint8)),
            "index is Byte (DT_UINT8); allowed: Int, Long",
        ),
        (
            lambda: torch.baddbmm(npu(1), npu(2, 3, 3), npu(2, 3, 3)),
            "self has 1 dimensions; allowed: 3",
        ),
        (
            lambda: functional.pad(npu(1, 3, 4, 4), (-1, 1, -2, 1), mode="reflect"),
            "padding is [-1, 1, -2, 1]; it must not be negative in Float",
        ),
        (
            lambda: torch.ops.aten.native_dropout_backward(npu(4), npu(4, dtype=torch.bool), 2.0),
            "aclnnDropoutDoMask: mask is Bool (DT_BOOL); allowed: Byte",
        ),
        (
            lambda: functional.embedding_bag(
                npu(0, dtype=torch.int64), npu(4, 3), npu(2, dtype=torch.int64), mode="mean"
            ),
            "indices is empty and mode is 1",
        ),
        (
            lambda: functional.embedding_bag(
                npu(4, dtype=torch.int64),
                npu(4, 3),
                npu(2, dtype=torch.int64),
                mode="sum",
                per_sample_weights=npu(4, dtype=torch.float64),
            ),
            "expected scalar type Float (DT_FLOAT) of perSampleWeights, found Double (DT_DOUBLE)",
        ),
        (
            lambda: npu(1).repeat_interleave(1 << 22),
            "out has 4194304 elements; allowed: less than 4194304",
        ),
        (
            lambda: functional.ctc_loss(npu(4, 2, 3), npu(2, 2, dtype=torch.int64), [4, 4], [0, 2]),
            "targetLengths is [0, 2]; it must have one length above 0 per sample",
        ),
    ],
)
def test_argument_is_refused_at_the_call(call, named):
    assert named in refusal(call)


def test_arguments_that_torch_npu_never_passes_are_refused():
    calls = Calls()
    x, channels, index = npu(4, 6), npu(6), npu(2, dtype=torch.int64)
    torch.npu.synchronize()
    arguments = (x, channels, channels, None, None, False, 0.0, 1.0, npu(4, 6), npu(6), npu(6))
    assert "without training both are needed" in calls.workspace("BatchNorm", *arguments)[2]
    assert (
        "dim is -3; allowed: -2 to 1"
        in calls.workspace("GatherV3", x, -3, index, 0, 0, npu(2, 6))[2]
    )
    assert calls.run("GatherV3", x, -2, index, 0, 0, npu(2, 6)) == (0, "")
    assert (
        "out has shape [4, 2]; it must be [2, 6]"
        in calls.workspace("GatherV3", x, 0, index, 0, 0, npu(4, 2))[2]
    )
    assert (
        "out has shape [4, 6]; it must be [4, 3]" in calls.workspace("SwiGlu", x, -1, npu(4, 6))[2]
    )


def test_number_plus_tensor():
    x, out = torch.randn(4, device="npu"), npu(4)
    whole = npu(4, dtype=torch.int64)
    torch.npu.synchronize()
    assert Calls().run("AddV3", 2.5, x, 2.0, out) == (0, "")
    torch.testing.assert_close(out, 2.5 + 2 * x)
    assert (
        "aclnnAddV3: other is Long (DT_INT64); allowed: "
        in Calls().workspace("AddV3", 2.5, whole, 2.0, whole)[2]
    )


def test_result_that_does_not_fit_in_place_is_refused():
    x, fraction = npu(4, dtype=torch.int32), npu(4)
    message = "result type Float can't be cast to the desired output type Int of self"
    assert f"aclnnInplaceAdds: {message}" in refusal(x.add_, 1.5)
    assert f"aclnnInplaceMul: {message}" in refusal(x.mul_, fraction)
    assert x.add_(2).tolist() == [3] * 4
    assert fraction.add_(x).tolist() == [4] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_floating_dtypes_are_taken(dtype):
    x = npu(4, 4, dtype=dtype)
    assert (functional.silu(x) + functional.gelu(x @ x)).dtype == dtype


def test_bfloat16_and_operators_that_the_chip_lacks_are_refused(run):
    script = (
        "import torch, torch_npu\ntorch_npu.npu.set_compile_mode(jit_compile=False)\nx ="
        " torch.empty(4, 4, dtype=torch.bfloat16, device='npu')\nhalf, positions = torch.empty(2,"
        " 64, dtype=torch.half, device='npu'), torch.zeros(2, dtype=torch.int64, device='npu')\ndef"
        " rotary(): torch_npu.npu_mrope(positions, half, half, half, 64, mrope_section=[0, 0, 0],"
        " rotary_mode='half')\nsilu = torch.nn.functional.silu\nfor call in (lambda: x @ x, lambda:"
        " silu(x), lambda: torch.add(x, x), lambda: torch.cat([x, x]), rotary):\n    try: call()\n "
        "   except RuntimeError as error: print(' '.join(str(error).split()))\nprint((torch.ones(4,"
        " 4, device='npu') @ torch.ones(4, 4, device='npu')).sum().item())\n"
    )
    done = run("run", "--soc", "Ascend310P3", "--", sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    *lines, operator, value = done.stdout.splitlines()
    assert (
        "aclnnRopeWithSinCosCacheV2 is not an operator of Ascend310P3, by torch_npu's documentation"
        in operator
    )
    wanted = [
        "aclnnMatmul: self is",
        "aclnnSilu: self is",
        "aclnnAdd: self is",
        "aclnnCat: tensors is",
    ]
    assert value == "64.0"
    assert len(lines) == len(wanted)
    for line, named in zip(lines, wanted, strict=True):
        assert (
            f"{named} BFloat16 (DT_BFLOAT16); Ascend310P3 does not compute in bfloat16; use float16"
            in line
        )


@pytest.mark.parametrize("soc", ["Ascend310P3", "Ascend910A", "Ascend910B1"])
def test_first_chips_compile_operators_at_run_time_by_default(run, soc):
    """Each with each new shape, unless jit-compile is off."""
    script = (
        "import torch, torch_npu\n"
        "for mode in (None, False):\n"
        "    if mode is False: torch_npu.npu.set_compile_mode(jit_compile=mode)\n"
        "    try: print(torch.ones(2, device='npu').neg_().tolist())\n"
        "    except RuntimeError as error: print(error); break\n"
    )
    compiled = run("run", "--soc", soc, "--", sys.executable, "-c", script)
    assert compiled.returncode == 0, compiled.stderr
    named = (
        f"jit_compile is on, the default on {soc}, where each operator is compiled for each new"
        " shape; fix: torch_npu.npu.set_"
    )
    assert (named in compiled.stdout) == (soc != "Ascend910B1")
    done = run(
        "run", "--soc", soc, "--", sys.executable, "-c", script.replace("(None, False)", "(False,)")
    )
    assert done.stdout == "[-1.0, -1.0]\n"
