# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Verification of draft tokens in the V2 runner: vLLM's Triton kernels
(``gpu/spec_decode/rejection_sampler*.py``) in PyTorch.

Nothing here synchronizes with the device, and no shape depends on which tokens are accepted.
``cu_num_logits`` is int32 ``[requests + 1]``; the logit after a request's draft token ``i`` is row
``cu_num_logits[request] + i + 1``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ascend_platform.kernels.ragged import request_of_token
from ascend_platform.runners.v2.kernels import gumbel, watermark
from ascend_platform.runners.v2.kernels.step import current_step
from ascend_platform.sampling import local_argmax, noise


def gather_draft_sampled(
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_indices: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    prefill_len: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input token and position of each logit; draft tokens that are placeholders, after a prompt,
    become -1."""
    tokens = input_ids.index_select(0, logits_indices)
    token_positions = positions.index_select(0, logits_indices)
    in_prefill = token_positions - expanded_local_pos < prefill_len.index_select(
        0, expanded_idx_mapping
    )
    return tokens.masked_fill(in_prefill & (expanded_local_pos > 0), -1), token_positions


def flatten_sampled(
    flat: torch.Tensor,
    sampled: torch.Tensor,
    sampled_stride: int,
    num_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    **_: Any,
) -> None:
    """Replaces ``_flatten_sampled_kernel``: write sampled tokens ``[requests, columns]`` to
    ``[logits]``, 0 for the others."""
    requests = request_of_token(cu_num_logits[1:], len(flat))
    positions = torch.arange(len(flat), device=flat.device) - cu_num_logits.index_select(
        0, requests
    )
    elements = torch.add(
        positions.clamp(max=sampled.shape[1] - 1), requests, alpha=sampled.shape[1]
    )
    tokens = sampled.contiguous().view(-1).index_select(0, elements)
    flat.copy_(torch.where(positions < num_sampled.index_select(0, requests), tokens, 0))


def rejection_sample(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_sampled: torch.Tensor,
    cu_num_logits: torch.Tensor,
    pos: torch.Tensor,
    idx_mapping: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    num_speculative_steps: int,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
    contexts: torch.Tensor | None = None,
    watermarking: torch.Tensor | None = None,
    watermarking_skip_mask: torch.Tensor | None = None,
    watermark_key: int | None = None,
    fly_window_size: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept draft tokens up to the first that is rejected, and sample one token more.

    A greedy request accepts what the target model would choose. Another accepts token x with
    probability min(1, p(x) / q(x)), and replaces a rejected one by a sample from max(p - q, 0);
    without ``draft_logits``, and with fixed rates of acceptance, q is 1 for the draft token. One
    with a seed accepts what the target samples by the noise of the position, as it would without
    drafts; the probability is p(x).

    Args:
        target_logits: ``[logits, vocab_size]``, with all sampling parameters applied.
        draft_logits: ``[states, steps, vocab_size]`` before temperature.
        draft_sampled: ``[logits]``, the first of each request no draft token; -1 is rejected.
        contexts: int64 ``[logits, context_width]`` with a key for watermarks, of the requests with
            ``watermarking``, except for the logits of the mask.

    Returns:
        Tokens int64 ``[requests, steps + 1]`` and how many are valid, int32 ``[requests]``.
    """
    assert not any((use_block_verification, fly_window_size)), "block verification or FLy"
    samples, odds = not current_step().is_greedy, None
    rows = _Rows(
        target_logits,
        draft_sampled.roll(-1).long(),
        local_argmax.argmax(target_logits),
        temperature.index_select(0, expanded_idx_mapping),
        expanded_idx_mapping,
        expanded_local_pos,
    )
    if synthetic_conditional_rates is not None:
        accepted = _accept_synthetic(rows, seed, pos, synthetic_conditional_rates)
    elif samples:
        odds = _Odds.of(rows, draft_logits)
        accepted = _accept_random(rows, seed, pos, odds)
    else:
        accepted = rows.is_best
    marks, is_seeded = None, None
    if contexts is not None and watermarking is not None and watermark_key is not None:
        marks = _Marks(watermark_key, contexts, watermarking, watermarking_skip_mask)
    if samples and synthetic_conditional_rates is None:
        is_seeded = _is_seeded(rows)
    if is_seeded is not None:
        hashes = noise.hash_seeds(seed).index_select(0, rows.states)
        own = noise.sample(rows.logits, hashes, pos)
        own = own if marks is None else marks.mark(own, rows.logits, rows.states)
        accepted = torch.where(is_seeded, rows.drafted == own, accepted)
    accepted = accepted & (rows.drafted >= 0)
    columns = torch.arange(num_speculative_steps + 1, device=target_logits.device)
    indices = (cu_num_logits[:-1, None] + columns).clamp(max=len(target_logits) - 1)
    num_drafts = torch.diff(cu_num_logits) - 1
    # The AI CPU would multiply integers.
    is_kept = (accepted[indices] & (columns < num_drafts[:, None])).float().cumprod(1).bool()
    num_accepted = is_kept.sum(1)
    last = (cu_num_logits[:-1] + num_accepted).long()
    tokens = rows.best.index_select(0, last)
    if samples:
        logits = _resampling_logits(rows, odds, last, num_accepted < num_drafts)
        drawn = _noise(logits, seed, idx_mapping, pos.index_select(0, last), use_fp64)
        others = (logits - drawn.log_()).argmax(-1)
        if marks is not None:
            others = marks.mark(others, logits, idx_mapping, last)
        if is_seeded is not None:
            others = torch.where(is_seeded[last], own[last], others)
        tokens = torch.where(rows.temperatures.index_select(0, last) == 0, tokens, others)
    sampled = torch.where(is_kept, rows.drafted[indices], tokens[:, None])
    return sampled * (columns <= num_accepted[:, None]), (num_accepted + 1).int()


class _Rows(NamedTuple):
    """Inputs of a verification for each of the target's logits.

    Attributes:
        logits: ``[rows, vocab_size]``.
        drafted: the draft token after the row.
        best: the most probable token.
        states: index of the request's state.
        numbers: number of the row in its request.
    """

    logits: torch.Tensor
    drafted: torch.Tensor
    best: torch.Tensor
    temperatures: torch.Tensor
    states: torch.Tensor
    numbers: torch.Tensor

    @property
    def is_best(self) -> torch.Tensor:
        return self.drafted == self.best


class _Marks(NamedTuple):
    """The marks of tokens with a watermark; see ``rejection_sample``.

    Attributes:
        skipped: which logits' contexts are repeated, bool ``[logits]``; None if that is not asked.
    """

    key: int
    contexts: torch.Tensor
    watermarking: torch.Tensor
    skipped: torch.Tensor | None

    def mark(
        self,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        states: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Replace the tokens, sampled from logits, that are to be marked; ``rows`` of them are in
        the attributes."""
        contexts, skipped = self.contexts, self.skipped
        if rows is not None:
            contexts = contexts.index_select(0, rows)
            skipped = None if skipped is None else skipped.index_select(0, rows)
        is_marked = self.watermarking.index_select(0, states)
        if skipped is not None:
            is_marked &= ~skipped
        return torch.where(is_marked, watermark.draw(self.key, logits, contexts), tokens)


def _is_seeded(rows: _Rows) -> torch.Tensor | None:
    """Which rows are of requests with a seed that are not greedy, bool ``[rows]``; None if none
    are."""
    step = current_step()
    if not step.has_seeds or step.seeds_set is None:
        return None
    return step.seeds_set.index_select(0, rows.states) & (rows.temperatures != 0)


class _Odds(NamedTuple):
    """log(p / q) of each row's draft token, and what normalizes the logits of p and q.

    Attributes:
        scores: the drafter's logits, of its own vocabulary; None where q is 1.
    """

    ratio: torch.Tensor
    target_lse: torch.Tensor
    scores: torch.Tensor | None
    draft_lse: torch.Tensor | None

    @classmethod
    def of(cls, rows: _Rows, draft_logits: torch.Tensor | None) -> _Odds:
        token, target_lse = rows.drafted.clamp(min=0)[:, None], rows.logits.logsumexp(-1)
        ratio = rows.logits.gather(-1, token)[:, 0] - target_lse
        if draft_logits is None:
            return cls(ratio, target_lse, None, None)
        scores = _draft_scores(draft_logits, rows.states, rows.numbers, rows.temperatures)
        draft_lse, width = scores.logsumexp(-1), scores.shape[-1]
        at_draft = scores.gather(-1, token.clamp(max=width - 1))
        of_draft = torch.where(token < width, at_draft, -torch.inf)[:, 0] - draft_lse
        return cls(ratio - of_draft, target_lse, scores, draft_lse)


def _waiting(rows: _Rows, seed: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """Exponential numbers ``[rows]`` that decide on acceptance: -log of uniform ones."""
    seeds = seed.index_select(0, rows.states)
    return noise.exponential(seeds, pos.long() + gumbel.ACCEPT_SALT, 1)[:, 0]


def _accept_random(rows: _Rows, seed: torch.Tensor, pos: torch.Tensor, odds: _Odds) -> torch.Tensor:
    """Accept draft tokens with probability p / q, of greedy requests those that are best."""
    accepted = odds.ratio > -_waiting(rows, seed, pos)
    return torch.where(rows.temperatures == 0, rows.is_best, accepted)


def _accept_synthetic(
    rows: _Rows, seed: torch.Tensor, pos: torch.Tensor, rates: torch.Tensor
) -> torch.Tensor:
    """Accept draft tokens with fixed probabilities ``[steps]``: all of them with probability 1."""
    steps = rows.numbers.clamp(max=len(rates) - 1)
    return rates.log().neg_().index_select(0, steps) < _waiting(rows, seed, pos)


def _resampling_logits(
    rows: _Rows, odds: _Odds | None, last: torch.Tensor, has_rejected: torch.Tensor
) -> torch.Tensor:
    """Logits ``[requests, vocab_size]`` of the token after the accepted ones, whose rows are
    ``last``: of max(p - q, 0) where a draft token is rejected."""
    logits, wrong = rows.logits.index_select(0, last), rows.drafted.index_select(0, last)
    is_rejected = (has_rejected & (wrong >= 0))[:, None]
    if odds is not None and odds.scores is not None and odds.draft_lse is not None:
        target = logits - odds.target_lse[last][:, None]
        draft = (odds.scores - odds.draft_lse[:, None])[last]
        return _residual(target, draft, logits, is_rejected)
    vocabulary = torch.arange(logits.shape[1], device=logits.device)
    return logits.masked_fill(is_rejected & (vocabulary == wrong[:, None]), -torch.inf)


def _draft_scores(
    draft_logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    temperatures: torch.Tensor,
) -> torch.Tensor:
    """The drafter's logits for the token after each logit, ``[logits, vocab_size]``, with
    temperature."""
    steps = draft_logits.shape[1]
    positions = torch.add(
        expanded_local_pos.clamp(max=steps - 1), expanded_idx_mapping, alpha=steps
    )
    scores = draft_logits.view(-1, draft_logits.shape[-1]).index_select(0, positions).float()
    return scores / torch.where(temperatures == 0, 1, temperatures)[:, None]


def _residual(
    target: torch.Tensor, draft: torch.Tensor, logits: torch.Tensor, is_rejected: torch.Tensor
) -> torch.Tensor:
    """Logarithm of max(p - q, 0) where a draft token is rejected, from log-probabilities; q is 0
    for tokens that the drafter does not have."""
    draft = draft[:, : target.shape[1]]
    if missing := target.shape[1] - draft.shape[1]:
        draft = torch.nn.functional.pad(draft, (0, missing), value=-torch.inf)
    # NaN where neither model has the token, which then has no residual.
    ratio = (draft - target).exp()
    rest = torch.where(ratio < 1, target + torch.log1p(-ratio), -torch.inf)
    return torch.where(is_rejected, rest, logits)


def _noise(
    logits: torch.Tensor,
    seed: torch.Tensor,
    idx_mapping: torch.Tensor,
    positions: torch.Tensor,
    use_fp64: bool,
) -> torch.Tensor:
    if not current_step().has_seeds:
        return noise.unseeded(logits, use_fp64)
    return noise.exponential(seed.index_select(0, idx_mapping), positions.long(), logits.shape[1])
