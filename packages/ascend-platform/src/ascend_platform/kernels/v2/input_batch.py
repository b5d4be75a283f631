# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Inputs of a V2 step, and the requests' states after it: vLLM's Triton kernels
(``gpu/input_batch.py``) in PyTorch.

Nothing here synchronizes with the device. A request has a logit for its last token, and one for
each draft token before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import async_copy_to_np

from ascend_platform.kernels import ragged
from ascend_platform.kernels.v2.buffers import SentInputs
from ascend_platform.kernels.v2.host_inputs import HostInputs
from ascend_platform.vllm_overrides import override


class Step:
    """What the host knows of the step whose inputs are being prepared, and the device cannot tell
    without a wait."""

    def __init__(
        self,
        num_scheduled_tokens: np.ndarray,
        has_prefill: bool,
        counts_output: bool = True,
        num_draft_tokens: np.ndarray | None = None,
        looks_ahead: bool = False,
        is_greedy: bool = False,
        has_seeds: bool = True,
        host: HostInputs | None = None,
        sent: SentInputs | None = None,
    ) -> None:
        """Describe a step.

        Args:
            counts_output: whether a request has penalties, for which its output's tokens are
            counted.
            num_draft_tokens: of each request; None if there are none.
            looks_ahead: whether a drafter reads the prompt's token after the step's.
            is_greedy: whether all requests are.
            has_seeds: whether a request has a seed of its own.
            host: the inputs, where the host knows them.
            sent: what the runner's last step has copied.
        """
        self.host, self.sent = host, sent
        self.are_constants_shared = False
        """Whether tensors that vLLM creates for each step and only reads are constants: only in
        ``prepare_inputs``."""
        self.counts_output, self.looks_ahead = counts_output, looks_ahead
        self.is_greedy, self.has_seeds = is_greedy, has_seeds
        self.num_tokens = int(num_scheduled_tokens.sum())
        self.one_token_each = bool((num_scheduled_tokens == 1).all()) and num_draft_tokens is None
        self.has_prefill = has_prefill
        self._num_scheduled_tokens, self._num_draft_tokens = num_scheduled_tokens, num_draft_tokens
        self._rows: torch.Tensor | None = None
        self._logit_rows: torch.Tensor | None = None

    @property
    def has_drafts(self) -> bool:
        return self._num_draft_tokens is not None

    def logit_rows(self, device: torch.device) -> torch.Tensor:
        """Request of each logit, the logit's number in its request, and its token's index in the
        step, int64 ``[3, logits]``."""
        if self._logit_rows is None:
            assert self._num_draft_tokens is not None
            counts = self._num_draft_tokens.astype(np.int64) + 1
            requests = np.repeat(np.arange(len(counts)), counts)
            positions = np.arange(len(requests)) - (counts.cumsum() - counts)[requests]
            first = self._num_scheduled_tokens.cumsum() - counts
            self._logit_rows = async_tensor_h2d(
                np.stack([requests, positions, first[requests] + positions]), device=device
            )
        return self._logit_rows

    def per_logit(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Gather per-request values to one per logit."""
        return (
            values
            if self._num_draft_tokens is None
            else tuple(np.repeat(values, self._num_draft_tokens + 1))
        )

    @property
    def samples_one_each(self) -> bool:
        """Whether every request is in decode, and so samples one token and rejects none."""
        return self.one_token_each and not self.has_prefill

    def per_token(self, values: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
        """Values ``[requests]`` by token, ``[tokens]``."""
        if self.one_token_each:
            return values
        if self.host is not None:
            return values.index_select(0, self.host.device_requests)
        if self._rows is None:
            tokens = ragged.arange(self.num_tokens, values.device)
            self._rows = ragged.request_of_token(query_start_loc[1 : len(values) + 1], tokens)
        return values.index_select(0, self._rows)

    def positions(self, computed: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
        """Positions of the tokens in their requests, int64 ``[tokens]``; ``computed`` is
        ``num_computed_tokens`` by request."""
        if self.one_token_each:
            return computed.long()
        shift = computed - query_start_loc[: len(computed)]
        return ragged.arange(self.num_tokens, computed.device) + self.per_token(
            shift, query_start_loc
        )


_step: Step | None = None


@contextlib.contextmanager
def preparing(step: Step | None) -> Iterator[None]:
    """The context in which the runner prepares a step, or samples."""
    global _step
    _step = step
    try:
        yield
    finally:
        _step = None


def current() -> Step | None:
    """The step that is being prepared or sampled; None for an earlier batch of a pipeline, and for
    dummy runs."""
    return _step


def _current() -> Step:
    assert _step is not None, (
        "the inputs of a step are only prepared in NPUModelRunner.prepare_inputs"
    )
    return _step


def arange(*arguments: Any, **named: Any) -> torch.Tensor:
    """torch.arange for vLLM's ``prepare_inputs``, which numbers the logits in each step without
    draft tokens."""
    if (
        _step is not None
        and _step.are_constants_shared
        and len(arguments) == 1
        and named.get("dtype") is torch.int32
    ):
        return ragged.arange(arguments[0], named["device"], torch.int32)
    return torch.arange(*arguments, **named)


def zeros(*arguments: Any, **named: Any) -> torch.Tensor:
    """torch.zeros for vLLM's ``prepare_inputs``: the number of each logit in its request."""
    if (
        _step is not None
        and _step.are_constants_shared
        and len(arguments) == 1
        and named.get("dtype") is torch.int32
    ):
        return ragged.zeros(arguments[0], named["device"])
    return torch.zeros(*arguments, **named)


def copy_input(
    data: Any, device: Any = None, dtype: torch.dtype | None = None, out: Any = None
) -> torch.Tensor:
    """async_tensor_h2d for vLLM's ``prepare_inputs``: states and starts of the requests are often
    those of the last step."""
    if _step is not None and _step.are_constants_shared and _step.sent is not None:
        return _step.sent.copy(data, device, dtype, out)
    return async_tensor_h2d(data, device, dtype, out)


def copy_to_np(x: torch.Tensor) -> np.ndarray:
    """async_copy_to_np for vLLM's output of a step, whose number of sampled tokens the host may
    know."""
    if _step is not None and _step.host is not None and x is _step.host.num_sampled:
        return _step.host.samples.astype(np.int32)
    return async_copy_to_np(x)


def prepare_prefill_inputs(
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_len: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """Write the step's known tokens to ``input_ids``.

    vLLM writes only those of requests in prefill; the last sampled token of others, which is known
    too, is written again by :func:`combine_sampled_and_draft_tokens`. ``next_prefill_tokens``
    ``[tokens, requests]``, the prompt's tokens after those of the step, is written only for
    drafters.
    """
    step = _current()
    if step.host is not None:
        return  # they are written with all others
    computed = num_computed_tokens.index_select(0, idx_mapping)
    positions = step.positions(computed, query_start_loc)
    requests = step.per_token(idx_mapping, query_start_loc)
    elements = torch.add(positions, requests, alpha=all_token_ids.stride(0))
    torch.index_select(all_token_ids.view(-1), 0, elements, out=input_ids[: step.num_tokens])
    if step.looks_ahead:
        num_reqs, width = len(idx_mapping), all_token_ids.stride(0)
        ends = computed + query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
        following = ends + ragged.arange(len(next_prefill_tokens), ends.device)[:, None]
        tokens = all_token_ids.view(-1)[following.clamp(max=width - 1) + idx_mapping * width]
        known = following < prefill_len.index_select(0, idx_mapping)
        next_prefill_tokens.index_copy_(
            1, idx_mapping, torch.where(known, tokens, 0).to(next_prefill_tokens.dtype)
        )


def prepare_pos_seq_lens(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    pos: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Write the tokens' positions and the requests' sequence lengths; those of padding requests are
    0."""
    step, num_reqs = _current(), len(idx_mapping)
    if step.host is not None:
        step.host.write_positions(pos, seq_lens)
        return
    computed = num_computed_tokens.index_select(0, idx_mapping)
    pos[: step.num_tokens].copy_(step.positions(computed, query_start_loc))
    if step.one_token_each:
        torch.add(computed, 1, out=seq_lens[:num_reqs])
    else:
        query_lens = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
        torch.add(computed, query_lens, out=seq_lens[:num_reqs])
    seq_lens[num_reqs:].zero_()


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_logits: int,
    num_new_sampled_tokens: int = 1,
) -> torch.Tensor:
    """Write the last sampled token of each request in decode, and the draft tokens after it, to
    ``input_ids``.

    Returns:
        The index of each logit's token in the step, int64 ``[logits]``.
    """
    step, num_reqs = _current(), len(idx_mapping)
    assert num_new_sampled_tokens == 1, "models that sample several tokens"
    if step.host is not None:
        return step.host.write_tokens(input_ids)
    sampled = last_sampled_tokens.view(-1).index_select(0, idx_mapping)
    if step.has_drafts:
        lengths = (
            prefill_len.index_select(0, idx_mapping),
            cu_num_logits[1 : num_reqs + 1] - cu_num_logits[:num_reqs],
        )
        return _combine_drafts(
            input_ids,
            sampled,
            draft_tokens.index_select(0, idx_mapping),
            seq_lens[:num_reqs],
            *lengths,
        )
    assert num_logits == num_reqs, "draft tokens"
    last = (
        ragged.arange(num_reqs, input_ids.device)
        if step.one_token_each
        else query_start_loc[1 : num_reqs + 1].long() - 1
    )
    if not step.has_prefill:
        assert step.one_token_each, "draft tokens"
        input_ids[:num_reqs].copy_(sampled)
        return last
    in_decode = seq_lens[:num_reqs] > prefill_len.index_select(0, idx_mapping)
    tokens = torch.where(in_decode, sampled.to(input_ids.dtype), input_ids.index_select(0, last))
    input_ids.index_put_((last,), tokens)
    return last


def _combine_drafts(
    input_ids: torch.Tensor,
    sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    num_logits: torch.Tensor,
) -> torch.Tensor:
    """Write the tokens of a step with draft tokens ``[requests, steps]``; all arguments but
    ``input_ids`` are by request."""
    step = _current()
    requests, positions, indices = step.logit_rows(input_ids.device).unbind()
    tokens = torch.cat((sampled[:, None], draft_tokens), 1).view(-1)
    values = tokens.index_select(
        0, torch.add(positions, requests, alpha=draft_tokens.shape[1] + 1)
    ).to(input_ids.dtype)
    # Drafts after a prompt are placeholders; the last tokens of the prompt stay.
    if step.has_prefill:
        is_written = torch.stack(
            (seq_lens - num_logits >= prefill_len, seq_lens > prefill_len), 1
        ).view(-1)
        is_written = is_written.index_select(
            0, torch.add(positions.clamp(max=1), requests, alpha=2)
        )
        values = torch.where(is_written, values, input_ids.index_select(0, indices))
    input_ids.index_put_((indices,), values)
    return indices


def expand_idx_mapping(
    idx_mapping: torch.Tensor,
    total_num_logits: int,
    cu_num_logits: torch.Tensor,
    max_expand_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each logit's request state int64 ``[logits]``, and its number in the request int32
    ``[logits]``."""
    requests, positions, _ = _current().logit_rows(idx_mapping.device).unbind()
    return idx_mapping.index_select(0, requests), positions.int()


def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_len: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens each request has sampled, which is written to `num_sampled`, and rejected;
    both int32 ``[requests]``.

    Requests whose prompt has further chunks have sampled and rejected 0 tokens.
    """
    num_reqs = len(idx_mapping)
    if _step is not None and _step.host is not None:
        _step.host.write_sampled_counts(num_sampled)
        return num_sampled, ragged.zeros(num_reqs, num_sampled.device)
    # num_sampled has the ones with which vLLM makes it
    if _step is not None and _step.samples_one_each:
        return num_sampled, ragged.zeros(num_reqs, num_sampled.device)
    has_more = seq_lens[:num_reqs] < prefill_len.index_select(0, idx_mapping)
    num_sampled.masked_fill_(has_more, 0)
    num_rejected = cu_num_logits[1 : num_reqs + 1] - cu_num_logits[:num_reqs] - num_sampled
    return num_sampled, num_rejected.masked_fill_(has_more, 0)


def post_update(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    total_len: torch.Tensor,
    draft_tokens: torch.Tensor | None,
    draft_tokens_out: torch.Tensor | None,
    num_draft_tokens: int,
    **_: Any,
) -> None:
    """Replaces ``_post_update_kernel``; ``sampled_tokens`` is ``[requests, columns]``, of which
    ``num_sampled`` are valid.

    Rows with a negative index are skipped. Differences are added instead of storing new values, so
    that neither these nor invalid tokens change another request's state, in any order of the
    writes.
    """
    if _step is not None and not _step.counts_output:
        output_bin_counts = None
    last, table, tokens = last_sampled_tokens.view(-1), all_token_ids.view(-1), sampled_tokens[:, 0]
    if _step is not None and _step.host is not None and query_start_loc is not None:
        _step.host.write_sampled_tokens(idx_mapping, tokens, num_sampled, output_bin_counts)
        return
    if _step is not None and _step.samples_one_each and query_start_loc is not None:
        end = total_len.index_select(0, idx_mapping).clamp_(max=all_token_ids_stride - 1)
        last.index_copy_(0, idx_mapping, tokens)
        table.index_copy_(
            0, torch.add(end, idx_mapping, alpha=all_token_ids_stride), tokens.to(table.dtype)
        )
        for counter in (total_len, num_computed_tokens):
            counter.index_add_(0, idx_mapping, num_sampled)
        if output_bin_counts is not None:
            counted = torch.add(tokens, idx_mapping, alpha=output_bin_counts_stride)
            output_bin_counts.view(-1).index_add_(0, counted, num_sampled)
        return

    rows, sampled = idx_mapping, num_sampled
    if query_start_loc is None:  # An earlier batch of a pipeline, whose requests may have finished.
        valid = idx_mapping >= 0
        rows, sampled = idx_mapping.clamp(min=0), num_sampled * valid
    lengths = total_len.index_select(0, rows)

    columns = ragged.arange(sampled_tokens.shape[1], rows.device)
    is_valid = columns < sampled[:, None]
    sampled_tokens = torch.where(is_valid, sampled_tokens, 0)
    tokens = sampled_tokens.gather(1, (sampled[:, None] - 1).clamp(min=0).long())[:, 0]
    last.index_add_(0, rows, (tokens - last.index_select(0, rows)) * (sampled > 0))
    positions = (lengths[:, None] + columns).clamp(max=all_token_ids_stride - 1)
    elements = torch.add(positions, rows[:, None], alpha=all_token_ids_stride).view(-1)
    difference = (
        sampled_tokens.to(table.dtype).view(-1) - table.index_select(0, elements)
    ) * is_valid.view(-1)
    table.index_add_(0, elements, difference)
    total_len.index_add_(0, rows, sampled)
    if output_bin_counts is not None:
        counted = torch.add(sampled_tokens, rows[:, None], alpha=output_bin_counts_stride).view(-1)
        output_bin_counts.view(-1).index_add_(
            0, counted, is_valid.view(-1).to(output_bin_counts.dtype)
        )
    if draft_tokens is not None:
        assert draft_tokens_out is not None
        drafts = (draft_tokens - draft_tokens_out.index_select(0, rows)) * (idx_mapping >= 0)[
            :, None
        ]
        draft_tokens_out.index_add_(0, rows, drafts)

    if query_start_loc is None:
        num_computed_tokens.index_add_(0, rows, num_rejected * valid, alpha=-1)
        return
    num_reqs = len(idx_mapping)
    computed = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs] - num_rejected
    num_computed_tokens.index_add_(0, rows, computed)


def post_update_num_computed_tokens(
    idx_mapping: torch.Tensor, num_computed_tokens: torch.Tensor, query_start_loc: torch.Tensor
) -> None:
    """Replaces ``_post_update_num_computed_tokens_kernel``."""
    num_reqs = len(idx_mapping)
    num_computed_tokens.index_add_(
        0, idx_mapping, query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
    )


def prepare_dcp_local_seq_lens(
    dcp_local_seq_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    num_reqs: int,
    dcp_size: int,
    dcp_rank: int,
    cp_interleave: int,
    *,
    num_reqs_padded: int | None = None,
) -> torch.Tensor:
    """Write how many of each request's tokens this rank stores; runs of ``cp_interleave`` tokens go
    to the ranks in turn."""
    lengths, span = seq_lens[:num_reqs], dcp_size * cp_interleave
    rest = (lengths % span - dcp_rank * cp_interleave).clamp(0, cp_interleave)
    torch.add(rest, lengths // span, alpha=cp_interleave, out=dcp_local_seq_lens[:num_reqs])
    dcp_local_seq_lens[num_reqs:].zero_()
    return dcp_local_seq_lens[:num_reqs_padded]


def prepare_rope_positions(
    positions: torch.Tensor,
    positions_stride: int,
    prefill_positions: torch.Tensor,
    stride_of_request: int,
    stride_of_dimension: int,
    prefill_delta: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_DIMS: int,
) -> None:
    """Replaces ``_prepare_rope_positions_kernel``; ``positions`` is int64 ``[dimensions, tokens]``,
    written.

    A prompt's come from ``prefill_positions``; those of generated tokens are the same in all
    dimensions.
    """
    step = _current()
    if step.host is None:
        computed = num_computed_tokens.index_select(0, idx_mapping)
        token_positions = step.positions(computed, query_start_loc)
    else:
        token_positions = step.host.device_positions
    deltas = step.per_token(prefill_delta.index_select(0, idx_mapping), query_start_loc)
    written = (token_positions + deltas).expand(NUM_DIMS, -1)
    if step.has_prefill:
        first = step.per_token(idx_mapping * stride_of_request, query_start_loc) + places.clamp(
            max=stride_of_dimension - 1
        )
        elements = first + ragged.arange(NUM_DIMS, positions.device)[:, None] * stride_of_dimension
        if step.host is None:
            in_prefill = step.per_token(
                computed < prefill_lens.index_select(0, idx_mapping), query_start_loc
            )
        else:
            in_prefill = step.host.device_in_prefill
        written = torch.where(in_prefill, prefill_positions.view(-1)[elements].long(), written)
    positions[:, : step.num_tokens] = written


_PREFIX = "vllm.v1.worker.gpu."

KERNELS: dict[str, Callable[..., Any]] = {
    "input_batch:_post_update_kernel": post_update,
    "input_batch:_post_update_num_computed_tokens_kernel": post_update_num_computed_tokens,
    "mm.rope:_prepare_rope_positions_kernel": prepare_rope_positions,
}
"""vLLM's kernels, and the functions that take their arguments."""


def install() -> None:
    from ascend_platform import kernels

    override("vllm.utils.torch_utils:async_tensor_h2d", copy_input)
    override("vllm.v1.worker.gpu.async_utils:async_copy_to_np", copy_to_np)
    override("vllm.v1.worker.gpu.input_batch:prepare_prefill_inputs", prepare_prefill_inputs)
    override("vllm.v1.worker.gpu.input_batch:prepare_pos_seq_lens", prepare_pos_seq_lens)
    override(
        "vllm.v1.worker.gpu.input_batch:combine_sampled_and_draft_tokens",
        combine_sampled_and_draft_tokens,
    )
    override("vllm.v1.worker.gpu.input_batch:expand_idx_mapping", expand_idx_mapping)
    override(
        "vllm.v1.worker.gpu.input_batch:get_num_sampled_and_rejected", get_num_sampled_and_rejected
    )
    override("vllm.v1.worker.gpu.cp_utils:prepare_dcp_local_seq_lens", prepare_dcp_local_seq_lens)
    kernels.register({_PREFIX + name: function for name, function in KERNELS.items()})
