# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Attention update and batched matmuls with transposition, against references in float64."""

import re

import pytest
import torch
import torch_npu
from comparisons import close

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_update(dtype):
    lse, parts = torch.randn(3, 10), torch.randn(3, 10, 32).to(dtype)
    lse[1, 4] = torch.inf  # a part without keys
    out, total = torch_npu.npu_attention_update([x.npu() for x in lse], [x.npu() for x in parts], 1)
    wide = lse.double().masked_fill(lse.isposinf(), -torch.inf)
    close(out, ((wide - wide.logsumexp(0)).exp()[..., None] * parts.double()).sum(0))
    close(total, wide.logsumexp(0))
    assert torch.equal(
        torch_npu.npu_attention_update([x.npu() for x in lse], [x.npu() for x in parts], 0)[0], out
    )


@pytest.mark.parametrize("layout", ["SBH", "TND", "packed"])
def test_ring_attention_update(calls, layout):
    heads, size, counts = 2, 16, [3, 4]
    shape = (5, 2, heads * size) if layout == "SBH" else (7, heads, size)
    outs = torch.randn(2, *shape)
    stats_shape = (2, heads, 5) if layout == "SBH" else (7, heads)
    largest, sums = torch.randn(2, *stats_shape), torch.rand(2, *stats_shape) + 0.5

    def given(x):
        """The columns of eight; requests one after the other as [heads, tokens] unless the layout
        is the output's."""
        if layout == "packed":
            x = torch.cat([part.t().reshape(-1) for part in x.split(counts)]).view(7, heads)
        return x[..., None].expand(*x.shape, 8).contiguous().npu()

    options = (
        {}
        if layout == "SBH"
        else {"input_layout": "TND", "actual_seq_qlen": torch.tensor([3, 7]).npu()}
    )
    if layout == "TND":
        options["input_softmax_layout"] = "TND"
    parts = [
        outs[0].npu(),
        given(largest[0]),
        given(sums[0]),
        outs[1].npu(),
        given(largest[1]),
        given(sums[1]),
    ]
    out, maxima, total = torch_npu.npu_ring_attention_update(*parts, **options)
    if layout != "TND":  # the first version, which MindSpeed calls
        first = [torch.empty_like(x) for x in (out, maxima, total)]
        layout_of_outputs = options.get("input_layout", "SBH")
        calls.compute(
            "RingAttentionUpdate", *parts, options.get("actual_seq_qlen"), layout_of_outputs, *first
        )
        assert all(torch.equal(*pair) for pair in zip(first, (out, maxima, total), strict=True))
    lse = largest.double() + sums.double().log()
    weights = (lse - lse.logsumexp(0)).exp()
    if layout == "SBH":
        wide = outs.double().view(2, 5, 2, heads, size) * weights.permute(0, 3, 1, 2)[..., None]
        close(out, wide.sum(0).flatten(2), ulps=16)
    else:
        close(out, (outs.double() * weights[..., None]).sum(0), ulps=16)
    assert torch.equal(maxima.cpu(), torch.maximum(given(largest[0]), given(largest[1])).cpu())
    close(
        (maxima + total.log())[..., 0].flatten().sort()[0],
        lse.logsumexp(0).flatten().sort()[0],
        ulps=16,
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("perm", [(0, 1, 2), (1, 0, 2)])
def test_transpose_batchmatmul(perm, split, dtype):
    x, weight = (
        torch.randn(4, 6, 32).permute(perm).contiguous().to(dtype),
        torch.randn(4, 32, 16).to(dtype),
    )
    out = torch_npu.npu_transpose_batchmatmul(
        x.npu(),
        weight.npu(),
        perm_x1=perm,
        perm_x2=(0, 1, 2),
        perm_y=(1, 0, 2),
        batch_split_factor=split,
    )
    expected = (x.double().permute(perm) @ weight.double()).transpose(0, 1)
    close(
        out,
        expected if split == 1 else expected.reshape(6, 2, 32).transpose(0, 1),
        ulps=64 if dtype == torch.float32 else 8,
    )


def multiplied(batch, inner, columns, turned=False):
    """Arguments of npu_transpose_batchmatmul, with one row."""
    x = torch.zeros((1, batch, inner) if turned else (batch, 1, inner)).half().npu()
    return x, torch.zeros(batch, inner, columns).half().npu()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x: torch_npu.npu_attention_update([x[0]], [x.repeat(1, 2).half()] * 2, 0),
            "lists of 1 lse and 2 local_out",
        ),
        (
            lambda x: torch_npu.npu_attention_update([x[0]] * 17, [x.repeat(1, 2)] * 17, 0),
            "lists of 17 lse and local_out; at most 16 are allowed",
        ),
        (
            lambda x: torch_npu.npu_attention_update([x[0]], [x], 0),
            "dimension 1 of local_out is 4; allowed: 8 to 512",
        ),
        (
            lambda x: torch_npu.npu_attention_update([x[0]], [x.repeat(1, 3)], 0),
            "dimension 1 of local_out is 12; it must be a multiple of 8",
        ),
        (lambda x: torch_npu.npu_transpose_batchmatmul(*multiplied(1, 8, 16)), "K is 8"),
        (lambda x: torch_npu.npu_transpose_batchmatmul(*multiplied(1, 16, 8)), "N is 8"),
        (
            lambda x: torch_npu.npu_transpose_batchmatmul(*multiplied(1, 65536, 16)),
            "K is 65536; allowed: 1 to 65535",
        ),
        (
            lambda x: torch_npu.npu_transpose_batchmatmul(
                *multiplied(4096, 16, 16, turned=True), perm_x1=(1, 0, 2)
            ),
            "K x B is 65536; allowed: 1 to 65535",
        ),
        (
            lambda x: torch_npu.npu_transpose_batchmatmul(x[None], x[None], perm_x1=(2, 1, 0)),
            "perm_x1 should be [0, 1, 2] or [1, 0, 2]",
        ),
    ],
)
def test_arguments_outside_the_documentation_are_refused(call, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        call(torch.randn(4, 4).npu())
