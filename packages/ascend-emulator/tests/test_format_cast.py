# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""FRACTAL_NZ: casts, the order in memory, views, and the operators that read it."""

import ctypes
import sys

import pytest
import torch
import torch_npu
from cann_calls import Calls
from comparisons import close_sums, integers, on_npu
from memory_calls import acl, address_of, check

NZ, ND = 29, 2
HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def internal_formats():
    """npu_format_cast makes FRACTAL_NZ tensors only where these are allowed."""
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False  # its default; it cannot be read


def nz(x):
    cast = torch_npu.npu_format_cast(x.npu(), NZ)
    assert torch_npu.get_npu_format(cast) == NZ
    return cast


def in_memory(x, count):
    """The first values of the storage, by aclrtMemcpy."""
    values = torch.empty(count, dtype=x.dtype)
    check(
        acl.aclrtMemcpy(
            ctypes.c_void_p(values.data_ptr()), values.nbytes, address_of(x), values.nbytes, 2
        )
    )
    return values


def fractal(x, c0):
    """[..., k, n] as [..., n / c0, k / 16, 16, c0], padded with zeros."""
    rows, columns = -x.size(-2) % 16, -x.size(-1) % c0
    padded = torch.nn.functional.pad(x, (0, columns, 0, rows))
    return padded.unflatten(-1, (-1, c0)).unflatten(-3, (-1, 16)).movedim(-2, -4)


@pytest.mark.parametrize(
    ("dtype", "shape", "c0"),
    [(torch.float16, (40, 24), 16), (torch.int8, (3, 20, 50), 32), (torch.float32, (16, 16), 16)],
    ids=str,
)
def test_format_cast_and_back(dtype, shape, c0):
    x = torch.randint(-100, 100, shape).to(dtype)
    cast, stored = nz(x), fractal(x, c0)
    assert cast.shape == x.shape
    assert cast.untyped_storage().nbytes() == stored.nbytes
    assert torch.equal(in_memory(cast, stored.numel()), stored.flatten())
    assert torch.equal(torch_npu.npu_format_cast(cast, ND).cpu(), x)
    assert torch.equal(cast.cpu(), x)


def test_format_casts_of_the_graph_operator(run):
    """torch_npu casts so on Atlas inference devices, and everywhere until 2.10."""
    script = """
import ctypes
import torch, torch_npu
torch_npu.npu.set_compile_mode(jit_compile=False)
torch.npu.config.allow_internal_format = True
acl = ctypes.CDLL("libascendcl.so")
for dtype, c0 in ((torch.float16, 16), (torch.int8, 32), (torch.float32, 16)):
    x = torch.randint(-100, 100, (32, 64)).to(dtype)
    cast = torch_npu.npu_format_cast(x.npu(), 29)
    assert torch_npu.get_npu_format(cast) == 29
    stored = torch.empty(64 // c0, 2, 16, c0, dtype=dtype)
    torch.npu.synchronize()
    pointer, size = ctypes.c_void_p(stored.data_ptr()), ctypes.c_size_t(stored.nbytes)
    assert acl.aclrtMemcpy(pointer, size, ctypes.c_void_p(cast.data_ptr()), size, 2) == 0
    assert torch.equal(stored, x.view(2, 16, 64 // c0, c0).permute(2, 0, 1, 3))
    assert torch.equal(torch_npu.npu_format_cast(cast, 2).cpu(), x)
print("equal")
"""
    done = run("run", "--soc", "Ascend310P3", "--", sys.executable, "-c", script)
    assert done.stdout == "equal\n", done.stderr


def test_an_overwritten_storage_is_read_in_its_order():
    """A transfer of a weight's bytes, as between processes."""
    x, weight = torch.randn(3, 32).half(), torch.randn(32, 48).half()
    cast, stored = nz(torch.zeros(32, 48).half()), fractal(weight, 16).contiguous()
    check(
        acl.aclrtMemcpy(
            address_of(cast), stored.nbytes, ctypes.c_void_p(stored.data_ptr()), stored.nbytes, 1
        )
    )
    close_sums(x.npu() @ cast, x.double() @ weight.double())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_with_nz_weights(dtype):
    x, weight, bias = (
        torch.randn(5, 40).to(dtype),
        torch.randn(24, 40).to(dtype),
        torch.randn(24).to(dtype),
    )
    close_sums(x.npu() @ nz(weight.T.contiguous()), x.double() @ weight.double().T)
    close_sums(torch.nn.functional.linear(x.npu(), nz(weight)), x.double() @ weight.double().T)
    close_sums(
        torch.nn.functional.linear(x.npu(), nz(weight), bias.npu()),
        x.double() @ weight.double().T + bias.double(),
    )
    a, b, scale = integers(5, 64), integers(64, 32), torch.rand(32) * 1e-2
    actual = torch_npu.npu_quant_matmul(
        a.npu(), nz(b), scale.npu(), pertoken_scale=torch.ones(5).npu(), output_dtype=dtype
    )
    close_sums(actual, a.double() @ b.double() * scale.double())
    left, right = torch.randn(4, 6, 32).to(dtype), torch.randn(4, 32, 48).to(dtype)
    close_sums(
        torch_npu.npu_transpose_batchmatmul(left.npu(), nz(right)),
        (left.double() @ right.double()).transpose(0, 1),
        ulps=8,
    )


def test_batches_of_nz_weights():
    """By name: torch.bmm of this version calls an older operator."""
    calls, out = Calls(), torch.zeros(3, 5, 24).half().npu()
    a, b = torch.randn(3, 5, 40).half(), torch.randn(3, 40, 24).half()
    weight = nz(b)
    calls.compute("BatchMatMulWeightNz", a.npu(), weight, out, 0)
    close_sums(out, a.double() @ b.double())
    assert calls.refusal("BatchMatMulWeightNz", a.float().npu(), weight, out, 0).startswith(
        "self is Float (DT_FLOAT); allowed: Half, BFloat16 (rule matmul_weight_nz.dtype, "
    )
    assert "out has shape [3, 5, 24]; it must be [3, 4, 24]" in calls.refusal(
        "BatchMatMulWeightNz", a[:, :4].npu(), weight, out, 0
    )


def test_products_with_quantized_nz_weights():
    x, weight, scale = (
        torch.randn(2, 64).half(),
        integers(64, 48, low=-8, high=8),
        torch.rand(1, 48).half(),
    )
    expected = x.double() @ (weight.double() * scale.double())
    words = torch_npu.npu_convert_weight_to_int4pack(nz(weight.int()))
    assert torch_npu.get_npu_format(words) == NZ
    for cast in (nz(weight), words):
        close_sums(torch_npu.npu_weight_quant_batchmatmul(x.npu(), cast, scale.npu()), expected)


def test_grouped_products_with_nz_weights():
    counts, x, weight = torch.tensor([3, 1, 4]), integers(8, 32), integers(3, 32, 256)
    scale, per_token, expert = (
        torch.rand(3, 256) * 1e-3,
        torch.rand(8),
        torch.arange(3).repeat_interleave(counts),
    )
    wide = (
        torch.einsum("mk,mkn->mn", x.double(), weight.double()[expert])
        * scale.double()[expert]
        * per_token.double()[:, None]
    )
    actual = torch_npu.npu_grouped_matmul(
        on_npu([x]),
        [nz(weight)],
        scale=on_npu([scale]),
        per_token_scale=on_npu([per_token]),
        group_list=counts.npu(),
        split_item=3,
        group_type=0,
        group_list_type=1,
        output_dtype=torch.float16,
    )
    close_sums(actual[0], wide)
    rows, logit = torch.arange(8), torch.rand(8)
    summed = torch_npu.npu_grouped_matmul_finalize_routing(
        x.npu(),
        nz(weight),
        counts.npu(),
        scale=scale.npu(),
        pertoken_scale=per_token.npu(),
        logit=logit.npu(),
        row_index=rows.npu(),
        dtype=torch.float32,
        group_list_type=1,
    )
    close_sums(summed, wide * logit.double()[:, None], ulps=64)
    gate, up = wide.chunk(2, -1)
    step = (torch.nn.functional.silu(gate) * up).abs().amax(-1) / 127
    storage = nz(weight).view(3, 8, 2, 16, 32)  # in its storage's dimensions
    for values, steps, *_ in (
        torch_npu.npu_grouped_matmul_swiglu_quant(
            x.npu(), nz(weight), counts.cumsum(0).npu(), scale.npu(), per_token.npu()
        ),
        torch_npu.npu_grouped_matmul_swiglu_quant(
            x.npu(), storage, counts.cumsum(0).npu(), scale.npu(), per_token.npu()
        ),
        torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            x.npu(), [nz(weight)], on_npu([scale]), per_token.npu(), counts.cumsum(0).npu()
        ),
    ):
        close_sums(steps, step, ulps=64)
        assert (
            (values.cpu().double() - torch.nn.functional.silu(gate) * up / step[:, None]).abs()
            <= 0.501
        ).all()


def test_int4_words_of_an_nz_weight():
    """Bytes of int4 pairs, cast to FRACTAL_NZ and viewed as int32 words in the storage's dimensions
    (op-plugin's own test)."""
    counts, x, pairs = torch.tensor([3, 1, 4]), integers(8, 32), integers(3, 32, 64)
    scale, per_token = torch.rand(3, 128).npu() * 1e-3, torch.rand(8).npu()
    words = nz(pairs).view(torch.int32).view(3, 2, 2, 16, 8)
    actual, expected = (
        torch_npu.npu_grouped_matmul_swiglu_quant(
            x.npu(), weight, counts.cumsum(0).npu(), scale, per_token
        )
        for weight in (words, pairs.npu().view(torch.int32))
    )
    assert expected[0].any()
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize(
    ("view", "layout"),
    [
        (lambda w: w[:, 16:32], r"shape \[64, 16\], strides \[48, 1\] and offset 16"),
        (lambda w: w[16:32], r"shape \[16, 48\], strides \[48, 1\] and offset 768"),
        (lambda w: w.view(48, 64), r"shape \[48, 64\], strides \[64, 1\] and offset 0"),
    ],
    ids=["columns", "rows", "reshaped"],
)
def test_a_view_is_not_a_part_of_the_matrix(view, layout):
    part = view(nz(torch.ones(64, 48).half()))
    x = torch.ones(2, part.size(0)).half().npu()
    with pytest.raises(
        RuntimeError,
        match=rf"mat2 has {layout} in storage \[3, 4, 16, 16\] of FRACTAL_NZ; only the whole matrix",
    ):
        print(x @ part)


def test_an_expert_of_a_stack_is_refused():
    stack = nz(torch.ones(3, 32, 16).half())
    with pytest.raises(
        RuntimeError,
        match=r"mat2 has shape \[32, 16\].* in storage \[3, 1, 2, 16, 16\] of FRACTAL_NZ",
    ):
        print(torch.ones(2, 32).half().npu() @ stack[1])


def test_operators_that_read_nd_refuse_nz():
    left, right = nz(torch.ones(2, 16, 16).half()), nz(torch.ones(2, 16, 16).half())
    with pytest.raises(RuntimeError, match="x is in FRACTAL_NZ; this operator reads ND"):
        torch_npu.npu_transpose_batchmatmul(left, right)
