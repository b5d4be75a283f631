# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Manifold-constrained hyper-connections (mHC) in PyTorch, registered by ``CustomOp.register_oot``
on import.

CANN's npu_mhc_pre, npu_mhc_sinkhorn and npu_mhc_post are for Ascend 950 only.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
import torch_npu
from vllm.model_executor.layers.mhc import HCHeadOp, MHCFusedPostPreOp, MHCPostOp, MHCPreOp


@MHCPreOp.register_oot
class NPUMHCPre(MHCPreOp):
    """Collapse of the streams before a layer, and the weights of the expansion after it."""

    def forward_oot(
        self,
        residual: torch.Tensor,
        fn: torch.Tensor,
        hc_scale: torch.Tensor,
        hc_base: torch.Tensor,
        rms_eps: float,
        hc_pre_eps: float,
        hc_sinkhorn_eps: float,
        hc_post_mult_value: float,
        sinkhorn_repeat: int,
        n_splits: int = 1,
        norm_weight: torch.Tensor | None = None,
        norm_eps: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute in float32.

        Args:
            residual: the streams, ``[tokens, streams, hidden]``.
            fn: float32 ``[(2 + streams) * streams, streams * hidden]``.
            hc_scale: float32 ``[3]``.
            hc_base: float32 ``[(2 + streams) * streams]``.
            norm_weight: ``[hidden]``, of the layer's norm, or None.

        Returns:
            The weights of the layer's output ``[tokens, streams, 1]`` and of the streams ``[tokens,
            streams, streams]``, float32, and the layer's input ``[tokens, hidden]``.
        """
        streams = residual.shape[-2]
        mixes = mix(residual, fn, rms_eps)
        sizes = [streams, streams, streams * streams]
        pre, post, comb = mixes.split(sizes, -1)
        pre_base, post_base, comb_base = hc_base.split(sizes)
        pre = torch.sigmoid(pre * hc_scale[0] + pre_base) + hc_pre_eps
        post = torch.sigmoid(post * hc_scale[1] + post_base) * hc_post_mult_value
        logits = (comb * hc_scale[2] + comb_base).unflatten(-1, (streams, streams))
        comb = sinkhorn(logits.softmax(-1) + hc_sinkhorn_eps, sinkhorn_repeat, hc_sinkhorn_eps)
        layer_input = collapse(residual, pre)
        if norm_weight is not None:
            layer_input = torch_npu.npu_rms_norm(layer_input, norm_weight, norm_eps)[0]
        return post.unsqueeze(-1), comb, layer_input


@MHCPostOp.register_oot
class NPUMHCPost(MHCPostOp):
    """Expansion of a layer's output into the streams."""

    def forward_oot(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post_layer_mix: torch.Tensor,
        comb_res_mix: torch.Tensor,
    ) -> torch.Tensor:
        """Compute ``post * x + comb^T @ residual`` in float32; like residual, ``[tokens, streams,
        hidden]``."""
        own = post_layer_mix * x.float().unsqueeze(-2)
        return (own + comb_res_mix.transpose(-1, -2) @ residual.float()).to(residual.dtype)


@MHCFusedPostPreOp.register_oot
class NPUMHCFusedPostPre(MHCFusedPostPreOp):
    """Expansion of a layer's output, and the collapse before the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self._post, self._pre = MHCPostOp(), MHCPreOp()

    def forward_oot(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        post_layer_mix: torch.Tensor,
        comb_res_mix: torch.Tensor,
        *arguments: Any,
        tile_n: int = 1,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The expanded streams, and what :class:`NPUMHCPre` returns of them; the other arguments are
        those of that."""
        streams = self._post(x, residual, post_layer_mix, comb_res_mix)
        return streams, *self._pre(streams, *arguments, **named)


@HCHeadOp.register_oot
class NPUHCHead(HCHeadOp):
    """Collapse of the streams after the last layer."""

    def forward_oot(
        self,
        hidden_states: torch.Tensor,
        hc_fn: torch.Tensor,
        hc_scale: torch.Tensor,
        hc_base: torch.Tensor,
        rms_norm_eps: float,
        hc_eps: float,
    ) -> torch.Tensor:
        """Collapse ``[tokens, streams, hidden]`` to ``[tokens, hidden]``."""
        mixes = mix(hidden_states, hc_fn, rms_norm_eps)
        return collapse(hidden_states, torch.sigmoid(mixes * hc_scale + hc_base) + hc_eps)


def mix(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """The projections of a token's normalized streams, float32 ``[tokens, rows of fn]``."""
    flat = streams.flatten(-2).float()
    return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of the streams, ``[tokens, hidden]``; weights float32 ``[tokens, streams]``."""
    return (weights.unsqueeze(-2) @ streams.float()).squeeze(-2).to(streams.dtype)


def sinkhorn(matrices: torch.Tensor, steps: int, eps: float) -> torch.Tensor:
    """Divide matrices by the sums of their columns and rows in turn, beginning and ending with
    columns.

    The sums of all elements' columns, or rows, are one matmul with a constant matrix.

    Args:
        matrices: float32 ``[tokens, n, n]``.
        steps: number of divisions by the sums of columns.
        eps: added to the sums.
    """
    size = matrices.shape[-1]
    of_columns, of_rows, added = _sums(size, eps, matrices.device)
    flat = matrices.flatten(-2)
    flat = flat / torch.addmm(added, flat, of_columns)
    for _ in range(steps - 1):
        flat = flat / torch.addmm(added, flat, of_rows)
        flat = flat / torch.addmm(added, flat, of_columns)
    return flat.unflatten(-1, (size, size))


@functools.cache
def _sums(
    size: int, eps: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Matrices ``[n * n, n * n]`` that replace each element of a flattened matrix by the sum of its
    column, or of its row; and eps ``[n * n]``."""
    one, ones = torch.eye(size), torch.ones(size, size)
    on_host = torch.kron(ones, one), torch.kron(one, ones), torch.full((size * size,), eps)
    columns, rows, added = (each.to(device) for each in on_host)
    return columns, rows, added
