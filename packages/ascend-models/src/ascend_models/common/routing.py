# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Routing by ``sqrt(softplus(logits))``: to the experts with the largest scores, or to those that a
table has for the token (hash routing)."""

import torch
import torch.nn.functional as F


def topk_softplus_sqrt(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
    e_score_correction_bias: torch.Tensor | None = None,
    input_tokens: torch.Tensor | None = None,
    hash_indices_table: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
    bias_vl: torch.Tensor | None = None,
    image_sentinel_lo: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select experts; returns new weights, float32, and ids ``[tokens, k]``.

    Args:
        topk_weights: vLLM's buffer for the weights; not used.
        topk_indices: vLLM's buffer for the experts, of k columns.
        token_expert_indices: vLLM's buffer for the rows of experts; not used.
        gating_output: ``[tokens, experts]``.
        renormalize: scale the weights of a token to a sum of 1, before ``routed_scaling_factor``.
        e_score_correction_bias: ``[experts]``, added for the selection only.
        input_tokens: ``[tokens]``, by which the table is read.
        hash_indices_table: ``[vocabulary, k]``, the experts of each token, or None.

    Raises:
        NotImplementedError: a bias for the tokens of images.
    """
    if bias_vl is not None:
        raise NotImplementedError("a router's bias for the tokens of images is not supported")
    scores = F.softplus(gating_output.float()).sqrt()
    if hash_indices_table is not None:
        assert input_tokens is not None
        ids = hash_indices_table[input_tokens.long()]
    else:
        biased = scores if e_score_correction_bias is None else scores + e_score_correction_bias
        ids = biased.topk(topk_indices.shape[1]).indices
    weights = scores.gather(1, ids.long())
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * routed_scaling_factor, ids.to(topk_indices.dtype)
