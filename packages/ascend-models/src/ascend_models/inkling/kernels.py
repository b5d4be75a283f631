# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Functions of Inkling that launch Triton kernels in vLLM, by PyTorch and CANN's operators."""

import torch
import torch.nn.functional as F
import torch_npu
from ascend_platform import extension

torch_on_npu = extension.torch_on_npu()
"""``torch`` whose events are those of NPUs."""


def initialize_lamport(hidden: int, kernel_size: int, max_tokens: int) -> None:
    """Reserve nothing: the layers then reduce and gather by vLLM's collectives."""


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize rows ``[..., size]`` by their root mean square."""
    return torch_npu.npu_rms_norm(x, weight, eps)[0]


def add_rmsnorm(
    residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of a sum, and the sum, ``[tokens, size]``."""
    normed, _, total = torch_npu.npu_add_rms_norm(residual, delta, weight, eps)
    return normed, total


def embed_rmsnorm(
    input_ids: torch.Tensor,
    embed_table: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    chain_weight: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of tokens, normalized with ``weight``; with ``chain_weight`` also their norm."""
    rows = F.embedding(input_ids, embed_table)
    if weight is not None:
        rows = rmsnorm(rows, weight, eps)
    return rows if chain_weight is None else (rows, rmsnorm(rows, chain_weight, eps))


def silu_and_mul(gateup_output: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of columns that alternate, ``[tokens, 2 * n]``."""
    gate, up = gateup_output.view(len(gateup_output), -1, 2).unbind(-1)
    return (F.silu(gate.float()) * up.float()).to(gateup_output.dtype)


def sink_silu_mul(
    raw: torch.Tensor,
    alphas: torch.Tensor,
    gammas: torch.Tensor,
    ratios: torch.Tensor,
    n_experts: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """SwiGLU of the shared experts, times their weights.

    Args:
        raw: ``[tokens, n_experts * 2 * n]``, gate and up alternating.
        alphas: float32 ``[n_experts]``, factors of ``raw``.
        gammas: float32 ``[tokens, n_experts]``.
        ratios: float32 ``[n_experts]``, factors of the result.
        n_experts: shared experts.
        out_dtype: of the result, ``[tokens, n_experts * n]``.
    """
    scaled = raw.view(len(raw), n_experts, -1, 2).float() * alphas.view(-1, 1, 1)
    gate, up = scaled.unbind(-1)
    weights = (gammas * ratios).unsqueeze(-1)
    return (F.silu(gate) * up * weights).to(out_dtype).flatten(1)


def linear_in_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` in float32."""
    return F.linear(x.float(), weight.float())


def select_experts(
    logits: torch.Tensor,
    n_gate_experts: int,
    n_routed_experts: int,
    topk: int,
    n_shared_experts: int,
    bias: torch.Tensor | None,
    route_scale: float,
    global_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select routed experts, and weigh them and the shared ones.

    Args:
        logits: float32 ``[tokens, at least n_gate_experts]``, routed experts first.
        n_gate_experts: routed and shared experts.
        n_routed_experts: routed experts.
        topk: experts to select.
        n_shared_experts: shared experts.
        bias: float32 ``[n_routed_experts]``, added to the scores for the selection only.
        route_scale: factor of the weights.
        global_scale: float32 ``[1]``, another.

    Returns:
        Weights, float32, and ids, int32, ``[tokens, topk + n_shared_experts]``, the shared experts
        last.
    """
    routed = logits[:, :n_routed_experts]
    scores = routed.sigmoid()
    ids = (scores if bias is None else scores + bias).topk(topk).indices
    shared = torch.arange(n_routed_experts, n_gate_experts, device=ids.device)
    ids = torch.cat((ids, shared.expand(len(ids), -1)), -1)
    weights = F.logsigmoid(logits.gather(1, ids)).softmax(-1) * route_scale
    if global_scale is not None:
        weights = weights * global_scale
    return weights, ids.int()
