# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Legacy graph operators (aclop), which torch_npu reaches where it has no aclnn operator for a
function."""

import math
import sys
import textwrap

import numpy as np
import pytest
import torch
import torch_npu
from legacy_calls import either

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
MOVES = {
    "slice": ("npu_slice", lambda x: x[1:4, 2:4], lambda x: (x, [1, 2], [3, 2])),
    "indexing": ("npu_indexing", lambda x: x[1:5:2, 0:6:3], lambda x: (x, [1, 0], [5, 6], [2, 3])),
    "begin and end masks": (
        "npu_indexing",
        lambda x: x[0:5, 0:6],
        lambda x: (x, [0, 0], [5, 6], [1, 1], 3, 3),
    ),
    "transpose": ("npu_transpose", lambda x: x.t(), lambda x: (x, (1, 0))),
    "reshape, then transpose": (
        "npu_confusion_transpose",
        lambda x: x.reshape(5, 2, 3).permute(1, 0, 2),
        lambda x: (x, (1, 0, 2), (5, 2, 3), False),
    ),
    "transpose, then reshape": (
        "npu_confusion_transpose",
        lambda x: x.t().reshape(3, 10),
        lambda x: (x, (1, 0), (3, 10), True),
    ),
    "broadcast": ("npu_broadcast", lambda x: x.expand(2, 5, 6), lambda x: (x, (2, 5, 6))),
    "pad": (
        "npu_pad",
        lambda x: torch.nn.functional.pad(x, (3, 0, 1, 2)),
        lambda x: (x, (1, 2, 3, 0)),
    ),
    "maximum": ("npu_max", lambda x: (lambda v, i: (v, i.int()))(*x.max(1)), lambda x: (x, 1)),
    "minimum": (
        "npu_min",
        lambda x: (lambda v, i: (v, i.int()))(*x.min(0, keepdim=True)),
        lambda x: (x, 0, True),
    ),
    "sort": ("npu_sort_v2", lambda x: x.sort(-1, descending=True).values, lambda x: (x, -1, True)),
    "sort of another dimension": ("npu_sort_v2", lambda x: x.sort(0).values, lambda x: (x, 0)),
}


@pytest.mark.parametrize("case", MOVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=str)
def test_values_that_are_moved(agree, case, dtype):
    name, reference, arguments = MOVES[case]
    x = torch.randperm(30).reshape(5, 6).to(dtype)
    agree(lambda x: either(name, lambda x, *_: reference(x))(*arguments(x)), x)


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((3, 4), (7, 2), 5),
        ((2, 3), (0, 1), 9),
        ((4,), (1,), 596),
        ((0, 3), (600, 1), 0),
        ((5, 3, 2), (2, 100, 300), 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_values_at_strides(size, stride, offset, dtype):
    """Of the storage, whatever part of it the tensor is; torch_npu transposes where the last stride
    is 256 or more."""
    x = (torch.arange(600) % 251).to(dtype)
    expected = x.as_strided(size, stride, offset)
    for part in (x.npu(), x.npu()[3:9]):
        assert torch.equal(torch_npu.npu_stride_copy(part, size, stride, offset).cpu(), expected)


POINTWISE = {
    "silu": ("npu_silu", torch.nn.functional.silu),
    "mish": ("npu_mish", lambda x: x * torch.tanh(torch.log1p(x.exp()))),
}


@pytest.mark.parametrize("case", POINTWISE)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activations_and_their_gradients(agree, case, dtype):
    name, reference = POINTWISE[case]

    def with_gradient(x, grad):
        x = x.clone().requires_grad_()
        y = either(name, reference)(x)
        return y.detach(), *torch.autograd.grad(y, x, grad)

    agree(with_gradient, torch.randn(7, 5).to(dtype), torch.randn(7, 5).to(dtype), ulps=16)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_batched_matrix_products_of_transposed_matrices(agree, dtype):
    """The output of float16 is in FRACTAL_NZ."""
    a, b = torch.randn(2, 7, 5).to(dtype), torch.randn(2, 7, 3).to(dtype)
    agree(
        lambda a, b: either("npu_bmmV2", lambda a, b, _: a @ b)(a.transpose(1, 2), b, []),
        a,
        b,
        ulps=16,
    )


def test_operators_that_torch_npu_reaches_when_compiling_is_on(run):
    script = """
        import torch, torch_npu
        torch.npu.set_compile_mode(jit_compile=True)
        a, b, bias = torch.randn(5, 7), torch.randn(7, 3), torch.randn(3)
        A, B, C = a.npu(), b.npu(), bias.npu()
        exact = a.double() @ b.double()
        pairs = [
            (torch.mm(A, B), exact),
            (torch.addmm(C, A, B), bias.double() + exact),
            (torch_npu.npu_linear(A, B.t().contiguous(), C), bias.double() + exact),
            (torch.abs(A), a.double().abs()),
            (A - C[0], a.double() - bias[0].double()),
            (A.to(torch.float16), a.half().double()),
            (A + A[0], a.double() + a[0].double()),
            (A + 2, a.double() + 2),
            (A * A[0], a.double() * a[0].double()),
            (A * 2.5, a.double() * 2.5),
            (A / (A[0] + 9), a.double() / (a[0].double() + 9)),
            (torch.cat([A, A[1:3], B.t()]), torch.cat([a, a[1:3], b.t()]).double()),
            (torch.cat([A, A[:, 2:4]], -1), torch.cat([a, a[:, 2:4]], -1).double()),
            (A.min(), a.double().min()),
            (torch.amin(A, (0, 1), True), a.double().amin((0, 1), True)),
            (torch.amax(A, 1), a.double().amax(1)),
            (torch.amax(A.half(), 0, True), a.half().double().amax(0, True)),
            (A.softmax(0), a.double().softmax(0)),
            (A.log_softmax(-1), a.double().log_softmax(-1)),
            (A.as_strided((3, 4), (5, 3), 2).contiguous(), a.as_strided((3, 4), (5, 3), 2).double()),
        ]
        for found, expected in pairs:
            torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)
        print("equal")
    """
    done = run("run", "--", sys.executable, "-c", textwrap.dedent(script))
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"),
    [((1, 1), (0, 0), (1, 1), 1), ((2, 1), (1, 2), (1, 2), 2)],
)
def test_convolutions(agree, dtype, stride, padding, dilation, groups):
    """Matmuls are in float32, because HF32, which torch_npu allows for convolutions by default, is
    off."""
    before = torch.npu.conv.allow_hf32
    torch.npu.conv.allow_hf32 = False

    def with_gradients(x, weight, bias, grad):
        how = stride, padding, dilation, groups
        if x.is_npu:
            y = torch_npu.npu_conv2d(x, weight, bias, *how)
            return y, *(
                each.to(x)
                for each in torch_npu.npu_conv2d_backward(x, grad, weight, *how, [True, True, True])
            )
        given = [each.clone().requires_grad_() for each in (x, weight, bias)]
        y = torch.nn.functional.conv2d(*given, *how)
        return y.detach(), *torch.autograd.grad(y, given, grad)

    try:
        shapes = [
            (2, 4, 7, 8),
            (6, 4 // groups, 3, 2),
            (6,),
            (2, 6, 5, 7) if groups == 1 else (2, 6, 4, 10),
        ]
        agree(with_gradients, *[torch.randn(shape).to(dtype) for shape in shapes], ulps=64)
    finally:
        torch.npu.conv.allow_hf32 = before


def test_one_hot_of_values_outside_the_depth(agree):
    classes = torch.tensor([0, 3, 1, 4, -1], dtype=torch.int32)

    def reference(x, axis, depth, on, off):
        return torch.where(x[:, None] == torch.arange(4), on, off).float()

    agree(lambda x: either("npu_one_hot", reference)(x, -1, 4, 2.5, -1.0), classes)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_ranges_are_filled(axis):
    x = torch.randn(4, 5, 6)
    entries = 4 if axis == 2 else 1
    start, value = torch.randint(0, 3, (2, entries)).int(), torch.randn(2)
    result = torch_npu.npu_masked_fill_range(
        x.npu(), start.npu(), (start + 2).npu(), value.npu(), axis
    )
    for i in range(2):
        for j in range(entries):
            part = x[j] if axis == 2 else x
            part.narrow(axis - (axis == 2), int(start[i, j]), 2).fill_(value[i])
    assert torch.equal(result.cpu(), x)


def test_a_choice_with_a_mask_is_of_true_values():
    x = torch.rand(6, 7) > 0.5
    there = {tuple(place) for place in x.nonzero().tolist()}
    for count in (5, len(there), len(there) + 3):
        indices, mask = torch_npu.npu_random_choice_with_mask(x.npu(), count, 7, 1)
        chosen = [tuple(place) for place in indices.cpu()[mask.cpu()].tolist()]
        assert len(chosen) == len(set(chosen)) == min(count, len(there))
        assert set(chosen) <= there
        assert not indices.cpu()[~mask.cpu()].any()
    draws = {
        tuple(
            torch_npu.npu_random_choice_with_mask(x.npu(), 5, seed, 0)[0].cpu().flatten().tolist()
        )
        for seed in range(9)
    }
    assert len(draws) > 1


def test_signs_are_packed_and_unpacked():
    x = torch.tensor([1.0, -2.0, 0.0, -0.5, 3.0, 4.0, -1.0, 2.0, -3.0])
    packed = torch_npu.npu_sign_bits_pack(x.npu(), 1).cpu()
    assert torch.equal(
        packed, torch.from_numpy(np.packbits((x >= 0).numpy(), bitorder="little"))[None]
    )
    unpacked = torch_npu.npu_sign_bits_unpack(packed[0].npu(), 1, torch.float16).cpu()
    assert torch.equal(unpacked[0, :9], torch.where(x >= 0, 1.0, -1.0).half())


def test_blocks_of_channels_are_added(agree):
    a, b = torch.randn(2, 40, 3, 3), torch.randn(2, 32, 3, 3)

    def reference(a, b, *_):
        widened = torch.nn.functional.pad(a, (0, 0, 0, 0, 0, 8))
        return widened[:, 16:48] + b[:, :32]

    agree(lambda a, b: either("npu_stride_add", reference)(a, b, 1, 0, 2), a, b)


def test_dropout_with_a_mask_of_bytes():
    x = torch.rand(40, 50) + 1
    torch.npu.manual_seed(3)
    y, mask = torch_npu._dropout_with_byte_mask(x.npu(), 0.3)
    mask = mask.cpu()
    assert set(mask.unique().tolist()) == {0, 1}
    assert abs(mask.double().mean().item() - 0.7) < 5 * math.sqrt(0.21 / 2000)
    torch.testing.assert_close(y.cpu().double(), x.double() * mask / 0.7, rtol=1e-6, atol=0)
    backward = torch_npu._dropout_with_byte_mask_backward(x.npu(), mask.npu(), 0.3)
    torch.testing.assert_close(backward.cpu().double(), x.double() * mask / 0.7, rtol=1e-6, atol=0)


def test_softmax_with_dropout():
    scores, other = torch.randn(3, 4, 16), torch.randn(3, 4, 16)
    ours = scores.npu().requires_grad_()
    mask, softmax, y = torch_npu.npu_dropout_with_add_softmax(ours, other.npu(), 0.5, 0.25, -1)
    kept = mask.cpu()[: scores.numel()].view(scores.shape)
    exact = scores.double().requires_grad_()
    plain = torch.softmax(other.double() + 0.5 * exact, -1)
    torch.testing.assert_close(
        softmax.detach().cpu().double(), plain.detach(), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        y.detach().cpu().double(), plain.detach() * kept / 0.75, rtol=1e-5, atol=1e-6
    )
    grad = torch.randn(3, 4, 16)
    y.backward(grad.npu())
    (plain * kept / 0.75).backward(grad.double())
    torch.testing.assert_close(ours.grad.cpu().double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_softmax_cross_entropy(agree):
    """The gradient is TensorFlow's, of labels whose sum is 1."""
    labels = torch.rand(4, 6).softmax(-1)

    def with_gradient(x, labels):
        x = x.clone().requires_grad_()
        loss = either(
            "npu_softmax_cross_entropy_with_logits", lambda x, y: -(y * x.log_softmax(-1)).sum(-1)
        )(x, labels)
        return loss.detach(), *torch.autograd.grad(loss.sum(), x)

    agree(with_gradient, torch.randn(4, 6), labels, ulps=16)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_layer_norm_without_gradient(agree, dtype):
    def reference(x, shape, weight, bias, eps):
        return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)

    tensors = [torch.randn(shape).to(dtype) for shape in ((3, 4, 6), (4, 6), (4, 6))]
    agree(
        lambda x, w, b: either("npu_layer_norm_eval", reference)(x, (4, 6), w, b, 1e-5),
        *tensors,
        ulps=16,
    )


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 1.5, 2.0, math.inf])
def test_gradient_of_distances(agree, p):
    def gradient(a, b):
        a = a.clone().requires_grad_()
        return torch.autograd.grad(
            (torch.cdist(a, b, p) * torch.arange(12, device=a.device).view(4, 3)).sum(), a
        )

    # No coordinate is near that of another point, where the derivative for p < 1 has a pole.
    a, b = (2 * torch.randint(8, shape) / 16 for shape in ((2, 4, 5), (2, 3, 5)))
    agree(gradient, a, b + 1 / 16, ulps=64)


def moments(m, v, gradient, beta1, beta2):
    return m * beta1 + gradient * (1 - beta1), v * beta2 + gradient**2 * (1 - beta2)


def optimizer_state():
    return [torch.randn(5, 7), torch.randn(5, 7), torch.rand(5, 7), torch.randn(5, 7)]


@pytest.mark.parametrize("nesterov", [False, True])
def test_adam(nesterov):
    var, m, v, gradient = optimizer_state()
    held = [each.npu() for each in (var, m, v)]
    torch_npu.npu_apply_adam(
        0.6, 0.8, 0.01, 0.9, 0.99, 1e-6, gradient.npu(), False, nesterov, out=tuple(held)
    )
    first, second = moments(m.double(), v.double(), gradient.double(), 0.9, 0.99)
    step = first * 0.9 + gradient.double() * 0.1 if nesterov else first
    exact = var.double() - 0.01 * math.sqrt(0.2) / 0.4 * step / (second.sqrt() + 1e-6)
    for actual, expected in zip(held, (exact, first, second), strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("maximize", [False, True])
def test_adam_with_decay_of_weights(maximize):
    var, m, v, gradient = optimizer_state()
    held = [each.npu() for each in (var, m, v)]
    torch_npu.npu_apply_adam_w(
        0.6, 0.8, 0.01, 0.1, 0.9, 0.99, 1e-6, gradient.npu(), None, False, maximize, out=tuple(held)
    )
    first, second = moments(
        m.double(), v.double(), gradient.double() * (-1 if maximize else 1), 0.9, 0.99
    )
    root = (second / (1 - 0.8 * 0.99)).sqrt() + 1e-6
    exact = var.double() * (1 - 0.01 * 0.1) - 0.01 / (1 - 0.6 * 0.9) * first / root
    for actual, expected in zip(held, (exact, first, second), strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-5, atol=1e-6)


def test_adam_of_bert():
    var, m, v, gradient = optimizer_state()
    held = [each.npu() for each in (var, m, v)]
    torch_npu.npu_bert_apply_adam(
        0.01, 0.9, 0.99, 1e-6, gradient.npu(), -1.0, 0.0, 0.1, out=tuple(held)
    )
    first, second = moments(m.double(), v.double(), gradient.double(), 0.9, 0.99)
    exact = var.double() - 0.01 * (first / (second.sqrt() + 1e-6) + 0.1 * var.double())
    for actual, expected in zip(held, (exact, first, second), strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("biased", [False, True])
def test_lstm_cell_of_legacy_operators(agree, biased):
    """Its output, and the gradients of input, weights and states."""

    def step(x, w_x, w_h, h, c, bias, grad):
        given = [each.clone().requires_grad_() for each in (x, w_x, w_h, h, c)]
        if x.is_npu:
            biases = (bias, torch.zeros_like(bias)) if biased else ()
            _, new_h, new_c, *_ = torch_npu.npu_lstm_cell(*given, *biases)
        else:
            i, f, j, o = (
                given[0] @ given[1] + given[3] @ given[2] + (bias if biased else 0)
            ).chunk(4, -1)
            new_c = f.sigmoid() * given[4] + i.sigmoid() * j.tanh()
            new_h = o.sigmoid() * new_c.tanh()
        gradients = torch.autograd.grad([new_h, new_c], given, [grad, grad])
        return new_h.detach(), new_c.detach(), *gradients

    shapes = [(3, 4), (4, 20), (5, 20), (3, 5), (3, 5), (20,), (3, 5)]
    agree(step, *[torch.randn(shape) for shape in shapes], ulps=64)


def test_lstm_of_several_steps():
    """An input whose dtype is not the weights' takes the legacy operator, and is computed in its
    own."""
    plain = torch.nn.LSTM(4, 6, 2)
    ours = torch.nn.LSTM(4, 6, 2)
    ours.load_state_dict(plain.state_dict())
    ours = ours.npu()
    x, h, c = torch.randn(5, 3, 4).half(), torch.randn(2, 3, 6).half(), torch.randn(2, 3, 6).half()
    held = x.npu().requires_grad_()
    result = torch._VF.lstm(
        held, (h.npu(), c.npu()), ours._flat_weights, True, 2, 0.0, True, False, False
    )
    exact_x = x.double().requires_grad_()
    y, (exact_h, exact_c) = plain.double()(exact_x, (h.double(), c.double()))
    for one, other in zip(result, (y, exact_h, exact_c), strict=True):
        torch.testing.assert_close(
            one.detach().cpu().double(), other.detach(), rtol=2e-2, atol=2e-3
        )
    result[0].sum().backward()
    y.sum().backward()
    torch.testing.assert_close(held.grad.cpu().double(), exact_x.grad, rtol=2e-2, atol=2e-3)


REFUSED = {
    "npu_slice(x, [0, 4], [2, 3])": (
        "Slice: offsets [0, 4] and size [2, 3] reach beyond x of shape [4, 5]"
    ),
    "npu_transpose(x, (0, 0))": "Transpose: perm is [0, 0] for 2 dimensions",
    "npu_indexing(x, [0, 0], [2, 2], [1, 1], 0, 0, 0, 0, 1)": (
        "StridedSlice: attribute shrink_axis_mask is 1; computed: 0"
    ),
    "npu_stride_copy(x, [3, 3], [7, 2], 2)": (
        "AsStrided: size [3, 3], stride [7, 2] and storage_offset 2 reach beyond"
    ),
    "npu_silu(x.int())": "Swish: x is Int (DT_INT32); allowed: Float, Half, BFloat16",
    "npu_bert_apply_adam(0.1, 0.9, 0.9, 0.1, x, 1.0, 1.0, 0.0, out=(x, x, x))": (
        "ApplyAdamV2: max_grad_norm is 1; computed: none"
    ),
    "npu_nms_with_mask(x, 0.5)": (
        "the legacy graph operator 'NMSWithMask' (aclopCompileAndExecute) is not emulated"
    ),
}


@pytest.fixture(scope="module")
def refusals(run):
    """Call to error, where each error comes at its call."""
    script = f"""
        import torch, torch_npu
        x = torch.ones(4, 5, device="npu")
        for call in {list(REFUSED)}:
            try:
                eval("torch_npu." + call)
                print(call, "no error", sep=": ")
            except RuntimeError as error:
                print(call, str(error).replace(chr(10), " "), sep=": ")
        print((x + 1).sum().item())
    """
    done = run(
        "run", "--", sys.executable, "-c", textwrap.dedent(script), ASCEND_LAUNCH_BLOCKING="1"
    )
    assert done.stdout.splitlines()[-1] == "40.0", done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines()[:-1])


@pytest.mark.parametrize("call", REFUSED)
def test_what_is_wrong_is_refused_at_the_call(refusals, call):
    assert REFUSED[call] in refusals[call]
