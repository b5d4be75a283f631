"""PyTorch in place of the Triton kernels of vLLM's drafters and of its rejection sampler.

They are called with the kernels' own arguments in the kernels' order (``vllm/triton_utils/dispatcher.py``), whose meaning is that
of ``vllm/v1/sample/rejection_sampler.py`` and ``vllm/v1/spec_decode/utils.py``. All of a batch is computed at once: nothing is
read back, and no shape depends on what has been accepted. ``cu_drafts`` is int32 ``[requests]``, the running sum of how many
draft tokens each request has; the tokens of all requests stand one after another.
"""

import functools
from typing import Any

import torch

from ascend_platform.triton_overrides import slot_mapping

# Rejection sampling


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


# Drafters


def step(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    stride: int,
    seq_lens: torch.Tensor,
    out_positions: torch.Tensor,
    out_slots: torch.Tensor,
    block_size: int,
    max_model_len: int,
    blocks: int,
    pad: int,
    requests: int | None = None,
) -> None:
    """Go on by one token: write each request's next position and slot, and add the token to its length, in place.

    Args:
        positions, out_positions: int64 ``[requests]``; a position past ``max_model_len`` becomes 0, with slot ``pad``.
        block_table: int32 ``[requests, blocks]``.
        seq_lens: int32 ``[requests]``.
        out_slots: int64, ``pad`` behind the requests.
    """
    count = positions.shape[0]
    following = positions + 1
    past = following >= max_model_len
    following = following.masked_fill(past, 0)
    block = (following // block_size).clamp_max(blocks - 1)
    slots = block_table[:count].gather(1, block.unsqueeze(1)).squeeze(1) * block_size + following % block_size
    out_slots[count:] = pad
    out_slots[:count] = slots.masked_fill(past, pad)
    seq_lens[:count] = torch.where(past, 1, seq_lens[:count] + 1).clamp_max(max_model_len)
    out_positions[:count] = following


def prepare_inputs(
    cu_drafts: torch.Tensor,
    valid_counts: torch.Tensor,
    query_start_loc: torch.Tensor,
    out_last: torch.Tensor,
    out_rejected: torch.Tensor,
    requests: int,
) -> None:
    """Write for each request how many drafts were rejected, and the place of its last token that was not: ``[requests]``."""
    counts = torch.diff(cu_drafts, prepend=cu_drafts.new_zeros(1))
    rejected = torch.where(counts > 0, counts + 1 - valid_counts, 0)
    out_rejected.copy_(rejected)
    out_last.copy_(query_start_loc[1 : requests + 1] - 1 - rejected)


def prepare_next_tokens(
    sampled: torch.Tensor,
    discarded: torch.Tensor,
    backup: torch.Tensor,
    out_next: torch.Tensor,
    out_counts: torch.Tensor,
    vocabulary: int,
    width: int,
    requests: int,
    stride: int,
    block: int,
) -> None:
    """Write how many sampled tokens of each request are valid, and the last of them, or the backup without any: ``[requests]``.

    Args:
        sampled: ``[requests, width]``, -1 for what was rejected.
        discarded: bool ``[requests]``: none of these requests' tokens count.
    """
    valid = (sampled != -1) & (sampled < vocabulary) & ~discarded[:requests].unsqueeze(1)
    places = torch.arange(width, device=sampled.device)
    last = torch.where(valid, places, -1).amax(1, keepdim=True)
    tokens = sampled.gather(1, last.clamp_min(0)).squeeze(1)
    out_next.copy_(torch.where(last.squeeze(1) >= 0, tokens.to(out_next.dtype), backup[:requests].to(out_next.dtype)))
    out_counts.copy_(valid.sum(1))


def expand_inputs(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    next_tokens: torch.Tensor,
    out_tokens: torch.Tensor,
    out_positions: torch.Tensor,
    out_rejected: torch.Tensor,
    out_masked: torch.Tensor,
    out_new: torch.Tensor,
    out_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_end_loc: torch.Tensor,
    padding_token: int,
    parallel_token: int,
    total: int,
    slots: int,
    shift: bool,
    block: int,
) -> None:
    """Lay out a drafter's input: each request's valid tokens, the next token, ``slots - 1`` tokens for parallel drafting, and as
    many of padding as were rejected.

    Args:
        tokens, positions: ``[total]``, the target's input; query_start_loc ``[requests + 1]`` says where requests begin, and
            query_end_loc ``[requests]`` where each one's last valid token is.
        out_tokens, out_positions, out_rejected, out_masked: what is laid out; the last two say where padding and the tokens of
            parallel drafting are.
        out_new: ``[requests * slots]``, where each request's next token and those of parallel drafting went.
        out_mapping: ``[total]``, where each input token's hidden state goes; written with ``shift``.
        shift: leave out each request's first token, for drafters that get the hidden state of the token before.
    """
    requests, device = query_end_loc.shape[0], tokens.device
    starts, ends = query_start_loc[:requests].long(), query_end_loc.long()
    added = slots - 1 if shift else slots
    valid = ends - starts + (0 if shift else 1)
    ranks = torch.arange(requests, device=device)
    begins = starts + ranks * added
    out = torch.arange(total + requests * added, device=device)
    owner = torch.bucketize(out, begins[1:], right=True)
    place, count = out - begins[owner], valid[owner]
    padding = place >= count + slots
    parallel = (place > count) & ~padding
    source = (starts[owner] + place + int(shift)).clamp_max(total - 1)
    laid = torch.where(place == count, next_tokens[owner].to(out_tokens.dtype), tokens[source].to(out_tokens.dtype))
    laid = laid.masked_fill(parallel, parallel_token).masked_fill(padding, padding_token)
    filled = slice(out.shape[0])
    out_tokens[filled] = laid
    out_rejected[filled] = padding
    out_masked[filled] = parallel
    out_positions[filled] = (positions[starts][owner] + place).masked_fill(padding, 0)
    out_new.copy_(((begins + valid).unsqueeze(1) + torch.arange(slots, device=device)).flatten())
    if shift:
        given = torch.arange(total, device=device)
        out_mapping[:total] = given + torch.bucketize(given, starts[1:], right=True) * added


_SAMPLER, _DRAFTER = "vllm.v1.sample.rejection_sampler.", "vllm.v1.spec_decode.utils."
OVERRIDES = {
    _SAMPLER + "expand_kernel": expand,
    _SAMPLER + "rejection_greedy_sample_kernel": rejection_greedy,
    _SAMPLER + "rejection_random_sample_kernel": rejection_random,
    _SAMPLER + "sample_recovered_tokens_kernel": sample_recovered,
    _DRAFTER + "eagle_step_slot_mapping_metadata_kernel": step,
    _DRAFTER + "eagle_prepare_inputs_padded_kernel": prepare_inputs,
    _DRAFTER + "eagle_prepare_next_token_padded_kernel": prepare_next_tokens,
    _DRAFTER + "copy_and_expand_eagle_inputs_kernel": expand_inputs,
}
"""Kernel name to replacement, as ``vllm.triton_utils.dispatcher.register_kernels`` takes them."""


# Lengths on the host


def install() -> None:
    """Put these kernels in place, and let what a drafter lays out for its attention be what the attentions here rely on.

    A second call does nothing. In ``vllm/v1/spec_decode/llm_base_proposer.py`` tokens that are added or rejected change
    ``seq_lens`` on the device alone, and tokens that are not to be kept have slot -1.
    """
    from vllm.v1.spec_decode import llm_base_proposer
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    build = SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata
    extend = llm_base_proposer.extend_all_queries_by_N
    if hasattr(build, "__wrapped__"):
        return
    slot_mapping.register(OVERRIDES)

    @functools.wraps(build)
    def build_with_lengths(self: Any, common_attn_metadata: Any, draft_index: int = 0) -> Any:
        if draft_index == 1:  # vLLM adds one to both for each later token
            common_attn_metadata.seq_lens_cpu_upper_bound = common_attn_metadata.seq_lens.cpu()
        slots = common_attn_metadata.slot_mapping
        nowhere = slot_mapping.null_slots(len(slots), self.vllm_config.cache_config.block_size, slots.device)
        common_attn_metadata.slot_mapping = torch.where(slots < 0, nowhere, slots)
        return build(self, common_attn_metadata, draft_index)

    @functools.wraps(extend)
    def extend_with_lengths(common_attn_metadata: Any, N: int, *args: Any, **kwargs: Any) -> Any:
        extended = extend(common_attn_metadata, N, *args, **kwargs)
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound
        return extended.replace(seq_lens_cpu_upper_bound=lengths + N)

    SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata = build_with_lengths
    llm_base_proposer.extend_all_queries_by_N = extend_with_lengths
