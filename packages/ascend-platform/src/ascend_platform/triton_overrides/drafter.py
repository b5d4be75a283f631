"""PyTorch implementations of the Triton kernels of vLLM's drafters.

They take the kernels' own arguments in the kernels' order (``vllm/triton_utils/dispatcher.py``), whose meaning is that of
``vllm/v1/spec_decode/utils.py``. A whole batch is computed at once: nothing is read back to the host, and no shape depends on
what has been accepted. ``cu_drafts`` is int32 ``[requests]``, the running sum of how many draft tokens each request has; the
tokens of all requests are concatenated.
"""

import functools
from typing import Any

import torch

from ascend_platform.sampling import rejection
from ascend_platform.triton_overrides import register
from ascend_platform.triton_overrides.slot_mapping import null_slots
from ascend_platform.vllm_overrides import override


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


_PREFIX = "vllm.v1.spec_decode.utils:"
OVERRIDES = {
    _PREFIX + "eagle_step_slot_mapping_metadata_kernel": step,
    _PREFIX + "eagle_prepare_inputs_padded_kernel": prepare_inputs,
    _PREFIX + "eagle_prepare_next_token_padded_kernel": prepare_next_tokens,
    _PREFIX + "copy_and_expand_eagle_inputs_kernel": expand_inputs,
}
"""vLLM's kernels, as in ``vllm_overrides.OVERRIDES``, and the functions that take their arguments."""


def install() -> None:
    """Put these kernels in place, and let what a drafter lays out for its attention be what the attentions here rely on.

    A second call does nothing. In ``vllm/v1/spec_decode/llm_base_proposer.py`` tokens that are added or rejected change
    ``seq_lens`` on the device alone, and tokens that are not to be kept have slot -1.
    """
    from vllm.v1.spec_decode import llm_base_proposer
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    build = SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata
    extend = llm_base_proposer.extend_all_queries_by_N
    register({**OVERRIDES, **rejection.OVERRIDES})

    @functools.wraps(build)
    def build_with_lengths(self: Any, common_attn_metadata: Any, draft_index: int = 0) -> Any:
        if draft_index == 1:  # vLLM adds one to both for each later token
            common_attn_metadata.seq_lens_cpu_upper_bound = common_attn_metadata.seq_lens.cpu()
        slots = common_attn_metadata.slot_mapping
        nowhere = null_slots(len(slots), self.vllm_config.cache_config.block_size, slots.device)
        common_attn_metadata.slot_mapping = torch.where(slots < 0, nowhere, slots)
        return build(self, common_attn_metadata, draft_index)

    @functools.wraps(extend)
    def extend_with_lengths(common_attn_metadata: Any, N: int, *args: Any, **kwargs: Any) -> Any:
        extended = extend(common_attn_metadata, N, *args, **kwargs)
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound
        return extended.replace(seq_lens_cpu_upper_bound=lengths + N)

    override(
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata", build_with_lengths
    )
    override("vllm.v1.spec_decode.utils:extend_all_queries_by_N", extend_with_lengths)
