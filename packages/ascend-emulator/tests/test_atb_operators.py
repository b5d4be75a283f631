# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""ATB's operators without attention, against their definitions in float64."""

import sys
import textwrap

import pytest
import torch
import torch_npu

HALVES = [torch.float16, torch.bfloat16]


BLOCK = 16


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [*HALVES, torch.int8], ids=str)
def test_reshape_and_cache(dtype):
    key, value = (torch.randint(-100, 100, (4, 2, size)).to(dtype) for size in (64, 32))
    caches = [torch.randint(-9, 9, (3, BLOCK, 2, size)).to(dtype) for size in (64, 32)]
    slots = int32(0, 47, -1, 16)  # negative ones are left out
    ours, alone = [x.npu() for x in caches], caches[0].npu()
    torch_npu._npu_reshape_and_cache(key.npu(), value.npu(), *ours, slots.npu())
    torch_npu._npu_reshape_and_cache_siso(key.npu(), alone, slots.npu())
    for cache, rows in zip(caches, (key, value), strict=True):
        for slot, row in zip(slots.tolist(), rows, strict=True):
            if slot >= 0:
                cache[slot // BLOCK, slot % BLOCK] = row
    for actual, expected in zip([*ours, alone], [*caches, caches[0]], strict=True):
        assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("ends", [None, "with zero", "without"])
@pytest.mark.parametrize("starts", [None, [16, 0]])
def test_paged_cache_load(starts, ends):
    caches = [torch.randn(6, BLOCK, 2, size).half() for size in (32, 16)]
    table, lengths = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32), [20, 35]
    given = {None: lengths, "with zero": [0, 20, 55], "without": [20, 55]}[ends]
    options = {
        "seq_starts": None if starts is None else int32(*starts).npu(),
        "cumsum": ends is not None,
    }
    ours = torch_npu.atb.npu_paged_cache_load(
        *(x.npu() for x in caches), table.npu(), int32(*given).npu(), **options
    )
    for cache, out in zip(caches, ours, strict=True):
        rows = [
            cache[table[i, (starts or [0, 0])[i] // BLOCK :].long()].flatten(0, 1)[:n]
            for i, n in enumerate(lengths)
        ]
        assert torch.equal(out.cpu(), torch.cat(rows))


@pytest.mark.parametrize("neox", [True, False])
def test_rotary_embedding(neox, run):
    """In a process of its own: torch_npu keeps the first cache of cosines that it is given."""
    script = """
        import sys
        import torch, torch_npu
        neox = sys.argv[1] == "True"
        angles = torch.outer(torch.arange(32), 0.5 ** torch.arange(8)).double()
        query, key = torch.randn(5, 4 * 16).half(), torch.randn(5, 2 * 16).half()
        where = torch.tensor([3, 0, 31, 7, 7])
        ours = [x.npu() for x in (query, key)]
        cache = torch.cat([angles.cos(), angles.sin()], -1).float().npu()
        torch_npu._npu_rotary_embedding(where.npu(), *ours, 16, cache, neox)
        for x, out in zip((query, key), ours):
            x = x.double().view(5, -1, 16)
            first, second = x.chunk(2, -1) if neox else (x[..., ::2], x[..., 1::2])
            cos, sin = angles[where].cos()[:, None], angles[where].sin()[:, None]
            turned = [first * cos - second * sin, second * cos + first * sin]
            expected = (torch.cat(turned, -1) if neox else torch.stack(turned, -1)).reshape(out.shape)
            torch.testing.assert_close(out.cpu().double(), expected, atol=4e-3, rtol=4e-3)
    """
    done = run("run", "--", sys.executable, "-c", textwrap.dedent(script), str(neox))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_quantize_per_tensor(dtype, shifted):
    x, scale = (torch.randn(3, 8) * 40).to(dtype), (torch.rand(8) / 2 + 0.2).to(dtype)
    offset = torch.randint(-9, 9, (8 if shifted else 0,), dtype=torch.int8)
    out = torch.empty(3, 8, dtype=torch.int8).npu()
    torch_npu._npu_quantize_per_tensor(x.npu(), scale.npu(), offset.npu(), out)
    expected = (x.float() / scale.float()).round() + (offset.float() if shifted else 0)
    assert torch.equal(out.cpu(), expected.clamp(-128, 127).to(torch.int8))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_quant_rms_norm(dtype):
    x, gamma, beta = (torch.randn(*shape).to(dtype) for shape in ((4, 1, 64), (64,), (64,)))
    scale, offset, out = (
        torch.tensor([0.02]).to(dtype),
        torch.tensor([3], dtype=torch.int8),
        torch.empty(4, 1, 64, dtype=torch.int8),
    )
    out = out.npu()
    torch_npu._npu_quant_rms_norm(
        x.npu(), gamma.npu(), beta.npu(), scale.npu(), offset.npu(), out, 1e-3
    )
    wide = (
        x.double() / (x.double().pow(2).mean(-1, True) + 1e-3).sqrt() * gamma.double()
        + beta.double()
    )
    expected = (wide / scale.double() + 3).round().clamp(-128, 127)
    # A tie that float32 rounds in the other direction.
    assert (out.cpu().double() - expected).abs().max() <= 1
    assert (out.cpu().double() == expected).double().mean() > 0.98


@pytest.mark.parametrize("summed", [1, 2])
def test_group_topk(summed):
    x = torch.randn(5, 16).half()
    ours = x.npu()
    torch_npu._npu_group_topk(ours, k=2, group_num=4, n=summed)
    for row, out in zip(x, ours.cpu(), strict=True):
        groups = row.view(4, 4)
        best = groups.float().topk(summed).values.sum(-1).topk(2).indices
        expected = torch.zeros_like(groups)
        expected[best] = groups[best]
        assert torch.equal(out, expected.flatten())


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_fused_add_topk_div(dtype, normalized):
    x, added = torch.randn(5, 16).to(dtype), torch.randn(16).to(dtype)
    options = {"group_num": 4, "group_topk": 2, "n": 2, "k": 3, "is_norm": normalized, "scale": 2.5}
    weights, experts = torch_npu.atb.npu_fused_add_topk_div(x.npu(), added.npu(), **options)
    for row, ours, chosen in zip(x, weights.cpu(), experts.cpu().long(), strict=True):
        gates = row.double().sigmoid()
        scores = (gates + added.double()).view(4, 4)
        kept = scores.topk(2).values.sum(-1).topk(2).indices
        seen = torch.full_like(scores, -torch.inf).index_copy(0, kept, scores[kept]).flatten()
        assert chosen.tolist() == seen.topk(3).indices.tolist()
        expected = gates[chosen] / (gates[chosen].sum() if normalized else 1) * 2.5
        torch.testing.assert_close(ours.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_matmul_add_fp32(dtype):
    x, weight, c = torch.randn(9, 4).to(dtype), torch.randn(9, 5).to(dtype), torch.randn(4, 5)
    ours = c.npu()
    torch_npu._npu_matmul_add_fp32(x.npu(), weight.npu(), ours)
    torch.testing.assert_close(
        ours.cpu().double(), c.double() + x.double().t() @ weight.double(), atol=1e-5, rtol=1e-5
    )
