# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""References of fused operators: their formulas from torch_npu's documentation, written for float64
on the CPU."""

from __future__ import annotations

from typing import Any

from ascend_emulator.verify.lazy import torch


def rms_norm(x: Any, gamma: Any, eps: float = 1e-6) -> tuple[Any, Any]:
    """The normed rows, and the reciprocal of their root mean square, [..., 1]."""
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * scale * gamma, scale


def add_rms_norm(x: Any, residual: Any, gamma: Any, eps: float = 1e-6) -> tuple[Any, Any, Any]:
    """Norm of the sum, reciprocal root mean square, and the sum."""
    total = x + residual
    return (*rms_norm(total, gamma, eps), total)


def swiglu(x: Any) -> Any:
    """SiLU of the first half of the last dimension, times the second half."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def rotate_half(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding with the halves of the last dimension as pairs."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def rotate_interleaved(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding with neighbours as pairs."""
    return x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin


def quantized_rows(x: Any) -> tuple[Any, Any]:
    """int8 rows and their scales: the largest magnitude of a row is 127."""
    scale = x.abs().amax(-1) / 127
    return (x / scale[..., None]).round().clamp(-128, 127).to(torch.int8), scale


def shared_exponents(x: Any) -> tuple[Any, Any]:
    """Codes in e4m3 of rows with an exponent for 32 values, and the exponents in e8m0, as OCP's
    Microscaling specification says: the exponent of the largest magnitude, less the 8 of e4m3."""
    groups = x.double().unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 8
    codes = (groups / 2.0 ** exponents[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = (exponents + 127).to(torch.uint8).unflatten(-1, (-1, 2))
    return codes.flatten(-2).view(torch.uint8), stored


def scaled_blocks(x: Any) -> tuple[Any, Any]:
    """Codes in e4m3 of rows with a float32 scale for 128 values: the largest magnitude of a block is
    448."""
    blocks = x.float().unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1) / 448
    codes = (blocks / scale[..., None]).to(torch.float8_e4m3fn)
    return codes.flatten(-2).view(torch.uint8), scale


def attention(query: Any, key: Any, value: Any, scale: float, causal: bool = False) -> Any:
    """Softmax attention of [batch, heads, tokens, size]; key heads are repeated for groups of query
    heads."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(
            1 + scores.shape[-1] - scores.shape[-2]
        )
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ value


def paged(cache: Any, table: Any, length: int) -> Any:
    """Keys or values of one request, [1, heads, length, size], from blocks [blocks, block size,
    heads x size] and two heads."""
    rows = cache[table.long()].flatten(0, 1)[:length]
    return rows.view(length, 2, -1).transpose(0, 1)[None]


def top_k_softmax(x: Any, k: int) -> tuple[Any, Any]:
    """The ``k`` largest probabilities of each row and their columns."""
    values, columns = x.softmax(-1).topk(k, -1)
    return values, columns


def grouped_matmul(x: Any, weight: Any, ends: list[int]) -> Any:
    """Rows up to each end times the matrix of that group."""
    starts = [0, *ends[:-1]]
    return torch.cat(
        [
            x[start:end] @ weight[group]
            for group, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
    )


def quant_matmul(x: Any, weight: Any, scale: Any, rows: Any = None) -> Any:
    """Exact product of int8 matrices, times the scales of columns and rows."""
    product = (x.double() @ weight.double()) * scale.double()
    return product if rows is None else product * rows.double()[:, None]


def grouped_top_k(
    x: Any, bias: Any, k: int, most: int, groups: int, factor: float
) -> tuple[Any, Any]:
    """DeepSeek-V3's router: of the ``most`` groups with the largest sums of two, the ``k`` experts
    with the largest sigmoid plus bias; weights add up to ``factor``."""
    scores = x.sigmoid()
    choices = (scores + bias).unflatten(-1, (groups, -1))
    best = choices.topk(2, -1).values.sum(-1).topk(most, -1).indices
    kept = torch.zeros(choices.shape[:2]).scatter(1, best, 1)[..., None] > 0
    columns = choices.masked_fill(~kept, -9).flatten(1).topk(k, -1).indices
    weights = scores.gather(-1, columns)
    return weights / weights.sum(-1, True) * factor, columns


def sample(x: Any, k: Any, p: Any, noise: Any) -> Any:
    """Of the ``k`` most probable columns, and of those until their sum reaches ``p``, that with the
    largest probability divided by the noise at its rank among them."""
    columns = []
    for row, count, least, divisor in zip(x, k, p, noise, strict=True):
        values, places = row.topk(int(count))
        shares = values.softmax(-1)
        shares = shares[(shares.cumsum(-1) - shares) < least]
        columns.append(places[(shares / divisor[: len(shares)]).argmax()])
    return torch.stack(columns)


def _seen(key: Any, pages: Any, lengths: Any) -> Any:
    """Of two requests with two query tokens each, for each token the keys that it sees, [length,
    size], from pages [blocks, block size, 1, size]."""
    for token in range(4):
        yield key[pages[token // 2]].flatten(0, 2)[: lengths[token // 2] - 1 + token % 2]


def chosen(query: Any, key: Any, weights: Any, pages: Any, lengths: Any, count: int) -> Any:
    """The lightning indexer's keys for each query token, in order."""
    found = [
        ((q @ rows.mT).relu() * w[:, None]).sum(0).topk(count).indices.sort().values
        for q, w, rows in zip(query, weights, _seen(key, pages, lengths), strict=True)
    ]
    return torch.stack(found)[:, None]


def sparse_attention(
    query: Any, key: Any, named: Any, pages: Any, lengths: Any, scale: float
) -> Any:
    """Attention of each query token to the named keys that it sees, whose first 512 elements are
    the values."""
    outputs = []
    for q, own, rows in zip(query, named[:, 0], _seen(key, pages, lengths), strict=True):
        taken = rows[own[(own >= 0) & (own < len(rows))]]
        outputs.append((q @ taken.mT * scale).softmax(-1) @ taken[:, :512])
    return torch.stack(outputs)


def atb_attention(query: Any, key: Any, value: Any, slots: Any, scale: float) -> Any:
    """ATB's attention of the last tokens of a request on the NPU, from pages of 16 tokens."""
    import torch_npu

    tokens, heads, size = key.shape
    is_fractal = torch.npu.get_device_name().startswith("Ascend310P")
    shape = (2, heads * size // 16, 16, 16) if is_fractal else (2, 16, heads, size)
    form = {"dtype": key.dtype, "device": key.device, "acl_format": 29 if is_fractal else 2}
    caches = [torch_npu.empty_with_format(shape, **form) for _ in range(2)]
    torch_npu._npu_reshape_and_cache(key, value, *caches, slots)
    given = {
        "query": query,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": torch.tensor([[0, 1]], dtype=torch.int32, device=key.device),
        "context_lens": torch.tensor([tokens], dtype=torch.int32),
        "num_kv_heads": heads,
        "num_heads": query.shape[1],
        "scale_value": scale,
        "out": torch.empty_like(query),
    }
    if len(query) == 1:
        torch_npu._npu_paged_attention(**given)
    else:
        mask = torch.full((2048, 2048), -10000, dtype=query.dtype).triu(1).to(key.device)
        counts = torch.tensor([len(query)], dtype=torch.int32)
        torch_npu._npu_paged_attention_splitfuse_v2(**given, mask=mask, seq_len=counts, mask_type=5)
    return given["out"]


def gated_delta(
    query: Any, key: Any, value: Any, state: Any, beta: Any, g: Any, scale: float, gk: Any = None
) -> tuple[Any, Any]:
    """The gated delta rule for one sequence: outputs, and the state [heads, values, keys] after
    each token."""
    groups = value.shape[1] // key.shape[1]
    query, key = (each.repeat_interleave(groups, 1) for each in (query, key))
    outputs, states = [], []
    for token, k in enumerate(key):
        state = state * g[token].exp()[:, None, None]
        if gk is not None:
            state = state * gk[token].exp()[:, None]
        error = value[token] - (state @ k[..., None])[..., 0]
        state = state + (error * beta[token][:, None])[..., None] * k[:, None]
        outputs.append((state @ query[token][..., None])[..., 0] * scale)
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def mla_prolog(
    x: Any, dq: Any, uq: Any, uk: Any, dkv: Any, gq: Any, gk: Any, sin: Any, cos: Any
) -> tuple[Any, ...]:
    """The absorbed query and its rotated part, the latent of keys and the rotated part; rotated
    elements as halves of pairs."""

    def turned(part: Any, cos: Any, sin: Any) -> Any:
        return rotate_half(torch.cat([part[..., ::2], part[..., 1::2]], -1), cos, sin)

    size, keys = uk.shape[1], x @ dkv
    both = (rms_norm(x @ dq, gq, 1e-5)[0] @ uq).view(len(x), len(uk), -1)
    return (
        torch.einsum("tnd,ndl->tnl", both[..., :size], uk),
        turned(both[..., size:], cos[:, None], sin[:, None]),
        rms_norm(keys[:, :512], gk, 1e-5)[0],
        turned(keys[:, 512:], cos, sin),
    )
