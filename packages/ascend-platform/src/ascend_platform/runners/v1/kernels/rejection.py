# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""PyTorch implementations of the Triton kernels of vLLM's rejection sampler.

The functions take the kernels' arguments in the kernels' order
(``vllm/triton_utils/dispatcher.py``), with the meaning of ``vllm/v1/sample/rejection_sampler.py``.
They compute a whole batch at once, without synchronizing with the device, and no shape depends on
which tokens are accepted. ``cu_num_draft_tokens`` is int32 ``[requests]``, the cumulative number of
draft tokens; tensors of shape ``[tokens]`` hold the draft tokens of all requests one after another.
"""

from typing import Any

import torch

from ascend_platform.kernels.ragged import request_of_token


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    max_num_tokens: int,
) -> None:
    """Expand one value per request to ``[tokens]``, with ``replace_from`` replaced by
    ``replace_to``."""
    values = torch.where(values == replace_from, replace_to, values).to(output.dtype)
    torch.index_select(values, 0, request_of_token(cu_num_tokens, output.shape[0]), out=output)


def write_accepted(
    output: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    tokens: torch.Tensor,
    accepted: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """Write each request's tokens up to and including the first rejected one, and the bonus token
    if none is rejected.

    Args:
        output: int32 ``[requests, max_spec_len + 1]``; only rows where ``rows`` bool ``[requests]``
            is True are written, or all.
        tokens: ``[tokens]``, the token to emit at each draft position.
        accepted: ``[tokens]``, whether the draft was accepted.
        bonus_token_ids: int64 ``[requests, 1]``.
    """
    if not tokens.shape[0]:  # no request has draft tokens
        tokens, accepted = cu_num_draft_tokens.new_zeros(1), cu_num_draft_tokens.new_ones(1).bool()
    counts = torch.diff(cu_num_draft_tokens, prepend=cu_num_draft_tokens.new_zeros(1)).unsqueeze(1)
    positions = torch.arange(output.shape[1], dtype=cu_num_draft_tokens.dtype, device=output.device)
    index = (cu_num_draft_tokens.unsqueeze(1) - counts + positions).clamp_max(tokens.shape[0] - 1)
    rejected = (~accepted).float()[index]  # Sums of integers are computed on the AI CPU.
    # no rejection before this position
    write = (positions <= counts) & (rejected.cumsum(1) == rejected)
    if rows is not None:
        write &= rows.unsqueeze(1)
    values = torch.where(
        positions < counts,
        tokens.to(output.dtype)[index],
        bonus_token_ids.view(-1, 1).to(output.dtype),
    )
    output.copy_(torch.where(write, values, output))


def rejection_greedy_sample(
    output: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    max_spec_len: int,
    uniform_probs: torch.Tensor | None,
    synthetic_conditional_rates: torch.Tensor | None,
    synthetic_mode: bool,
) -> None:
    """Emit the target's argmax tokens of greedy requests, up to the first that differs from the
    draft.

    Args:
        draft_token_ids: ``[tokens]``; -1 is rejected.
        target_argmax: ``[tokens]``.
        uniform_probs: ``[tokens]``.
        is_greedy: bool ``[requests]``; None if all requests are greedy.
        synthetic_conditional_rates: float32 ``[max_spec_len]``, acceptance probabilities by draft
            position in synthetic mode.
    """
    tokens = target_argmax
    if synthetic_mode:
        accepted = _accept_synthetic(
            cu_num_draft_tokens, draft_token_ids, uniform_probs, synthetic_conditional_rates
        )
        tokens = torch.where(accepted, draft_token_ids.to(tokens.dtype), tokens)
    else:
        accepted = draft_token_ids == tokens
    write_accepted(output, cu_num_draft_tokens, tokens, accepted, bonus_token_ids, is_greedy)


def _accept_synthetic(
    cu_num_draft_tokens: torch.Tensor, draft_token_ids: torch.Tensor, uniform_probs: Any, rates: Any
) -> torch.Tensor:
    count = draft_token_ids.shape[0]
    first = torch.nn.functional.pad(cu_num_draft_tokens, (1, -1))
    position = (
        torch.arange(count, device=draft_token_ids.device)
        - first[request_of_token(cu_num_draft_tokens, count)]
    )
    return (uniform_probs < rates[position]) & (draft_token_ids >= 0)


def rejection_random_sample(
    output: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    recovered_token_ids: torch.Tensor,
    uniform_probs: torch.Tensor,
    is_greedy: torch.Tensor,
    max_spec_len: int,
    vocab_size: int,
    synthetic_conditional_rates: torch.Tensor | None,
    no_draft_probs: bool,
    synthetic_mode: bool,
) -> None:
    """Accept a draft token with probability ``target / draft``; emit the recovered token in place
    of the first rejected one.

    Args:
        draft_probs: float32 ``[tokens, vocab_size]``, or None: the draft's probability is 1.
        target_probs: float32 ``[tokens, vocab_size]``.
        recovered_token_ids: ``[tokens]``, from :func:`sample_recovered_tokens`.
        uniform_probs: float64 ``[tokens]`` in [0, 1).
    """
    if synthetic_mode:
        accepted = _accept_synthetic(
            cu_num_draft_tokens, draft_token_ids, uniform_probs, synthetic_conditional_rates
        )
    else:
        column = draft_token_ids.long().clamp_min(0).unsqueeze(1)
        bound = uniform_probs
        accepted = draft_token_ids >= 0
        if draft_probs is not None:
            draft = draft_probs.gather(1, column).squeeze(1)
            bound = uniform_probs * draft
            accepted &= draft > 0
        accepted &= target_probs.gather(1, column).squeeze(1) >= bound
    tokens = torch.where(accepted, draft_token_ids, recovered_token_ids.to(draft_token_ids.dtype))
    write_accepted(output, cu_num_draft_tokens, tokens, accepted, bonus_token_ids, ~is_greedy)


def sample_recovered_tokens(
    output: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inv_q: torch.Tensor,
    vocab_size: int,
    block_size: int,
    no_draft_probs: bool,
    use_fp64_gumbel: bool,
) -> None:
    """Sample from ``max(target - draft, 0)`` at each draft position, by the largest ratio to
    exponential noise.

    Args:
        output: ``[tokens]``, written.
        draft_probs: float32 ``[tokens, vocab_size]``; without it the draft token had probability 1.
        inv_q: ``[requests, vocab_size]``, reciprocals of exponentially distributed numbers.
    """
    scores = inv_q[request_of_token(cu_num_draft_tokens, draft_token_ids.shape[0])]
    if draft_probs is not None:
        scores *= (target_probs - draft_probs).clamp_min_(0)
    else:
        scores *= target_probs
        column = draft_token_ids.long().view(-1, 1)
        # A draft token id of -1 is padding.
        kept = scores.gather(1, column.clamp_min(0)).masked_fill_(column >= 0, 0)
        scores.scatter_(1, column.clamp_min(0), kept)
    output.copy_(scores.argmax(-1).view_as(output))
