# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Min-p, log-probabilities and counts of NaN of the V2 runner: vLLM's Triton kernels
(``gpu/sample/``, ``gpu/metrics``) in PyTorch.

Nothing here synchronizes with the device. ``rows`` are rows of logits, several for a request with
draft tokens; ``expanded_idx_mapping`` has the request's index for each.
"""

import torch
from vllm.utils.math_utils import next_power_of_2


def apply_min_p(
    logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, min_p: torch.Tensor
) -> None:
    """Mask tokens that are less probable than min-p times the most probable one, in place."""
    threshold = logits.amax(-1) + min_p.index_select(0, expanded_idx_mapping).log()
    logits.masked_fill_(logits < threshold[:, None], -torch.inf)


def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of these tokens, float32 ``[rows, tokens]``, from logits ``[rows,
    vocab_size]``."""
    logits = logits.float()
    return logits.gather(-1, token_ids.long()).sub_(logits.logsumexp(-1, keepdim=True))


def get_num_nans(logits: torch.Tensor) -> torch.Tensor:
    """How many logits of each row are no numbers, int32 ``[rows]``."""
    return logits.isnan().sum(-1, dtype=torch.int32)


def rank_tokens(
    ranks: torch.Tensor,
    logits: torch.Tensor,
    stride: int,
    token_ids: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> None:
    """Replaces ``_ranks_kernel``: how many logits are not below that of the token, int64
    ``[rows]``, written."""
    chosen = logits.gather(-1, token_ids.long().view(-1, 1))
    torch.sum(logits >= chosen, -1, out=ranks)


def fill_logprob_token_ids(
    token_ids: torch.Tensor,
    token_ids_stride: int,
    valid_mask: torch.Tensor,
    valid_mask_stride: int,
    sampled: torch.Tensor,
    top: torch.Tensor,
    top_stride: int,
    expanded_idx_mapping: torch.Tensor,
    num_requested: torch.Tensor,
    requested: torch.Tensor,
    requested_stride: int,
    NUM_TOPK: int,
    PADDED_COLS: int,
) -> None:
    """Replaces ``_fill_logprob_token_ids_kernel``: the sampled token, then those that the request
    names, or the most probable.

    ``token_ids`` int64 and ``valid_mask`` bool are ``[rows, 1 + columns]``, written.
    """
    width = token_ids.shape[1] - 1
    count = num_requested.index_select(0, expanded_idx_mapping)[:, None]
    columns = torch.arange(width, device=token_ids.device)
    named = _of_width(requested.index_select(0, expanded_idx_mapping), width)
    others = _of_width(top[:, :NUM_TOPK], width) if NUM_TOPK else torch.zeros_like(named)
    valid = columns < torch.where(count > 0, count, NUM_TOPK)
    token_ids[:, 0] = sampled
    token_ids[:, 1:] = torch.where(valid, torch.where(count > 0, named, others), 0)
    valid_mask[:, 0] = True
    valid_mask[:, 1:] = valid


def _of_width(token_ids: torch.Tensor, width: int) -> torch.Tensor:
    """The first ``width`` columns, int64, with zeros where there are fewer."""
    token_ids = token_ids[:, :width].long()
    return torch.nn.functional.pad(token_ids, (0, width - token_ids.shape[1]))


OF_PLACEHOLDER = {"next_power_of_2": staticmethod(next_power_of_2)}
"""Attributes of vLLM's placeholder of Triton."""
