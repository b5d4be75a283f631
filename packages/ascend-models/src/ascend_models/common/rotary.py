# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Rotary embedding of the last elements of a vector, in pairs of neighbours."""

import torch


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate the last elements of vectors, in float32.

    Args:
        x: ``[tokens, ..., size]``.
        cos_sin: float32 ``[tokens, 2 * pairs]``, the cosines and then the sines of each token.
        inverse: rotate back.

    Returns:
        A new tensor like x, whose last ``2 * pairs`` elements are rotated.
    """
    pairs = cos_sin.shape[-1] // 2
    cos, sin = cos_sin.view(len(cos_sin), *(1,) * (x.dim() - 2), -1).split(pairs, -1)
    first, second = x[..., -2 * pairs :].float().unflatten(-1, (pairs, 2)).unbind(-1)
    if inverse:
        sin = -sin
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return torch.cat((x[..., : -2 * pairs], turned.flatten(-2).to(x.dtype)), -1)
