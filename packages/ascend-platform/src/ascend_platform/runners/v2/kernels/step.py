# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The step that a V2 runner prepares or samples, and what the host knows of it.

Functions of vLLM that launch Triton kernels (``gpu/input_batch.py``, ``gpu/sample``) get tensors
only, whose contents the host cannot read without a wait. They are methods of a step here, with
vLLM's arguments: :class:`Step` computes them on the device whatever the step is,
``device_step.DeviceStep`` with fewer operators by what the host knows, and ``host_step.HostStep``
on the host. These two are a :class:`PreparedStep`, which also computes its inputs.

The runner's path: ``NPUModelRunner.prepare_inputs`` makes a step, and hands it to the functions that
vLLM calls meanwhile by :func:`running`; ``input_batch.py`` has these functions. ``sample_tokens``
hands the same step to the functions of the sampler.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from vllm.utils.torch_utils import async_tensor_h2d

from ascend_platform.kernels import ragged


class States(NamedTuple):
    """States of all requests that a step's sampling changes.

    Attributes:
        computed: number of computed tokens, int32 ``[states]``.
        total: number of known tokens, int32 ``[states]``.
        last_sampled: int64 ``[states]``.
        token_ids: int32 ``[states, max_model_len]``.
        bin_counts: how often each token is in the output, int32 ``[states, vocab_size]``; None if
            no request has penalties.
    """

    computed: torch.Tensor
    total: torch.Tensor
    last_sampled: torch.Tensor
    token_ids: torch.Tensor
    bin_counts: torch.Tensor | None


class Sampled(NamedTuple):
    """The tokens of a step's requests.

    Attributes:
        rows: state of each request, int64 ``[requests]``; negative for one that has ended.
        tokens: ``[requests, columns]``; the first ``num_sampled`` are valid.
        num_sampled: number of sampled tokens, int32 ``[requests]``.
        num_rejected: number of rejected drafts, int32 ``[requests]``.
        query_start_loc: int32 ``[requests + 1]``; None for an earlier batch of a pipeline.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    query_start_loc: torch.Tensor | None


class Step:
    """A step that the host knows nothing about: an earlier batch of a pipeline, or a dummy run.

    Attributes:
        counts_output: whether a request has penalties, for which its output's tokens are counted.
        is_greedy: whether all requests are.
        has_seeds: whether a request has a seed of its own.
        seeds_set: which requests have a seed, bool ``[states]``; None in a dummy run.
        has_drafts: whether a request has draft tokens.
        are_constants_shared: whether tensors that vLLM creates in each step, and only reads, are
            constants: in ``prepare_inputs`` only.
    """

    counts_output, is_greedy, has_seeds = True, False, True
    seeds_set: torch.Tensor | None = None
    has_drafts = are_constants_shared = False

    def copy_input(
        self, data: Any, device: Any = None, dtype: torch.dtype | None = None, out: Any = None
    ) -> torch.Tensor:
        """async_tensor_h2d for vLLM's ``prepare_inputs``."""
        return async_tensor_h2d(data, device, dtype, out)

    def per_logit(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Gather per-request values to one per logit."""
        return values

    def num_known_tokens(self, limit: int) -> int:
        """An upper bound of the known tokens of a request."""
        return limit

    def get_prompt_logprobs_token_ids(
        self,
        num_tokens: int,
        query_start_loc: torch.Tensor,
        idx_mapping: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        all_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """The token that follows each of the step's tokens in its request, int64
        ``[num_tokens]``."""
        num_reqs, width = len(idx_mapping), all_token_ids.shape[1]
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=idx_mapping.device)
        rows = ragged.request_of_token(query_start_loc[1 : num_reqs + 1], tokens)
        shift = num_computed_tokens.index_select(0, idx_mapping) - query_start_loc[:num_reqs] + 1
        # The last token of a full row has no successor.
        following = (tokens + shift.index_select(0, rows)).clamp(max=width - 1)
        elements = torch.add(following, idx_mapping.index_select(0, rows), alpha=width)
        return all_token_ids.view(-1).index_select(0, elements).long()

    def get_num_sampled_and_rejected(
        self,
        num_sampled: torch.Tensor,
        seq_lens: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        prefill_len: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many tokens each request has sampled, which is written to `num_sampled`, and
        rejected; both int32 ``[requests]``.

        Requests whose prompt has further chunks have sampled and rejected 0 tokens.
        """
        num_reqs = len(idx_mapping)
        has_more = seq_lens[:num_reqs] < prefill_len.index_select(0, idx_mapping)
        num_sampled.masked_fill_(has_more, 0)
        num_rejected = cu_num_logits[1 : num_reqs + 1] - cu_num_logits[:num_reqs] - num_sampled
        return num_sampled, num_rejected.masked_fill_(has_more, 0)

    def add_sampled(self, states: States, sampled: Sampled) -> None:
        """Add the sampled tokens to the requests' states.

        Differences are added instead of new values, so that neither ended requests nor tokens that
        are not valid write to another request's state, whatever the order of the writes is. They
        are scattered: index_add_ of int32 is undocumented, and computed on the AI CPU.
        """
        rows, starts = sampled.rows, sampled.query_start_loc
        if starts is None:
            valid, rows = rows >= 0, rows.clamp(min=0)
            _write_tokens(states, sampled.tokens, rows, sampled.num_sampled * valid)
            states.computed.scatter_add_(0, rows, -sampled.num_rejected * valid)
            return
        _write_tokens(states, sampled.tokens, rows, sampled.num_sampled)
        query_lens = starts[1 : len(rows) + 1] - starts[: len(rows)]
        states.computed.scatter_add_(0, rows, query_lens - sampled.num_rejected)

    def num_null_blocks(
        self, idx_mapping: torch.Tensor, num_computed_tokens: torch.Tensor, reach: int, size: int
    ) -> torch.Tensor | None:
        """How many blocks of each request have left the sliding window, ``[requests]``; None if
        none have, as the host knows."""
        computed = num_computed_tokens.index_select(0, idx_mapping)
        return (computed - reach).clamp(min=0) // size

    def requests_in_tables(self, num_reqs_padded: int) -> tuple[bytes, int] | None:
        """Key of the step's rows of the block tables; None if the host does not know it."""
        return None

    def compute_slot_mappings(
        self, tables: Any, *arguments: Any, num_tokens: int, out: Any = None
    ) -> torch.Tensor:
        """The slots of the step's tokens; see ``NPUBlockTables.compute_slot_mappings``."""
        return tables.compute_slot_mappings(*arguments, num_tokens=num_tokens, out=out)

    def write_lengths(self, idx_mapping: torch.Tensor, lengths: torch.Tensor) -> None:
        """Write the requests' token counts before the step to ``lengths``, where they are not current
        yet."""


class PreparedStep(Step, abc.ABC):
    """A step whose inputs are prepared. The methods that vLLM's ``prepare_inputs`` calls have its
    arguments."""

    @abc.abstractmethod
    def prepare_prefill_inputs(
        self,
        input_ids: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        all_token_ids: torch.Tensor,
        prefill_len: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        /,
    ) -> None:
        """Write the tokens of prompts to ``input_ids``; called if the step has any."""

    @abc.abstractmethod
    def prepare_pos_seq_lens(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        pos: torch.Tensor,
        seq_lens: torch.Tensor,
        /,
    ) -> None:
        """Write the tokens' positions and the requests' sequence lengths; those of padding requests
        are 0."""

    @abc.abstractmethod
    def combine_sampled_and_draft_tokens(
        self,
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
        /,
    ) -> torch.Tensor | slice:
        """Write the last sampled token of each request in decode, and the draft tokens after it, to
        ``input_ids``.

        Returns:
            The index of each logit's token in the step, int64 ``[logits]``, or a slice of them.
        """

    @abc.abstractmethod
    def expand_idx_mapping(
        self,
        idx_mapping: torch.Tensor,
        total_num_logits: int,
        cu_num_logits: torch.Tensor,
        max_expand_len: int,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each logit's request state int64 ``[logits]``, and its number in the request int32
        ``[logits]``; called if the step has draft tokens."""

    @abc.abstractmethod
    def per_token(self, values: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
        """Gather per-request values to one per token, ``[tokens]``."""

    @abc.abstractmethod
    def positions_in_prefill(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        prefill_lens: torch.Tensor,
        num_computed_tokens: torch.Tensor,
        /,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Positions of the tokens, int64 ``[tokens]``, and whether they are of a prompt, bool
        ``[tokens]``; None if none is."""


def _write_tokens(
    states: States, tokens: torch.Tensor, rows: torch.Tensor, num_sampled: torch.Tensor
) -> None:
    """Write sampled tokens ``[requests, columns]`` after those of the requests."""
    table, width = states.token_ids.view(-1), states.token_ids.stride(0)
    lengths = states.total.index_select(0, rows)
    columns = ragged.arange(tokens.shape[1], rows.device)
    is_valid = columns < num_sampled[:, None]
    tokens = torch.where(is_valid, tokens, 0)
    newest = tokens.gather(1, (num_sampled[:, None] - 1).clamp(min=0).long())[:, 0]
    difference = (newest - states.last_sampled.index_select(0, rows)) * (num_sampled > 0)
    states.last_sampled.index_add_(0, rows, difference)
    places = (lengths[:, None] + columns).clamp(max=width - 1)
    elements = torch.add(places, rows[:, None], alpha=width).view(-1)
    difference = tokens.to(table.dtype).view(-1) - table.index_select(0, elements)
    table.scatter_add_(0, elements, difference * is_valid.view(-1))
    states.total.scatter_add_(0, rows, num_sampled)
    if (counts := states.bin_counts) is not None:
        counted = torch.add(tokens, rows[:, None], alpha=counts.stride(0)).view(-1)
        counts.view(-1).scatter_add_(0, counted, is_valid.view(-1).to(counts.dtype))


def add_at(values: torch.Tensor, indices: torch.Tensor, added: torch.Tensor) -> None:
    """Add to elements at distinct indices; unlike scatter_add_ it does not read all values."""
    values.index_copy_(0, indices, values.index_select(0, indices) + added)


class _Handed:
    """The step that :func:`running` hands on. A process runs one step at a time, as vLLM's forward
    context of the process requires too."""

    step = Step()


@contextlib.contextmanager
def running(step: Step | None) -> Iterator[None]:
    """Hand a step to the functions that vLLM calls while the runner prepares it, or samples; None for
    a dummy run."""
    before, _Handed.step = _Handed.step, step or Step()
    try:
        yield
    finally:
        _Handed.step = before


def current_step() -> Step:
    """The step that is being prepared or sampled."""
    return _Handed.step


def prepared_step() -> PreparedStep:
    """The step whose inputs are being prepared."""
    step = _Handed.step
    assert isinstance(step, PreparedStep), (
        "the inputs of a step are only prepared in NPUModelRunner.prepare_inputs"
    )
    return step
