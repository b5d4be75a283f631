# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Training's attention, forward and backward, against softmax(scale * (q k^T + pse)) v and its
derivative in float64."""

import functools
import re

import comparisons
import pytest
import torch
import torch_npu

close = functools.partial(comparisons.close, ulps=8)

HEADS, GROUPS, SIZE = 4, 2, 32
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def left_out(mode, queries, keys, before=0, after=0, prefix=0):
    row, column = torch.arange(queries)[:, None], torch.arange(keys)[None]
    end = column - row - (keys - queries)
    if mode == 2:
        return column > row
    if mode == 4:
        return (end > after) | (end < -before)
    return (end > 0) & (column >= prefix)


def attend(query, key, value, scale, mask=None, bias=None, sink=None):
    """[n, t, d] of one request in float64; returns the result, the largest scores and the sums."""
    key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
    scores = query @ key.transpose(1, 2) * scale
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    largest = scores.amax(-1, keepdim=True)
    if sink is not None:
        largest = torch.maximum(largest, sink[:, None, None])
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True) + (
        0 if sink is None else (sink[:, None, None] - largest).exp()
    )
    return weights / total @ value, largest, total


def places(x, layout):
    """[b, n, s, d] in a layout."""
    order = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "SBND": (2, 0, 1, 3)}
    y = x.permute(order[{"BSH": "BSND", "SBH": "SBND"}.get(layout, layout)])
    return (y.flatten(2) if "H" in layout else y).contiguous()


def both(ours, wide, out, expected, bound):
    """The gradients of the same random direction agree."""
    grad = torch.randn(out.shape).to(out.dtype)
    out.backward(grad.npu())
    expected.backward(grad.double())
    for mine, wanted in zip(ours, wide, strict=True):
        torch.testing.assert_close(mine.grad.cpu().double(), wanted.grad, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize("mode", [0, 3])
def test_layouts_forward_and_backward(mode, layout, dtype):
    plain = [
        torch.randn(2, n, s, SIZE).to(dtype) for n, s in ((HEADS, 6), (GROUPS, 10), (GROUPS, 10))
    ]
    ours = [places(x, layout).npu().requires_grad_() for x in plain]
    mask = COMPRESSED.npu() if mode else None
    out, largest, total, *_ = torch_npu.npu_fusion_attention(
        *ours, HEADS, layout, scale=0.2, atten_mask=mask, sparse_mode=mode
    )
    wide = [places(x, layout).double().requires_grad_() for x in plain]
    back = [places_back(x, layout, n) for x, n in zip(wide, (HEADS, GROUPS, GROUPS), strict=True)]
    parts = [
        attend(q, k, v, 0.2, left_out(3, 6, 10) if mode else None)
        for q, k, v in zip(*back, strict=True)
    ]
    expected = places(torch.stack([p[0] for p in parts]), layout)
    close(out, expected)
    close(largest, torch.stack([p[1] for p in parts]).expand(-1, -1, -1, 8), ulps=64)
    close(total, torch.stack([p[2] for p in parts]).expand(-1, -1, -1, 8), ulps=64)
    both(ours, wide, out, expected, 1e-4 if dtype == torch.float32 else 1e-2)


def places_back(x, layout, heads):
    """A layout as [b, n, s, d]."""
    if "H" in layout:
        x = x.unflatten(-1, (heads, -1))
    return x.permute(
        {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3)}[
            layout
        ]
    )


@pytest.mark.parametrize("options", [(0, 3, 2), (2, 0, 0), (4, 2, 1), (6, 0, 0)], ids=str)
@pytest.mark.parametrize("arrangement", ["", "TND"])
def test_packed_requests(arrangement, options):
    mode, before, after = options
    counts, lengths = [3, 1, 5], [7, 4, 5]
    ends = [torch.tensor(x).cumsum(0).tolist() for x in (counts, lengths)]
    plain = [torch.randn(ends[i][-1], n, SIZE) for i, n in ((0, HEADS), (1, GROUPS), (1, GROUPS))]
    ours = [x.npu().requires_grad_() for x in plain]
    given = {"sparse_mode": mode, "pre_tockens": before or 2**31 - 1, "next_tockens": after}
    full = torch.rand(5, 7) > 0.7
    full[:, 0] = False
    given["atten_mask"] = {0: full, 6: torch.ones(3072, 2048, dtype=torch.bool)}.get(
        mode, COMPRESSED
    ).npu()
    if mode == 0:
        given |= {"pre_tockens": 2**31 - 1, "next_tockens": 2**31 - 1}
    if mode == 6:
        given["prefix"] = [4, 4, 2]
    out, largest, total, *_ = torch_npu.npu_fusion_attention(
        *ours,
        HEADS,
        "TND",
        scale=0.2,
        actual_seq_qlen=ends[0],
        actual_seq_kvlen=ends[1],
        softmax_layout=arrangement,
        **given,
    )
    wide = [x.double().requires_grad_() for x in plain]
    parts, start = [], (0, 0)
    for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        rows, keys = slice(start[0], start[0] + count), slice(start[1], start[1] + length)
        q, k, v = (x[s].transpose(0, 1) for x, s in zip(wide, (rows, keys, keys), strict=True))
        mask = (
            full[:count, :length]
            if mode == 0
            else left_out(mode, count, length, before, after, (4, 4, 2)[i] if mode == 6 else 0)
        )
        parts.append(attend(q, k, v, 0.2, mask))
        start = rows.stop, keys.stop
    expected = torch.cat([p[0].transpose(0, 1) for p in parts])
    close(out, expected, ulps=32)
    for mine, place in ((largest, 1), (total, 2)):
        local = [
            p[place].transpose(0, 1).flatten(0, 1) if arrangement else p[place].flatten(0, 1)
            for p in parts
        ]
        close(mine.reshape(-1, 8), torch.cat(local).expand(-1, 8), ulps=64)
    both(ours, wide, out, expected, 1e-4)


@pytest.mark.parametrize("kind", ["scaled", "added", "slopes", "roots"])
def test_position_bias(kind):
    plain = [torch.randn(2, HEADS, 6, SIZE) for _ in range(3)]
    ours = [x.npu().requires_grad_() for x in plain]
    bias = torch.randn(HEADS) if kind in ("slopes", "roots") else torch.randn(1, HEADS, 6, 6)
    distance = (torch.arange(6)[None] - torch.arange(6)[:, None]).abs().double()
    out = torch_npu.npu_fusion_attention_v2(
        *ours,
        HEADS,
        "BNSD",
        pse=bias.npu(),
        scale=0.2,
        pse_type={"added": 0, "scaled": 1, "slopes": 2, "roots": 3}[kind],
    )[0]
    wide = [x.double().requires_grad_() for x in plain]
    added = {
        "scaled": lambda: bias[0].double() * 0.2,
        "added": lambda: bias[0].double(),
        "slopes": lambda: -bias.double()[:, None, None] * distance,
        "roots": lambda: -bias.double()[:, None, None] * distance.sqrt(),
    }[kind]()
    expected = torch.stack(
        [attend(q, k, v, 0.2, bias=added)[0] for q, k, v in zip(*wide, strict=True)]
    )
    close(out, expected, ulps=32)
    both(ours, wide, out, expected, 1e-4)


@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_sink(layout):
    plain = [torch.randn(1, HEADS, 6, SIZE) for _ in range(3)]
    if layout == "TND":
        plain = [x[0].transpose(0, 1).contiguous() for x in plain]
    sink = torch.randn(HEADS)
    ours = [x.npu().requires_grad_() for x in (*plain, sink)]
    lengths = {"actual_seq_qlen": [6], "actual_seq_kvlen": [6]} if layout == "TND" else {}
    out = torch_npu.npu_fusion_attention_v2(
        *ours[:3], HEADS, layout, scale=0.3, sink=ours[3], **lengths
    )[0]
    wide = [x.double().requires_grad_() for x in (*plain, sink)]
    parts = [x.transpose(0, 1) if layout == "TND" else x[0] for x in wide[:3]]
    expected = attend(*parts, 0.3, sink=wide[3])[0]
    expected = expected.transpose(0, 1) if layout == "TND" else expected[None]
    close(out, expected, ulps=32)
    both(ours, wide, out, expected, 1e-4)


def test_rope_parts():
    plain = [torch.randn(6, HEADS, size).bfloat16() for size in (128, 128, 128, 64, 64)]
    ours = [x.npu().requires_grad_() for x in plain]
    out = torch_npu.npu_fusion_attention_v2(
        *ours[:3], HEADS, "TND", query_rope=ours[3], key_rope=ours[4], scale=0.1, atten_mask=COMPRESSED.npu(), sparse_mode=3,
        actual_seq_qlen=[6], actual_seq_kvlen=[6],
    )[0]  # fmt: skip
    wide = [x.double().requires_grad_() for x in plain]
    q, k = (torch.cat([wide[i], wide[i + 3]], -1).transpose(0, 1) for i in (0, 1))
    expected = attend(q, k, wide[2].transpose(0, 1), 0.1, left_out(3, 6, 6))[0].transpose(0, 1)
    close(out, expected)
    both(ours, wide, out, expected, 0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparse_mode": 9}, "sparse_mode value must be in range"),
        ({"keep_prob": 0.0}, "keep_prob"),
        (
            {"sparse_mode": 3, "atten_mask": torch.ones(6, 6).bool()},
            "sparse_mode 3 needs an atten_mask of 2048 x 2048",
        ),
        ({"padding_mask": torch.ones(6, 6)}, "padding_mask"),
    ],
)
def test_arguments_outside_the_documentation_are_refused(options, message):
    given = {name: x.npu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    x = torch.randn(1, HEADS, 6, SIZE).half().npu()
    with pytest.raises(RuntimeError, match=re.escape(message)):
        torch_npu.npu_fusion_attention(x, x, x, HEADS, "BNSD", **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"atten_mask": (64, 64)},
            "atten_mask has shape [64, 64]; allowed: [3, 4 or 1, 6, 8], and the same without",
        ),
        ({"atten_mask": (1, 6, 8)}, "atten_mask has shape [1, 6, 8]"),
        ({"atten_mask": (3, HEADS, 1, 8)}, "atten_mask has shape [3, 4, 1, 8]"),
        ({"atten_mask": (1, HEADS, 6, 8)}, "atten_mask has shape [1, 4, 6, 8]"),
        ({"atten_mask": (2, 1, 6, 8)}, "atten_mask has shape [2, 1, 6, 8]"),
        (
            {"atten_mask": (6, 8), "sparse_mode": 5, "prefix": [2, 2, 2]},
            "atten_mask has shape [6, 8]; allowed: [3, 4 or 1, 6, 8]",
        ),
        (
            {"atten_mask": (3, 1, 6, 8), "sparse_mode": 5},
            "sparse_mode 5 needs a prefix for each of at most 32 requests; there are 0 for 3",
        ),
        (
            {"atten_mask": (3, 1, 6, 8), "sparse_mode": 5, "prefix": [2, 2, 9]},
            "prefix is 9; allowed: 2 to 8",
        ),
        ({"pse": (3, HEADS, 6)}, "pse has shape [3, 4, 6]; allowed: [3 or 1, 4, 6 or 1, 8]"),
        ({"pse": (3, 1, 6, 8)}, "pse has shape [3, 1, 6, 8]"),
        ({"pse": (3, HEADS, 6, 6)}, "pse has shape [3, 4, 6, 6]"),
        ({"key": (2, HEADS, 8, SIZE)}, "query and key must have the same batch and head size"),
        ({"key": (3, HEADS, 8, SIZE // 2)}, "query and key must have the same batch and head size"),
        ({"value": (3, HEADS, 6, SIZE)}, "key and value the same shape"),
    ],
    ids=str,
)
def test_undocumented_shapes_are_refused_at_the_call(options, message):
    """Not on the stream, where nothing would run afterwards."""
    given = {"key": (3, HEADS, 8, SIZE), "value": options.get("key", (3, HEADS, 8, SIZE))} | options
    given = {
        name: torch.zeros(x).half().npu() if isinstance(x, tuple) else x
        for name, x in given.items()
    }
    if "atten_mask" in given:
        given["atten_mask"] = given["atten_mask"].bool()
    query = torch.zeros(3, HEADS, 6, SIZE).half().npu()
    with pytest.raises(RuntimeError, match=re.escape(message)):
        torch_npu.npu_fusion_attention(
            query, given.pop("key"), given.pop("value"), HEADS, "BNSD", **given
        )
    assert torch.ones(1).npu().item() == 1


def test_packed_sequences_are_at_most_1024():
    x = torch.randn(1025, 1, 16).half().npu()
    some, ends = x[:1024], list(range(1, 1026))
    out = torch_npu.npu_fusion_attention(
        some, some, some, 1, "TND", actual_seq_qlen=ends[:-1], actual_seq_kvlen=ends[:-1]
    )[0]
    assert torch.equal(out, some)  # each token sees itself
    with pytest.raises(
        RuntimeError,
        match="actual_seq_qlen has 1025 entries in layout TND; at most 1024 are allowed",
    ):
        torch_npu.npu_fusion_attention(
            x, x, x, 1, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends
        )


def test_packed_sequences_without_a_sink():
    """aclnnFlashAttentionVarLenScoreV2 and its gradient."""
    plain = [torch.randn(9, HEADS, SIZE) for _ in range(3)]
    ours = [x.npu().requires_grad_() for x in plain]
    out = torch_npu.npu_fusion_attention_v2(
        *ours, HEADS, "TND", scale=0.2, actual_seq_qlen=[4, 9], actual_seq_kvlen=[4, 9]
    )[0]
    wide = [x.double().requires_grad_() for x in plain]
    parts = [[x[a:b].transpose(0, 1) for x in wide] for a, b in ((0, 4), (4, 9))]
    expected = torch.cat([attend(*part, 0.2)[0].transpose(0, 1) for part in parts])
    close(out, expected, ulps=32)
    both(ours, wide, out, expected, 1e-4)


@pytest.mark.parametrize("sizes", [32, 80])
def test_packed_sequences_of_each_replay(sizes):
    """torch_npu captures version 3 as a task group, after asking for the largest workspace."""
    plain = [torch.randn(12, HEADS, sizes) for _ in range(3)]
    ours, out = [x.npu() for x in plain], torch.empty(12, HEADS, sizes, device="npu")
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph, stream=torch.npu.Stream(), auto_dispatch_capture=True):
        ends = dict.fromkeys(("actual_seq_qlen", "actual_seq_kvlen"), torch.tensor([12, 0, 0]))
        out.copy_(torch_npu.npu_fusion_attention_v3(*ours, HEADS, "TND", scale=0.2, **ends)[0])
    for lengths in ([5, 7], [1, 2, 3], [4]):
        last = torch.tensor(lengths).cumsum(0).tolist()
        given = torch.tensor(last + [0] * (3 - len(last)))
        graph.replay()
        graph.update([dict.fromkeys(ends, given)])
        torch.npu.synchronize()
        parts = [
            [x.double()[a:b].transpose(0, 1) for x in plain]
            for a, b in zip([0, *last], last, strict=False)
        ]
        expected = torch.cat([attend(*part, 0.2)[0].transpose(0, 1) for part in parts])
        close(out[: last[-1]], expected, ulps=32)
