"""PyTorch implementations of the Triton kernels of vLLM's rejection sampler.

They take the kernels' own arguments in the kernels' order (``vllm/triton_utils/dispatcher.py``), whose meaning is that of
``vllm/v1/sample/rejection_sampler.py``. A whole batch is computed at once: nothing is read back to the host, and no shape
depends on what has been accepted. ``cu_drafts`` is int32 ``[requests]``, the running sum of how many draft tokens each request
has; the tokens of all requests are concatenated.
"""

from typing import Any

import torch


def owners(cu_tokens: torch.Tensor, tokens: int) -> torch.Tensor:
    """The request of each token, int64 ``[tokens]``."""
    return torch.bucketize(torch.arange(tokens, dtype=cu_tokens.dtype, device=cu_tokens.device), cu_tokens, right=True)


def expand(
    output: torch.Tensor, values: torch.Tensor, cu_tokens: torch.Tensor, replace_from: float, replace_to: float, most: int
) -> None:
    """Write each request's value, ``replace_to`` where it is ``replace_from``, once for each of its tokens: ``[tokens]``."""
    values = torch.where(values == replace_from, replace_to, values).to(output.dtype)
    torch.index_select(values, 0, owners(cu_tokens, output.shape[0]), out=output)


def _write(
    output: torch.Tensor,
    cu_drafts: torch.Tensor,
    tokens: torch.Tensor,
    accepted: torch.Tensor,
    bonus: torch.Tensor,
    rows: torch.Tensor | None,
) -> None:
    """Write the tokens of each request up to the first that is not accepted, which still counts, and the bonus if all are.

    Args:
        output: int32 ``[requests, longest + 1]``, written where ``rows`` ``[requests]`` (all without) is true.
        tokens, accepted: ``[drafts]``, what each place gives, and whether the next one counts.
        bonus: int64 ``[requests, 1]``.
    """
    if not tokens.shape[0]:  # no request has drafts
        tokens, accepted = cu_drafts.new_zeros(1), cu_drafts.new_ones(1).bool()
    counts = torch.diff(cu_drafts, prepend=cu_drafts.new_zeros(1)).unsqueeze(1)
    places = torch.arange(output.shape[1], dtype=cu_drafts.dtype, device=output.device)
    index = (cu_drafts.unsqueeze(1) - counts + places).clamp_max(tokens.shape[0] - 1)
    rejected = (~accepted).int()[index]
    write = (places <= counts) & (rejected.cumsum(1) == rejected)  # none is rejected before this place
    if rows is not None:
        write &= rows.unsqueeze(1)
    values = torch.where(places < counts, tokens.to(output.dtype)[index], bonus.view(-1, 1).to(output.dtype))
    output.copy_(torch.where(write, values, output))


def rejection_greedy(
    output: torch.Tensor,
    cu_drafts: torch.Tensor,
    drafts: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus: torch.Tensor,
    is_greedy: torch.Tensor | None,
    longest: int,
    uniform: torch.Tensor | None,
    synthetic_rates: torch.Tensor | None,
    synthetic: bool,
) -> None:
    """The target's choice at each place of a greedy request, for as long as the drafts are the same.

    Args:
        drafts, target_argmax, uniform: ``[drafts]``; a draft of -1 is rejected.
        is_greedy: bool ``[requests]``; None if all are.
        synthetic_rates: float32 ``[longest]``: with ``synthetic``, drafts are accepted with these probabilities instead.
    """
    tokens = target_argmax
    if synthetic:
        accepted = _synthetic(cu_drafts, drafts, uniform, synthetic_rates)
        tokens = torch.where(accepted, drafts.to(tokens.dtype), tokens)
    else:
        accepted = drafts == tokens
    _write(output, cu_drafts, tokens, accepted, bonus, is_greedy)


def _synthetic(cu_drafts: torch.Tensor, drafts: torch.Tensor, uniform: Any, rates: Any) -> torch.Tensor:
    count = drafts.shape[0]
    first = torch.nn.functional.pad(cu_drafts, (1, -1))
    place = torch.arange(count, device=drafts.device) - first[owners(cu_drafts, count)]
    return (uniform < rates[place]) & (drafts >= 0)


def rejection_random(
    output: torch.Tensor,
    cu_drafts: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    bonus: torch.Tensor,
    recovered: torch.Tensor,
    uniform: torch.Tensor,
    is_greedy: torch.Tensor,
    longest: int,
    vocabulary: int,
    synthetic_rates: torch.Tensor | None,
    no_draft_probs: bool,
    synthetic: bool,
) -> None:
    """A draft of a sampling request is accepted with probability ``target / draft``; in place of the first that is not, the
    recovered token.

    Args:
        draft_probs, target_probs: float32 ``[drafts, vocabulary]``; without the former a draft was certain.
        recovered: ``[drafts]``, drawn from what the target has more than the draft (:func:`sample_recovered`).
        uniform: float64 ``[drafts]`` in [0, 1).
    """
    if synthetic:
        accepted = _synthetic(cu_drafts, drafts, uniform, synthetic_rates)
    else:
        column = drafts.long().clamp_min(0).unsqueeze(1)
        bound = uniform
        accepted = drafts >= 0
        if draft_probs is not None:
            draft = draft_probs.gather(1, column).squeeze(1)
            bound = uniform * draft
            accepted &= draft > 0
        accepted &= target_probs.gather(1, column).squeeze(1) >= bound
    tokens = torch.where(accepted, drafts, recovered.to(drafts.dtype))
    _write(output, cu_drafts, tokens, accepted, bonus, ~is_greedy)


def sample_recovered(
    output: torch.Tensor,
    cu_drafts: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inverse_noise: torch.Tensor,
    vocabulary: int,
    block: int,
    no_draft_probs: bool,
    fp64: bool,
) -> None:
    """Draw for each draft from ``max(target - draft, 0)``, by the largest of its ratios to exponential noise.

    Args:
        output: ``[drafts]``, written.
        draft_probs: float32 ``[drafts, vocabulary]``; without, a draft had all the probability.
        inverse_noise: ``[requests, vocabulary]``, one over exponentially distributed numbers.
    """
    scores = inverse_noise[owners(cu_drafts, drafts.shape[0])]
    if draft_probs is not None:
        scores *= (target_probs - draft_probs).clamp_min_(0)
    else:
        scores *= target_probs
        column = drafts.long().view(-1, 1)
        kept = scores.gather(1, column.clamp_min(0)).masked_fill_(column >= 0, 0)  # a draft of -1 was no token
        scores.scatter_(1, column.clamp_min(0), kept)
    output.copy_(scores.argmax(-1).view_as(output))


_PREFIX = "vllm.v1.sample.rejection_sampler:"
OVERRIDES = {
    _PREFIX + "expand_kernel": expand,
    _PREFIX + "rejection_greedy_sample_kernel": rejection_greedy,
    _PREFIX + "rejection_random_sample_kernel": rejection_random,
    _PREFIX + "sample_recovered_tokens_kernel": sample_recovered,
}
"""vLLM's kernels, as in ``vllm_overrides.OVERRIDES``, and the functions that take their arguments."""
