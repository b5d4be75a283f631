# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Operators of Ascend950 that compute and then quantize, against float64; test_ascend950.py runs
these tests on that chip."""

import narrow_formats as formats
import pytest
import torch
import torch_npu

TYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": formats.E2M1,
    "e1m2": formats.E1M2,
    "hif8": formats.HIF8,
}
MX = [("e4m3", 0), ("e4m3", 1), ("e5m2", 0), ("e2m1", 0), ("e2m1", 2), ("e1m2", 0)]


def same(actual, expected):
    torch.testing.assert_close(actual.cpu().double(), expected.double(), atol=0, rtol=0)


def close(actual, expected):
    """Within the last place of the result's dtype."""
    bound = max(2 * torch.finfo(actual.dtype).eps, 1e-5)
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=bound, atol=1e-6)


def close_in_groups(y, scale, expected, kind, rule, axis=-1):
    """Values and shared exponents are those of `expected`, computed in float64; where float32 falls
    on the other side of a boundary, a value is off by one step of its format."""
    values, codes = formats.quantized(expected.movedim(axis, -1), kind, rule)
    stored = formats.in_groups(scale, axis)[..., : codes.shape[-1]]
    same(stored, codes)
    actual = formats.values_of(y, kind).movedim(axis, -1).contiguous()
    steps = formats.magnitudes(kind)
    place = torch.searchsorted(steps, actual.abs()), torch.searchsorted(steps, values.abs())
    apart = (place[0] - place[1]).abs()
    assert int(apart.max()) <= 1
    assert float(apart.double().mean()) < 0.001


def normed(x, gamma, beta, epsilon):
    wide = x.double()
    rstd = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return wide * rstd * gamma.double() + beta.double(), rstd


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "rule"), MX)
def test_norms_with_shared_exponents(kind, rule, dtype):
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 5, 160).to(dtype)
    gamma, beta = torch.rand(160) + 0.5, torch.rand(160)
    y, scale, rstd = torch_npu.npu_rms_norm_dynamic_mx_quant(
        a.npu().requires_grad_(),
        gamma.npu(),
        beta=beta.npu(),
        epsilon=1e-5,
        scale_alg=rule,
        dst_type=TYPES[kind],
    )
    expected, expected_rstd = normed(a, gamma, beta, 1e-5)
    close(rstd, expected_rstd)
    assert scale.shape == (3, 5, 3, 2)
    close_in_groups(y, scale, expected, kind, rule)

    y, total, scale, _ = torch_npu.npu_add_rms_norm_dynamic_mx_quant(
        a.npu(), b.npu(), gamma.npu(), beta=beta.npu(), scale_alg=rule, dst_type=TYPES[kind]
    )
    same(total, (a.double() + b.double()).to(dtype))
    close_in_groups(y, scale, normed(a.double() + b.double(), gamma, beta, 1e-6)[0], kind, rule)


def gated(x, dim=-1, left=False):
    first, second = x.double().chunk(2, dim)
    gate, value = (first, second) if left else (second, first)
    return gate * torch.sigmoid(gate) * value


@pytest.mark.parametrize(("kind", "rule"), MX)
@pytest.mark.parametrize(("dim", "axis"), [(-1, -1), (-1, 0), (0, -1)])
def test_gated_activations_with_shared_exponents(kind, rule, dim, axis):
    torch.manual_seed(0)
    x = torch.randn(80, 192).bfloat16()
    y, scale = torch_npu.npu_swiglu_mx_quant(
        x.npu(),
        activate_dim=dim,
        axis=axis,
        activate_left=dim == 0,
        dst_type=TYPES[kind],
        scale_alg=rule,
    )
    close_in_groups(y, scale, gated(x, dim, dim == 0), kind, rule, axis)


def test_clamped_activation_of_interleaved_halves():
    torch.manual_seed(0)
    x = torch.randn(6, 128).bfloat16() * 4
    y, scale = torch_npu.npu_swiglu_mx_quant(
        x.npu(), swiglu_mode=1, clamp_limit=3.0, glu_alpha=1.5, glu_bias=0.5, dst_type=TYPES["e4m3"]
    )
    gate, value = x.double()[:, ::2].clamp(max=3), x.double()[:, 1::2].clamp(-3, 3)
    close_in_groups(y, scale, gate * torch.sigmoid(1.5 * gate) * (value + 0.5), "e4m3", 0)


def test_gated_activation_along_both_axes():
    torch.manual_seed(0)
    x, ends = torch.randn(200, 128).bfloat16(), torch.tensor([70, 70, 200])
    expected = gated(x, left=True)
    for groups in (None, ends.npu()):
        first, scale, second, other = torch_npu.npu_swiglu_mx_quant_with_dual_axis(
            x.npu(), group_index=groups
        )
        close_in_groups(first, scale, expected, "e4m3", 1)
        if groups is None:
            close_in_groups(second, other, expected, "e4m3", 1, axis=-2)
    assert other.shape == (200 // 64 + 3, 64, 2)
    for group, (start, end) in enumerate(((0, 70), (70, 70), (70, 200))):
        place, pairs = start // 64 + group, -(-(end - start) // 64)
        if pairs:
            rows, scales = second[start:end], other[place : place + pairs]
            close_in_groups(rows, scales, expected[start:end], "e4m3", 1, axis=-2)


def matrices_of_experts(kind, m, k, n, experts):
    """x, weights and shared exponents as torch_npu takes them, and their values in float64."""
    known = formats.table(kind)
    small = torch.tensor([code for code, value in known.items() if abs(value) <= 4])
    codes = [small[torch.randint(len(small), size)] for size in ((m, k), (experts, n, k))]
    four = kind in ("e2m1", "e1m2")
    x, w = (formats.packed(each) if four else each.to(torch.uint8) for each in codes)
    pairs = -(-k // 64)
    scales = [torch.randint(118, 125, (*size, pairs, 2)) for size in ((m,), (experts, n))]
    a, b = (
        formats.values_of(each, kind)
        * (2.0 ** (scale.double() - 127)).flatten(-2).repeat_interleave(32, -1)[..., :k]
        for each, scale in zip((x, w), scales, strict=True)
    )
    if not four:
        x, w = (each.view(TYPES[kind]) for each in (x, w))
    return x, w, *(scale.to(torch.uint8) for scale in scales), a, b


@pytest.mark.parametrize(
    ("kind", "output"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e2m1", "e2m1"), ("e2m1", "e5m2")]
)
@pytest.mark.parametrize("counts", [False, True])
def test_experts_with_activation_and_shared_exponents(kind, output, counts):
    torch.manual_seed(0)
    x, w, x_scale, w_scale, a, b = matrices_of_experts(kind, 9, 128, 256, 2)
    ends = [4, 5] if counts else [4, 9]
    names = {"x_dtype": TYPES[kind], "weight_dtype": TYPES[kind]} if kind == "e2m1" else {}
    y, scale = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
        x.npu(),
        [w.npu().transpose(1, 2)],
        [w_scale.npu().transpose(1, 2)],
        x_scale.npu(),
        torch.tensor(ends).npu(),
        dequant_mode=2,
        dequant_dtype=torch.float32,
        quant_mode=2,
        quant_dtype=TYPES[output],
        group_list_type=int(counts),
        weight_scale_dtype=formats.E8M0,
        x_scale_dtype=formats.E8M0,
        **names,
    )
    expected = gated(torch.cat([a[:4] @ b[0].t(), a[4:] @ b[1].t()]), left=True)
    close_in_groups(y, scale.view(torch.uint8), expected, output, 0)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_experts_with_activation_and_scales_of_rows(kind):
    torch.manual_seed(0)
    x, w = torch.randn(9, 64).to(TYPES[kind]), torch.randn(2, 64, 32).to(TYPES[kind])
    w_scale, x_scale = torch.rand(2, 32) / 8, torch.rand(9) / 8
    y, scale = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
        x.npu(),
        [w.npu()],
        [w_scale.npu()],
        x_scale.npu(),
        torch.tensor([4, 9]).npu(),
        dequant_dtype=torch.float32,
        quant_dtype=TYPES[kind],
    )
    product = torch.cat([x[:4].double() @ w[0].double(), x[4:].double() @ w[1].double()])
    each = w_scale.double()[[0] * 4 + [1] * 5] * x_scale.double()[:, None]
    expected = gated(product * each, left=True)
    close(scale, expected.abs().amax(-1) / float(formats.magnitudes(kind)[-1]))
    error = (y.cpu().double() * scale.cpu().double()[:, None] - expected).abs()
    largest = expected.abs().amax(-1, keepdim=True)
    assert bool((error <= expected.abs() * 2.0**-3 + largest * 1e-4).all())


def routed(x, experts, count):
    """Rows of x in the order of their experts, and the number of each expert's."""
    order = experts.flatten().argsort(stable=True)
    return x[order // experts.shape[1]], torch.bincount(experts.flatten(), minlength=count)


@pytest.mark.parametrize(("mode", "kind", "rule"), [(2, "e5m2", 1), (3, "e4m3", 1), (9, "e2m1", 0)])
def test_routing_with_shared_exponents(mode, kind, rule):
    torch.manual_seed(0)
    x, experts = torch.randn(12, 160).bfloat16(), torch.randint(8, (12, 3), dtype=torch.int32)
    y, _, counts, scale = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        experts.npu(),
        active_num=36,
        expert_num=8,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=mode,
        active_expert_range=[0, 8],
    )
    rows, expected = routed(x, experts, 8)
    same(counts, expected)
    values, codes = formats.quantized(rows, kind, rule)
    same(formats.values_of(y, kind), values)
    stored = scale.cpu().view(torch.uint8).flatten(1)
    same(stored[:, :5], codes)
    assert not stored[:, 5:].any()


@pytest.mark.parametrize("mode", [6, 7, 8])
def test_routing_to_hif8(mode):
    torch.manual_seed(0)
    x, experts = torch.randn(12, 64).half(), torch.randint(8, (12, 3), dtype=torch.int32)
    factor = torch.tensor([3.0]) if mode == 7 else None
    y, _, _, scale = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        experts.npu(),
        scale=None if factor is None else factor.npu(),
        active_num=36,
        expert_num=8,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=mode,
        active_expert_range=[0, 8],
    )
    rows = routed(x, experts, 8)[0].float()
    if mode == 8:
        torch.testing.assert_close(scale.cpu(), rows.abs().amax(-1) / 32768)
        rows = rows / scale.cpu()[:, None]
    same(formats.values_of(y, "hif8"), formats.rounded(rows * (factor or 1.0), "hif8"))


def test_routing_of_float8_rows():
    torch.manual_seed(0)
    x, experts = torch.randn(12, 64).to(torch.float8_e4m3fn), torch.randint(8, (12, 3))
    scale = torch.randint(100, 140, (12, 1, 2), dtype=torch.uint8)
    y, _, _, scale_out = torch_npu.npu_moe_init_routing_v2(
        x.npu(),
        experts.int().npu(),
        scale=scale.npu(),
        active_num=36,
        expert_num=8,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, 8],
    )
    order = experts.flatten().argsort(stable=True) // 3
    assert torch.equal(y.cpu().view(torch.uint8), x.view(torch.uint8)[order])
    assert torch.equal(scale_out.cpu(), scale[order])


@pytest.mark.parametrize(
    ("rule", "call"),
    [
        (
            "rms_norm_mx_quant.round-mode-of-float8, inferred",
            lambda x, w: torch_npu.npu_rms_norm_dynamic_mx_quant(
                x, w, dst_type=TYPES["e5m2"], round_mode="floor"
            ),
        ),
        (
            "rms_norm_mx_quant.gamma-shape, inferred",
            lambda x, w: torch_npu.npu_rms_norm_dynamic_mx_quant(x, w[:32]),
        ),
        (
            "swiglu_mx_quant.scale-alg-of-e2m1, inferred",
            lambda x, w: torch_npu.npu_swiglu_mx_quant(x, scale_alg=1),
        ),
    ],
)
def test_limits(rule, call):
    with pytest.raises(RuntimeError, match=f"rule {rule}"):
        call(torch.ones(5, 64).bfloat16().npu(), torch.ones(64).npu())


@pytest.mark.parametrize("kind", ["int8", "e4m3", "e5m2", "hif8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shifted", [False, True])
def test_norms_with_given_scales(shifted, dtype, kind):
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 5, 64).to(dtype)
    gamma, beta = torch.rand(2, 64).to(dtype) + 0.5
    scales, zeros = torch.rand(2, 64) / 8 + 0.1, torch.randint(-9, 9, (2, 64)).float()
    names = {} if kind == "int8" else {"dst_type": TYPES[kind]}
    if shifted:
        names["beta"] = beta.npu()
    one, two, total = torch_npu.npu_add_rms_norm_quant(
        a.npu(),
        b.npu(),
        gamma.npu(),
        scales[0].npu(),
        zeros[0].npu(),
        scales2=scales[1].npu(),
        zero_points2=zeros[1].npu(),
        **names,
    )
    wide = a.double() + b.double()
    same(total, (a.float() + b.float()).to(dtype))
    y = normed(wide, gamma, beta if shifted else torch.zeros(64), 1e-6)[0]
    for stored, scale, zero in zip((one, two), scales.double(), zeros.double(), strict=True):
        expected = y / scale + zero
        if kind == "int8":
            error = (stored.cpu().double() - expected.clamp(-128, 127)).abs()
            assert float(error.max()) < 0.501
        else:
            values, wanted = formats.values_of(stored, kind), formats.rounded(expected, kind)
            steps = formats.magnitudes(kind)
            apart = torch.searchsorted(steps, values.abs()) - torch.searchsorted(
                steps, wanted.abs()
            )
            assert int(apart.abs().max()) <= 1
            assert float(apart.abs().double().mean()) < 0.005


@pytest.mark.parametrize("kind", ["e4m3", "e2m1"])
def test_experts_and_their_weighted_sum(kind):
    torch.manual_seed(0)
    x, w, x_scale, w_scale, a, b = matrices_of_experts(kind, 8, 128, 256, 2)
    logit, rows = torch.rand(8), torch.randint(4, (8,))
    bias, shared = torch.randn(2, 256).bfloat16(), torch.randn(2, 256).bfloat16()
    names = {"x_dtype": TYPES[kind], "w_dtype": TYPES[kind]} if kind == "e2m1" else {}
    y = torch_npu.npu_grouped_matmul_finalize_routing(
        x.npu(),
        w.npu().transpose(1, 2),
        torch.tensor([3, 5]).npu(),
        bias=bias.npu(),
        scale=w_scale.npu().transpose(1, 2),
        pertoken_scale=x_scale.npu(),
        shared_input=shared.npu(),
        logit=logit.npu(),
        row_index=rows.npu(),
        shared_input_offset=1,
        output_bs=4,
        group_list_type=1,
        scale_dtype=formats.E8M0,
        pertoken_scale_dtype=formats.E8M0,
        **names,
    )
    values = torch.cat([a[:3] @ b[0].t() + bias[0], a[3:] @ b[1].t() + bias[1]])
    expected = torch.zeros(4, 256).double()
    expected[1:3] = shared.double()
    expected.index_add_(0, rows, values * logit[:, None].double())
    torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-4, atol=1e-4)
