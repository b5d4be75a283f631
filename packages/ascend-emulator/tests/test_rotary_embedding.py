# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Rotary embeddings, against their definitions in float64."""

import functools

import comparisons
import pytest
import torch
import torch_npu

close = functools.partial(comparisons.close, ulps=3)

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def rotated(x, interleaved):
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("angles", [(1, 5, 1, 64), (2, 5, 1, 64), (2, 5, 3, 64)], ids=str)
def test_rotary_mul(angles, mode, dtype):
    x, cos, sin = (
        torch.randn(2, 5, 3, 64).to(dtype),
        torch.rand(angles).to(dtype),
        torch.rand(angles).to(dtype),
    )
    expected = x.double() * cos.double() + rotated(x.double(), mode == "interleave") * sin.double()
    close(torch_npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu(), mode), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_of_packed_tokens(mode, dtype):
    """The layout TND, which op-plugin's page for CANN 9.1 has, with its gradient."""
    x, cos, sin = (torch.randn(size).to(dtype) for size in ((10, 3, 64), (10, 1, 64), (10, 1, 64)))
    expected = x.double() * cos.double() + rotated(x.double(), mode == "interleave") * sin.double()
    ours = x.npu().requires_grad_()
    result = torch_npu.npu_rotary_mul(ours, cos.npu(), sin.npu(), mode)
    close(result, expected)
    result.sum().backward()
    wide = x.double().requires_grad_()
    product = wide * cos.double() + rotated(wide, mode == "interleave") * sin.double()
    close(ours.grad, torch.autograd.grad(product.sum(), wide)[0])


def test_rotary_mul_of_heads_before_tokens():
    x, cos, sin = torch.randn(2, 3, 5, 64), torch.rand(1, 1, 5, 64), torch.rand(1, 1, 5, 64)
    close(
        torch_npu.npu_rotary_mul(x.npu(), cos.npu(), sin.npu()),
        x.double() * cos.double() + rotated(x.double(), False) * sin.double(),
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("layout", ["BSND", "TND"])
def test_apply_rotary_pos_emb_changes_its_arguments(layout, size, dtype):
    tokens = (2, 5) if layout == "BSND" else (10,)
    query, key = torch.randn(*tokens, 4, size).to(dtype), torch.randn(*tokens, 2, size).to(dtype)
    cos, sin = torch.rand(*tokens, 1, size).to(dtype), torch.rand(*tokens, 1, size).to(dtype)
    expected = [
        x.double() * cos.double() + rotated(x.double(), False) * sin.double() for x in (query, key)
    ]
    ours = query.npu(), key.npu()
    results = torch_npu.npu_apply_rotary_pos_emb(*ours, cos.npu(), sin.npu(), layout=layout)
    for argument, result, wanted in zip(ours, results, expected, strict=True):
        close(argument, wanted)
        assert torch.equal(argument, result)


def rope(x, positions, cache, head_size, interleaved):
    """x: [tokens, heads * head_size]; the first cache.size(1) values of each head are rotated, the
    others left."""
    rotary = cache.size(1)
    heads = x.double().view(len(x), -1, head_size).clone()
    cos, sin = cache.double()[positions].unsqueeze(1).chunk(2, -1)
    a, b = (
        (slice(0, rotary, 2), slice(1, rotary, 2))
        if interleaved
        else (slice(0, rotary // 2), slice(rotary // 2, rotary))
    )
    left, right = heads[..., a].clone(), heads[..., b].clone()
    heads[..., a] = left * cos - right * sin
    heads[..., b] = right * cos + left * sin
    return heads.view(x.shape)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize(("size", "rotary"), [(64, 64), (128, 128), (128, 64), (96, 32)])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_mrope(kind, size, rotary, mode, dtype):
    qkv = torch.randn(9, 8 * size).to(dtype)
    cache = torch.randn(40, rotary).to(dtype)
    positions = torch.tensor([0, 39, 3, 3, 17, 1, 2, 20, 38], dtype=kind)
    # Rows of a wider tensor, as in vLLM.
    query, key, _ = qkv.npu().split([4 * size, 2 * size, 2 * size], -1)
    results = torch_npu.npu_mrope(
        positions.npu(), query, key, cache.npu(), size, mrope_section=[0, 0, 0], rotary_mode=mode
    )
    for x, result in zip(qkv.split([4 * size, 2 * size, 2 * size], -1), results, strict=False):
        close(result, rope(x, positions, cache, size, mode == "interleave"), ulps=6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize(
    ("section", "turns"),
    [
        ([16, 24, 24], "default"),
        ([8, 12, 12], "default"),
        ([24, 20, 20], "interleave"),
        ([16, 16, 16, 16], "default"),
    ],
)
def test_mrope_of_several_rows_of_positions(section, turns, mode, dtype):
    rotary, size = 2 * sum(section), 128
    query, key, cache = (
        torch.randn(shape).to(dtype) for shape in ((9, 4 * size), (9, 2 * size), (40, rotary))
    )
    positions = torch.randint(40, (len(section), 9))
    if turns == "default":
        owners = [row for row, count in enumerate(section) for _ in range(count)]
    else:
        owners = [i % 3 if i < 3 * section[i % 3] else 0 for i in range(rotary // 2)]
    angles = torch.stack(
        [cache[positions[row]][:, [i, i + rotary // 2]] for i, row in enumerate(owners)], -1
    ).flatten(1)
    results = torch_npu.npu_mrope(
        positions.npu(),
        query.npu(),
        key.npu(),
        cache.npu(),
        size,
        mrope_section=section,
        rotary_mode=mode,
        cache_mode=turns,
    )
    for x, result in zip((query, key), results, strict=True):
        close(result, rope(x, torch.arange(9), angles, size, mode == "interleave"), ulps=6)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 80), (torch.float32, 40)], ids=str)
def test_head_sizes_that_mrope_does_not_take(dtype, size):
    x, cache, positions = (
        torch.ones(shape, dtype=dtype, device="npu") for shape in ((2, 2 * size), (4, 32), (2,))
    )
    with pytest.raises(RuntimeError, match=f"head_size is {size}"):
        torch_npu.npu_mrope(positions.long(), x, x, cache, size, mrope_section=[0, 0, 0])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ([11, 11, 10], r"\[11, 11, 10\]; \[16, 24, 24\], \[24, 20, 20\], \[8, 12, 12\] and"),
        ([8, 8, 8, 8], r"\[8, 8, 8, 8\]; \[16, 24, 24\]"),
        ([16, 16, 16, 16], "cache_mode is interleave with 4 rows of positions; they need default"),
        ([16, 16], "of positions"),
    ],
)
def test_sections_that_are_not_documented_are_refused(section, message):
    rotary = 2 * sum(section)
    x, cache, positions = (
        torch.ones(shape, device="npu") for shape in ((2, 128), (4, rotary), (len(section), 2))
    )
    with pytest.raises(RuntimeError, match=message):
        torch_npu.npu_mrope(
            positions.long(), x, x, cache, 128, mrope_section=section, cache_mode="interleave"
        )


def test_too_many_heads_are_refused():
    x, angles = torch.ones(2, 3, 500, 64, device="npu"), torch.ones(1, 3, 1, 64, device="npu")
    torch_npu.npu_rotary_mul(x, angles, angles, "half")
    with pytest.raises(
        RuntimeError, match="B \\* N is 1000; with rotary_mode interleave it must be below 1000"
    ):
        torch_npu.npu_rotary_mul(x, angles, angles, "interleave")
    wide = x.repeat(1, 1, 2, 1)
    with pytest.raises(
        RuntimeError, match="dimension 2 of input is 1000; B and N must be below 1000"
    ):
        torch_npu.npu_rotary_mul(wide, angles, angles, "half")


def test_mrope_without_tokens():
    x, cache = torch.empty(0, 128, device="npu"), torch.randn(4, 64, device="npu")
    query, key = torch_npu.npu_mrope(
        torch.empty(0, dtype=torch.int64, device="npu"), x, x, cache, 64, mrope_section=[0, 0, 0]
    )
    assert query.shape == key.shape == (0, 128)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_interleave_rope_leaves_the_halves_apart(dtype):
    x = torch.randn(2, 4, 3, 64).to(dtype)
    cos, sin = (torch.randn(2, 1, 3, 64).to(dtype) for _ in range(2))
    halves = torch.cat([x.double()[..., ::2], x.double()[..., 1::2]], -1)
    expected = halves * cos.double() + rotated(halves, False) * sin.double()
    close(torch_npu.npu_interleave_rope(x.npu(), cos.npu(), sin.npu()), expected, ulps=4)


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_gradients(mode):
    plain = [torch.randn(2, 5, 3, 64), torch.randn(1, 5, 1, 64), torch.randn(1, 5, 1, 64)]
    ours = [value.npu().requires_grad_() for value in plain]
    wide = [value.double().requires_grad_() for value in plain]
    weight = torch.randn(2, 5, 3, 64)
    (torch_npu.npu_rotary_mul(*ours, mode) * weight.npu()).sum().backward()
    x, cos, sin = wide
    ((x * cos + rotated(x, mode == "interleave") * sin) * weight.double()).sum().backward()
    for one, other in zip(ours, wide, strict=True):
        close(one.grad, other.grad, ulps=64)
