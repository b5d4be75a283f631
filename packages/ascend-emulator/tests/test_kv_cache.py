# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Writing to and reading from paged caches, against their definitions."""

import re

import pytest
import torch
import torch_npu

HALVES = [torch.float16, torch.bfloat16]


def fractal(cache):
    """[blocks, block_size, heads, D] as [blocks, heads * D / c, block_size, c], c being
    32 bytes."""
    unit = 32 // cache.element_size()
    return cache.flatten(2).unflatten(-1, (-1, unit)).transpose(1, 2).contiguous()


@pytest.mark.parametrize("dtype", [*HALVES, torch.int8, torch.float32], ids=str)
@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
@pytest.mark.parametrize("slots", [torch.int32, torch.int64], ids=str)
def test_scatter_pa_kv_cache(slots, mode, dtype):
    key, value = (torch.randint(-100, 100, (7, 2, size)).to(dtype) for size in (64, 32))
    caches = [torch.randint(-9, 9, (3, 16, 2, size)).to(dtype) for size in (64, 32)]
    where = torch.tensor([0, 47, 16, 33, 5, 31, 30], dtype=slots)
    arrange = fractal if mode == "PA_NZ" else torch.Tensor.contiguous
    ours = [arrange(x).npu() for x in caches]
    torch_npu.npu_scatter_pa_kv_cache(key.npu(), value.npu(), *ours, where.npu(), cache_mode=mode)
    for cache, rows, result in zip(caches, (key, value), ours, strict=True):
        for slot, row in zip(where.tolist(), rows, strict=True):
            cache[slot // 16, slot % 16] = row
        assert torch.equal(result.cpu(), arrange(cache))


def test_scatter_pa_cache():
    key, cache = torch.randn(3, 2, 16), torch.randn(2, 16, 2, 16)
    ours = cache.npu()
    torch.ops.npu.npu_scatter_pa_cache(
        key.npu(), torch.tensor([1, 17, 0], dtype=torch.int32).npu(), key_cache=ours
    )
    for slot, row in zip((1, 17, 0), key, strict=True):
        cache[slot // 16, slot % 16] = row
    assert torch.equal(ours.cpu(), cache)


@pytest.mark.parametrize("part", ["key", "value", "key_cache", "value_cache", "slot_mapping"])
def test_views_that_are_not_contiguous_are_refused(part):
    """A slice of a joint projection, for example: a kernel that ignores strides reads its
    neighbours."""
    shapes = {
        "key": (3, 2, 16),
        "value": (3, 2, 16),
        "key_cache": (2, 16, 2, 16),
        "value_cache": (2, 16, 2, 16),
    }
    tensors = {name: torch.zeros(*shape, 2, device="npu") for name, shape in shapes.items()}
    tensors["slot_mapping"] = torch.zeros(3, 2, dtype=torch.int64, device="npu")
    given = {
        name: x[..., 0] if name == part else x[..., 0].contiguous() for name, x in tensors.items()
    }
    with pytest.raises(RuntimeError, match=f"{part} "):
        torch_npu.npu_scatter_pa_kv_cache(**given, cache_mode="Norm")
    if part not in ("value", "value_cache"):
        key, cache, slots = (given[name] for name in ("key", "key_cache", "slot_mapping"))
        with pytest.raises(RuntimeError, match=f"{part} "):
            torch.ops.npu.npu_scatter_pa_cache(key, slots, key_cache=cache)


@pytest.mark.parametrize("cumulative", [True, False])
@pytest.mark.parametrize("offsets", [None, [16, 0]])
def test_gather_pa_kv_cache(offsets, cumulative):
    key_cache, value_cache = torch.randn(6, 16, 2, 32), torch.randn(6, 16, 2, 16)
    table = torch.tensor([[4, 0, 2], [1, 5, -1]], dtype=torch.int32)
    lengths = torch.tensor([20, 35], dtype=torch.int32)
    given = torch.tensor([0, 20, 55], dtype=torch.int32) if cumulative else lengths
    out = [torch.full((55, 2, size), 9.0).npu() for size in (32, 16)]
    torch_npu.npu_gather_pa_kv_cache(
        key_cache.npu(),
        value_cache.npu(),
        table.npu(),
        given.npu(),
        *out,
        seq_offset=None if offsets is None else torch.tensor(offsets, dtype=torch.int32).npu(),
        is_seq_lens_cumsum=cumulative,
    )
    for cache, result in zip((key_cache, value_cache), out, strict=True):
        rows = []
        for request, length in enumerate(lengths.tolist()):
            start = offsets[request] // 16 if offsets else 0
            for token in range(length):
                place = start + token // 16
                block = int(table[request, place]) if place < 3 else -1
                rows.append(
                    cache[block, token % 16] if block >= 0 else torch.zeros_like(cache[0, 0])
                )
        assert torch.equal(result.cpu(), torch.stack(rows))


def rms(x, gamma, epsilon=1e-5):
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * gamma


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def apart(x):
    """The even positions, then the odd ones."""
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)


def put(cache, rows, index, mode, length):
    """rows [B * S, D] into [blocks, block_size, 1, D], in the order of `mode`."""
    block_size = cache.size(1)
    view = (
        cache.view(cache.size(0), -1, block_size, 32 // cache.element_size())
        if "NZ" in mode
        else cache
    )
    for i, row in enumerate(rows):
        if "BLK" in mode:
            pages = -(-length // block_size)
            slot = int(index[i // length * pages + i % length // block_size])
            slot = slot if slot < 0 else slot // block_size * block_size + i % length % block_size
        else:
            slot = int(index[i])
        if slot < 0:
            continue
        if "NZ" in mode:
            view[slot // block_size, :, slot % block_size] = row.view(view.size(1), -1)
        else:
            view[slot // block_size, slot % block_size, 0] = row


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("small", [False, True], ids=["half", "int8"])
@pytest.mark.parametrize("mode", ["PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ"])
def test_kv_rmsnorm_rope_cache(mode, small, dtype):
    batch, length = 2, 20
    kv = torch.randn(batch, 1, length, 576).to(dtype)
    gamma, cos, sin = torch.randn(512).to(dtype), *torch.rand(2, batch, 1, length, 64).to(dtype)
    index = torch.tensor([0, 48, 16, -1]) if "BLK" in mode else torch.randperm(64)[: batch * length]
    caches = [
        torch.zeros(4, 16, 1, size, dtype=torch.int8 if small else dtype) for size in (64, 512)
    ]
    scales = [torch.rand(64) * 20 + 5, torch.rand(512) * 20 + 5] if small else [None, None]
    ours = [x.npu() for x in caches]
    _, _, key_out, value_out = torch_npu.npu_kv_rmsnorm_rope_cache(
        kv.npu(),
        gamma.npu(),
        cos.npu(),
        sin.npu(),
        index.npu(),
        *ours,
        k_rope_scale=scales[0].npu() if small else None,
        c_kv_scale=scales[1].npu() if small else None,
        epsilon=1e-5,
        cache_mode=mode,
        is_output_kv=True,
    )
    value = rms(kv.double()[..., :512], gamma.double())
    key = rotate(apart(kv.double()[..., 512:]), cos.double(), sin.double())
    bound = 3 * torch.finfo(dtype).eps
    torch.testing.assert_close(key_out.cpu().double(), key, atol=bound, rtol=bound)
    torch.testing.assert_close(value_out.cpu().double(), value, atol=bound, rtol=bound)
    for cache, rows, scale, result in zip(caches, (key, value), scales, ours, strict=True):
        stored = (rows * scale.double()).round().clamp(-128, 127) if small else rows
        expected = torch.zeros(cache.shape, dtype=torch.int8 if small else dtype)
        put(expected, stored.view(batch * length, -1).to(expected.dtype), index, mode, length)
        torch.testing.assert_close(
            result.cpu().double(),
            expected.double(),
            atol=1 if small else bound,
            rtol=0 if small else bound,
        )


def test_kv_rmsnorm_rope_cache_by_places_and_with_values():
    kv, v = torch.randn(2, 1, 3, 192).bfloat16(), torch.randn(2, 1, 3, 128).bfloat16()
    gamma, cos, sin = torch.randn(192).bfloat16(), *torch.rand(2, 2, 1, 3, 64).bfloat16()
    index = torch.tensor([[0, 5, 2], [7, 1, -1]])
    caches = [torch.zeros(2, 1, 8, size).bfloat16().npu() for size in (192, 128)]
    torch_npu.npu_kv_rmsnorm_rope_cache(
        kv.npu(),
        gamma.npu(),
        cos.npu(),
        sin.npu(),
        index.npu(),
        *caches,
        v=v.npu(),
        cache_mode="Norm",
        is_output_kv=True,
    )
    key = rms(kv.double(), gamma.double())
    key = torch.cat([rotate(apart(key[..., :64]), cos.double(), sin.double()), key[..., 64:]], -1)
    for cache, rows in zip(caches, (key, v.double()), strict=True):
        expected = torch.zeros(cache.shape).double()
        for request in range(2):
            for token, place in enumerate(index[request].tolist()):
                if place >= 0:
                    expected[request, 0, place] = rows[request, 0, token]
        torch.testing.assert_close(cache.cpu().double(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("small", [False, True], ids=["half", "int8"])
def test_qkv_rms_norm_rope_cache(small):
    tokens, heads, size = 5, (4, 2, 2), 64
    qkv = torch.randn(tokens, sum(heads) * size).half()
    gammas, angles = torch.randn(2, size).half(), torch.rand(2, tokens, size).half()
    index = torch.tensor([3, -1, 31, 16, 0])
    dtype = torch.int8 if small else torch.float16
    unit = 32 if small else 16
    caches = [torch.zeros(2, 2 * size // unit, 16, unit, dtype=dtype).npu() for _ in range(2)]
    scales = [torch.rand(2, size) * 0.05 + 0.02 for _ in range(2)] if small else [None, None]
    q_out = torch.zeros(tokens, heads[0] * size).half().npu()
    torch.ops.npu.npu_qkv_rms_norm_rope_cache(
        qkv.npu(), *gammas.npu(), *angles.npu(), index.npu(), q_out, *caches, [1, tokens, sum(heads), size], list(heads),
        k_scale=scales[0].npu() if small else None, v_scale=scales[1].npu() if small else None, cache_mode="PA_NZ",
    )  # fmt: skip
    q, k, v = qkv.double().view(tokens, -1, size).split(heads, 1)
    cos, sin = angles.double().unsqueeze(2)
    q, k = (
        rotate(rms(x, gamma, 1e-6), cos, sin)
        for x, gamma in zip((q, k), gammas.double(), strict=True)
    )
    torch.testing.assert_close(q_out.cpu().double(), q.flatten(1), atol=4e-3, rtol=4e-3)
    for cache, rows, scale in zip(caches, (k, v), scales, strict=True):
        stored = (rows / scale.double()).round().clamp(-128, 127) if small else rows
        expected = torch.zeros(cache.shape).double()
        for slot, row in zip(index.tolist(), stored.flatten(1), strict=True):
            if slot >= 0:
                expected[slot // 16, :, slot % 16] = row.view(-1, unit)
        torch.testing.assert_close(
            cache.cpu().double(), expected, atol=1 if small else 4e-3, rtol=0 if small else 4e-3
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"slots": torch.tensor([0, 1, 2])},
            "dimension 0 of key is 7 and dimension 0 of slot_mapping is 3",
        ),
        ({"cache": torch.zeros(3, 16, 2, 32)}, "key_cache has shape [3, 16, 2, 32]"),
        (
            {"cache": torch.zeros(3, 16, 2, 64).half()},
            "key_cache is Half (DT_FLOAT16) and key is Float (DT_FLOAT)",
        ),
        ({"mode": "PA_NZ"}, "in cache_mode PA_NZ"),
    ],
)
def test_scatter_refuses(change, message):
    given = {"slots": torch.arange(7), "cache": torch.zeros(3, 16, 2, 64), "mode": "Norm"} | change
    key = torch.randn(7, 2, 64).npu()
    with pytest.raises(RuntimeError, match=re.escape(message)):
        torch_npu.npu_scatter_pa_kv_cache(
            key,
            key,
            given["cache"].npu(),
            given["cache"].npu(),
            given["slots"].npu(),
            cache_mode=given["mode"],
        )
