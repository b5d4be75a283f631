# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Top-k, top-p and random sampling with npu_top_k_top_p_sample, on chips that support it.

vLLM computes the steps before it in PyTorch: penalties, bias, bad words, min-p, temperature.
Shapes, dtypes and limits of the operator are those of ``torch_npu/_op_plugin_docs.py`` in the
torch_npu wheel.

What a request gets does not depend on the other requests: where one of them has a k that the
operator ignores, its row is computed in PyTorch, and the others' by the operator.
"""

import functools
from typing import Any

import numpy as np
import torch
import torch_npu
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from ascend_platform.chips import chip

MAX_TOP_K = 1024
"""The operator ignores a larger k."""


@functools.cache
def has_operators() -> bool:
    """Whether this process's chip has the operators."""
    return chip().family.top_k_top_p


def sample(
    logits: torch.Tensor,
    k: torch.Tensor | None,
    p: torch.Tensor | None,
    noise: torch.Tensor,
    top_k: np.ndarray,
    has_seeds: bool,
    needs_logits: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sample one token for each row.

    vLLM's PyTorch implementation keeps all logits equal to the k-th largest; the operator keeps
    exactly k. It gives the first numbers of the noise to the largest logits where it has sorted
    them, so that rounding could exchange two tokens' numbers. With seeds it only masks.

    Args:
        logits: float32 ``[rows, vocab_size]``.
        k: int32 ``[rows]``, vocab_size for rows without top-k.
        p: float32 ``[rows]``, 1 for rows without top-p.
        noise: exponential noise ``[rows, vocab_size]``; float64 for vLLM's PyTorch implementation.
        top_k: ``k`` of the requests on the host.
        has_seeds: whether the noise of a row is that of a seed.

    Returns:
        Token ids int64 ``[rows]``, and the masked logits if ``needs_logits``.
    """
    by_operator, by_pytorch = _split(logits, k, top_k, noise.dtype)
    if by_operator and not (by_pytorch or has_seeds):
        tokens, masked = _operator(logits, k, p, q=noise, is_need_logits=needs_logits)
    else:
        masked = mask(logits, k, p, top_k, noise.dtype)
        tokens = (masked - noise.log()).argmax(-1)
    return tokens, masked if needs_logits else None


def mask(
    logits: torch.Tensor,
    k: torch.Tensor | None,
    p: torch.Tensor | None,
    top_k: np.ndarray,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Mask logits ``[rows, vocab_size]`` outside of top-k and top-p with minus infinity, perhaps in
    place; see :func:`sample`. With dtype float64 vLLM's PyTorch implementation does it."""
    if not len(logits) or (k is None and p is None):  # The operator needs a row.
        return logits
    by_operator, by_pytorch = _split(logits, k, top_k, dtype)
    if not by_pytorch:
        return _operator(logits, k, p, is_need_logits=True)[1]
    if not by_operator:
        return apply_top_k_top_p(logits, k, p)
    masked = _operator(logits, k, p, is_need_logits=True)[1]
    return torch.where(
        _is_wide(k, logits)[:, None], apply_top_k_top_p(logits.clone(), k, p), masked
    )


def _split(
    logits: torch.Tensor, k: torch.Tensor | None, top_k: np.ndarray, dtype: torch.dtype
) -> tuple[bool, bool]:
    """Whether the operator computes rows, and whether PyTorch does."""
    if not has_operators() or dtype == torch.float64:
        return False, True
    is_wide = _is_wide(top_k, logits)
    has_wide = k is not None and bool(is_wide.any())
    return not (has_wide and is_wide.all()), has_wide


def _is_wide(k: Any, logits: torch.Tensor) -> Any:
    """Which rows have a k that the operator ignores, bool ``[rows]``, on the host or the NPU as
    ``k`` is."""
    return (k > MAX_TOP_K) & (k < logits.shape[1])


def _operator(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, **options: Any
) -> Any:
    rows = logits.shape[0]
    if k is None:
        k = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    p = (
        torch.ones(rows, dtype=logits.dtype, device=logits.device)
        if p is None
        else p.to(logits.dtype)
    )
    return torch_npu.npu_top_k_top_p_sample(logits, k.int(), p, **options)
