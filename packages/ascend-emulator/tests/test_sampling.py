# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Choosing tokens: top-k, top-p and sampling, against the same in float64."""

import pytest
import torch
import torch_npu

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("by", ["k", "p", "both"])
def test_top_k_top_p(by, dtype):
    logits = torch.randn(5, 50).to(dtype) * 3
    k = torch.tensor([1, 3, 50, 7, 20], dtype=torch.int32)
    p = torch.tensor([0.0, 0.5, 1.0, 0.9, 0.3]).to(dtype)
    out = torch_npu.npu_top_k_top_p(
        logits.npu(), p.npu() if by != "k" else None, k.npu() if by != "p" else None
    )
    for row, kept, share, result in zip(
        logits.double(), k.tolist(), p.double().tolist(), out.cpu(), strict=True
    ):
        values, places = row.sort(stable=True)
        if by != "p":
            values = values.masked_fill(values < values[50 - kept], -torch.inf)
        if by != "k":
            out_of = values.softmax(-1).cumsum(-1) <= 1 - share
            out_of[-1] = False
            values = values.masked_fill(out_of, -torch.inf)
        expected = torch.empty(50).double().scatter_(0, places, values)
        assert torch.equal(result.double(), expected)


def test_top_k_top_p_of_no_logits():
    logits, k = torch.randn(0, 100).npu(), torch.zeros(0, dtype=torch.int32).npu()
    assert torch_npu.npu_top_k_top_p(logits, logits[:, 0], k).cpu().shape == (0, 100)


@pytest.mark.parametrize("case", ["argmax", "k", "p", "k p q", "p q", "k min", "k p min draw"])
def test_top_k_top_p_sample(case):
    logits, batch, words = torch.randn(6, 200) * 3, 6, 200
    k = (
        torch.randint(1, 30, (batch,), dtype=torch.int32)
        if "k" in case.split()
        else torch.full((batch,), 2000, dtype=torch.int32)
    )
    p = torch.rand(batch) * 0.8 + 0.1 if "p" in case.split() else torch.ones(batch)
    q = torch.rand(batch, words) + 0.1 if "q" in case.split() else None
    least = torch.rand(batch) * 0.5 if "min" in case.split() else None
    chosen, selected = torch_npu.npu_top_k_top_p_sample(
        logits.npu(), k.npu(), p.npu(), q=None if q is None else q.npu(), min_ps=None if least is None else least.npu(),
        is_need_logits=True, post_sample="multiNomial" if "draw" in case else "qSample",
    )  # fmt: skip
    for i in range(batch):
        values, places = logits[i].double().sort(descending=True, stable=True)
        if k[i] <= words:
            values, places = values[: k[i]], places[: k[i]]
        shares = values.softmax(-1)
        if p[i] < 1:
            kept = (shares.cumsum(-1) - shares) < p[i].double()
            shares, places = shares[kept], places[kept]
        if least is not None:
            kept = shares >= shares.max() * least[i].double()
            shares, places = shares[kept], places[kept]
        expected = torch.full((words,), -torch.inf).double()
        expected[places] = logits[i, places].double()
        assert torch.equal(selected[i].cpu().double(), expected)
        if "draw" in case:
            assert int(chosen[i]) in places.tolist()
        else:
            drawn = shares if q is None else shares / (q[i, : len(shares)].double() + 1e-8)
            if q is None or "k" in case or "p" in case:
                assert int(chosen[i]) == int(places[drawn.argmax()])


def test_exponential_numbers():
    torch.npu.manual_seed(7)
    first = torch_npu.npu_sim_exponential_(torch.empty(20000, device="npu"), lambd=2.0)
    torch.npu.manual_seed(7)
    assert torch.equal(
        first, torch_npu.npu_sim_exponential_(torch.empty(20000, device="npu"), lambd=2.0)
    )
    assert first.min() >= 0
    assert abs(float(first.mean()) - 0.5) < 0.02
    assert abs(float(first.var()) - 0.25) < 0.03


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: torch_npu.npu_top_k_top_p(x, None, None), "k is needed"),
        (
            lambda x: torch_npu.npu_top_k_top_p(x, x[:, 0].half(), None),
            r"p is Half \(DT_FLOAT16\) and logits is Float \(DT_FLOAT\)",
        ),
    ],
)
def test_arguments_outside_the_documentation_are_refused(call, message):
    with pytest.raises(RuntimeError, match=message):
        call(torch.randn(4, 4).npu())
