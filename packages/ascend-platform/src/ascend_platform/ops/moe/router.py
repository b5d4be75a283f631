# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Routers of MoE layers on CANN's operators: top-k of scores, expert groups, load balancing, and
identities among the experts.

Functions of vLLM's routers (``vllm/model_executor/layers/fused_moe/router``) that call CUDA or
Triton operators are replaced. Shapes, dtypes and limits of the NPU operators are those of
``torch_npu/_op_plugin_docs.py`` in the torch_npu wheel.
"""

import functools
from typing import Any

import torch
import torch_npu
from vllm.model_executor.layers.fused_moe.router import fused_topk_bias_router, grouped_topk_router

SOFTMAX, SIGMOID = 0, 1  # norm_type of npu_moe_gating_top_k
MAX_SCORE, TOP2_SUM = 0, 1  # its group_select_mode


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the top-k experts by softmax; returns new weights and ids ``[tokens, k]``, weights in
    float32, or with ``renormalize`` in the dtype of the logits.

    Args:
        topk_weights: vLLM's buffer for the weights; not used.
        topk_indices: vLLM's buffer for the experts; not used.
        token_expert_indices: vLLM's buffer for the rows of experts; not used.
        gating_output: ``[tokens, experts]`` of float32, float16 or bfloat16.
        renormalize: scale the weights of a token to a sum of 1.
        e_score_correction_bias: ``[experts]``, added for the selection only.
    """
    if e_score_correction_bias is None:
        # Renormalized, the softmax is that of the selected logits: their dtype does not change the
        # selection, and transformers rounds the weights to it, too.
        logits = gating_output if renormalize else gating_output.float()
        weights, ids, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(
            logits, k=topk_indices.shape[1], renorm=int(renormalize)
        )
    else:
        weights, ids = gating_top_k(
            gating_output, topk_indices.shape[1], SOFTMAX, renormalize, e_score_correction_bias
        )
    return weights, ids.to(topk_indices.dtype)


def topk_sigmoid(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`topk_softmax` with sigmoid scores; the weights are multiplied by
    ``routed_scaling_factor``."""
    k, bias = topk_indices.shape[1], e_score_correction_bias
    weights, ids = gating_top_k(gating_output, k, SIGMOID, renormalize, bias, routed_scaling_factor)
    return weights, ids.to(topk_indices.dtype)


def gating_top_k(
    logits: torch.Tensor,
    k: int,
    norm: int,
    renormalize: bool,
    bias: torch.Tensor | None = None,
    factor: float = 1.0,
    groups: int = 1,
    topk_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the top-k experts of each token with npu_moe_gating_top_k.

    Args:
        logits: ``[tokens, experts]``.
        norm: SOFTMAX or SIGMOID, over a token's logits.
        renormalize: scale the weights of a token to a sum of 1, before ``factor``.
        bias: ``[experts]``, added for the selection only.
        groups: number of expert groups; experts are selected from the best ``topk_groups`` of them.
            A group's score is that of its best expert, or with a bias the sum of its best two.

    Returns:
        Weights float32 and ids int32, both ``[tokens, k]``.
    """
    select = MAX_SCORE if bias is None else TOP2_SUM
    # The operator renormalizes sigmoid scores and never softmax scores; the other two cases are
    # computed here.
    in_operator = renormalize == (norm == SIGMOID)
    weights, ids, scores = torch_npu.npu_moe_gating_top_k(
        logits.float(),
        k,
        bias=None if bias is None else bias.float(),
        k_group=topk_groups,
        group_count=groups,
        group_select_mode=select,
        renorm=0,
        norm_type=norm,
        out_flag=not in_operator and norm == SIGMOID,
        routed_scaling_factor=factor if in_operator else 1.0,
    )
    if in_operator:
        return weights, ids
    if renormalize:
        return weights * (factor / weights.sum(-1, keepdim=True)), ids
    return scores.gather(1, ids.long()) * factor, ids


_native_grouped_topk = grouped_topk_router.grouped_topk


@functools.wraps(_native_grouped_topk)
def grouped_topk(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 0,
    topk_group: int = 0,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's grouped_topk as one operator; groups of one or two experts fall back to vLLM's
    implementation."""
    experts = gating_output.shape[-1]
    bias, factor = e_score_correction_bias, routed_scaling_factor
    if scoring_func not in ("softmax", "sigmoid") or (
        num_expert_group > 1 and experts // num_expert_group <= 2
    ):
        groups = (num_expert_group, topk_group, scoring_func, factor, bias)
        return _native_grouped_topk(hidden_states, gating_output, topk, renormalize, *groups)
    norm = SIGMOID if scoring_func == "sigmoid" else SOFTMAX
    return gating_top_k(
        gating_output, topk, norm, renormalize, bias, factor, num_expert_group, topk_group
    )


def eplb_map_to_physical(
    topk_ids: torch.Tensor,
    expert_load_view: torch.Tensor,
    logical_to_physical_map: torch.Tensor,
    logical_replica_count: torch.Tensor,
    record_enabled: torch.Tensor,
    num_unpadded_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Map logical expert ids to physical ones for EPLB, with replicas in round-robin order;
    ``[tokens, k]`` as ``topk_ids``.

    Args:
        expert_load_view: ``[physical experts]``, token counts; updated if ``record_enabled``, a
            scalar bool, is True.
        logical_to_physical_map: ``[experts, max replicas]``; expert i has
            ``logical_replica_count[i]`` replicas.
        num_unpadded_tokens: scalar; later tokens are padding and not counted. Without it all tokens
            are counted.
    """
    ids = topk_ids.long()
    token = torch.arange(len(ids), device=ids.device).unsqueeze(1)
    physical = logical_to_physical_map[ids, token % logical_replica_count[ids]]
    counts = record_enabled
    if num_unpadded_tokens is not None:
        counts = counts & (token < num_unpadded_tokens)
    counts = counts.expand_as(physical).flatten().to(expert_load_view.dtype)
    expert_load_view.scatter_add_(0, physical.flatten(), counts)
    return physical.to(topk_ids.dtype)


def route_with_identities(
    self: Any,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    indices_type: torch.dtype | None,
    *,
    input_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select among experts and, with ids after theirs, identities (LongCat), whose share of the
    output the router keeps.

    An identity becomes an expert that the token has not chosen, with a weight of 0:
    npu_moe_distribute_dispatch takes none twice. Weights are float32, weights and ids ``[tokens,
    k]``.
    """
    weights, ids = fused_topk_bias_router.fused_topk_bias(
        hidden_states=hidden_states,
        gating_output=router_logits,
        e_score_correction_bias=self.e_score_correction_bias.data,
        topk=self.top_k,
        renormalize=self.renormalize,
        scoring_func=self.scoring_func,
        indices_type=indices_type,
    )
    weights, identities = weights * self.routed_scaling_factor, ids >= self.num_logical_experts
    kept = weights.masked_fill(identities, 0)
    self._zero_expert_output = (hidden_states * (weights - kept).sum(-1, keepdim=True)).to(
        hidden_states.dtype
    )
    return kept, torch.where(identities, _unchosen(ids, identities), ids)


def _unchosen(ids: torch.Tensor, is_free: torch.Tensor) -> torch.Tensor:
    """Distinct experts that a token has not selected, lowest first, for its free top-k slots,
    ``[tokens, k]``.

    Among numbers from 0 on, the one after ``n`` others that are not chosen is ``n`` plus the chosen
    ones before it.
    """
    # The AI CPU would add and sort integers.
    others = is_free.float().cumsum(-1) - 1
    chosen = ids.float().masked_fill(is_free, torch.inf).sort(-1).values
    before = chosen - torch.arange(ids.shape[-1], dtype=chosen.dtype, device=ids.device)
    return (others + (before[:, None, :] <= others[:, :, None]).sum(-1)).to(ids.dtype)
