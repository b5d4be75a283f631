# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Reference and arrangements of the fused inference attention, for its tests."""

import comparisons
import torch

COMPRESSED = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
BATCH, QUERIES, KEYS, HEADS, GROUPS, SIZE = 2, 6, 20, 4, 2, 32


def reference(query, key, value, scale, mask=None, bias=None, sink=None):
    """query [n, t, d], key and value [m, l, d]; returns [n, t, dv] and the log-sum-exp [n, t]."""
    query, key, value = query.double(), key.double(), value.double()
    key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
    scores = query @ key.transpose(1, 2) * scale
    if bias is not None:
        scores = scores + bias.double()
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    sums = scores.logsumexp(-1)
    if sink is not None:
        sums = torch.logaddexp(sums, sink.double()[:, None])
    weights = (scores - sums[..., None]).exp().nan_to_num(0)
    return weights @ value, sums


def close(actual, expected, ulps=8):
    comparisons.close(actual, expected, ulps)


def arranged(x, layout):
    """[b, n, s, d] in a layout; requests of the packed ones one after the other."""
    if layout == "BSH":
        return x.transpose(1, 2).flatten(2)
    order = {
        "BNSD": (0, 1, 2, 3),
        "BSND": (0, 2, 1, 3),
        "NBSD": (1, 0, 2, 3),
        "TND": (0, 2, 1, 3),
        "NTD": (1, 0, 2, 3),
    }[layout]
    y = x.permute(order)
    if layout == "TND":
        y = y.flatten(0, 1)
    if layout == "NTD":
        y = y.flatten(1, 2)
    return y.contiguous()


def inputs(dtype=torch.float16, queries=QUERIES, size=SIZE):
    shapes = ((HEADS, queries), (GROUPS, KEYS), (GROUPS, KEYS))
    return [torch.randn(BATCH, n, s, size).to(dtype) for n, s in shapes]
