# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Packed requests as layers with states compute them: prefills in chunks of a fixed length, decodes
token by token.

Nothing here waits for the device: sequence lengths and indices stay there.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ascend_platform.kernels import ragged

CHUNK = 64
SLAB = 16
"""Number of chunks whose matmuls are computed at once; it bounds their memory."""


class Chunks:
    """The chunks of packed sequences, without a copy of their sequence lengths to the host.

    Attributes:
        count: how many there may be at most; the last ones may have no tokens.
    """

    def __init__(self, query_start_loc: torch.Tensor, tokens: int, length: int) -> None:
        device, requests = query_start_loc.device, len(query_start_loc) - 1
        self.count, self.tokens = tokens // length + requests, tokens
        starts, ends = query_start_loc[:-1].long(), query_start_loc[1:].long()
        until = ((ends - starts + length - 1) // length).cumsum(0)
        each = torch.arange(self.count, device=device)
        self.requests = ragged.request_of_token(until, each).clamp_max(requests - 1)
        of_request = each - torch.where(
            self.requests > 0, until[(self.requests - 1).clamp_min(0)], 0
        )
        positions = (starts[self.requests] + of_request * length)[:, None] + torch.arange(
            length, device=device
        )
        self.exists = positions < ends[self.requests][:, None]
        self.indices = torch.where(self.exists, positions, tokens)

    def slab(self, start: int, length: int) -> "Slab":
        """Some consecutive chunks."""
        end = start + length
        return Slab(
            self.indices[start:end], self.exists[start:end], self.requests[start:end], self.tokens
        )


def slabs(query_start_loc: torch.Tensor, tokens: int) -> Iterator["Slab"]:
    """Chunks of 64 tokens of packed sequences, 16 of them at a time.

    Args:
        query_start_loc: ``[requests + 1]``, the first token of each request.
        tokens: of all requests.
    """
    chunks = Chunks(query_start_loc, tokens, CHUNK)
    for start in range(0, chunks.count, SLAB):
        yield chunks.slab(start, SLAB)


@dataclass
class Slab:
    """Chunks that are computed together.

    Attributes:
        indices: ``[chunks, length]``, the token at each position of a chunk; the number of tokens
            for padding.
        exists: ``[chunks, length]``, False for padding.
        requests: ``[chunks]``, the request of each chunk.
        tokens: number of tokens of the step.
    """

    indices: torch.Tensor
    exists: torch.Tensor
    requests: torch.Tensor
    tokens: int

    def heads(self, x: torch.Tensor, heads: int = 0) -> torch.Tensor:
        """The rows ``[tokens, heads, size]`` as ``[chunks, heads, length, size]`` in float32, 0
        where there is no token."""
        rows = (
            x[self.indices.clamp_max(self.tokens - 1).flatten()]
            .float()
            .unflatten(0, self.indices.shape)
        )
        rows = torch.where(self.exists[..., None, None], rows, 0).transpose(1, 2)
        return repeat_heads(rows, heads // x.shape[1]) if heads > x.shape[1] else rows

    def decays(self, logs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of logarithms ``[tokens, heads]``: their sums up to each token, and the decays from each
        token to each later one."""
        sums = self.heads(logs[..., None]).squeeze(-1).cumsum(-1)
        return sums, (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()

    def scan(
        self,
        states: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        scores: torch.Tensor,
        kept: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the chunks of a delta rule one after the other, each from the state before it.

        Args:
            states: float32 ``[requests, heads, values, keys]``, written.
            queries: ``[chunks, heads, length, keys]``, decayed from the start of the chunk.
            keys: likewise, decayed to the end of the chunk.
            values: ``[chunks, heads, length, values]``, without what the state contributes.
            seen: ``[chunks, heads, length, keys]``, by which the state contributes to the values.
            scores: ``[chunks, heads, length, length]``, of queries and keys of the chunk.
            kept: decays of the whole chunk, ``[chunks, heads, 1, 1 or keys]``.

        Returns:
            ``[chunks, heads, length, values]``.
        """
        outputs = []
        for each, request in enumerate(self.requests.split(1)):
            state = states[request]
            new = values[each] - seen[each] @ state[0].mT
            outputs.append(queries[each] @ state[0].mT + scores[each] @ new)
            states[request] = state * kept[each] + new.mT @ keys[each]
        return torch.stack(outputs)

    def write(self, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Write ``[chunks, heads, length, size]`` to their tokens in ``[tokens + 1, heads, size]``;
        the last row is of none."""
        output[self.indices.flatten()] = rows.transpose(1, 2).flatten(0, 1).to(output.dtype)


def repeat_heads(x: torch.Tensor, times: int) -> torch.Tensor:
    """``[n, heads, ...]`` with each head ``times`` times; CANN's repeat_interleave takes less than
    4,194,304 elements."""
    return x.unsqueeze(2).expand(-1, -1, times, *x.shape[2:]).flatten(1, 2)


def requests_of(tokens: int, query_start_loc: torch.Tensor) -> torch.Tensor:
    """Request index of each token, int64 ``[tokens]``; padding tokens map to the last request."""
    ends = query_start_loc[1:].long()
    return ragged.request_of_token(ends, tokens).clamp_max(len(ends) - 1)


def unit_lower_inverse(strict: torch.Tensor) -> torch.Tensor:
    """The inverse of 1 + the part of a matrix below its diagonal, by inverses of blocks of 1, 2,
    4... rows."""
    size = strict.shape[-1]
    inverse = strict.new_ones(*strict.shape[:-2], size, 1, 1)
    rows = 1
    while rows < size:
        # [..., blocks, rows, blocks, rows]
        blocks = strict.unflatten(-1, (-1, 2 * rows)).unflatten(-3, (-1, 2 * rows))
        below = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., rows:, :rows]
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        left = torch.cat((upper, -(lower @ below @ upper)), -2)
        inverse = torch.cat((left, F.pad(lower, (0, 0, rows, 0))), -1)
        rows *= 2
    return inverse[..., 0, :, :]


Step = Callable[[torch.Tensor, slice | torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A step of a recurrence: of states ``[requests, ...]`` and the requests' tokens, the new states
and the output."""


def decode(
    states: torch.Tensor,
    read: torch.Tensor,
    write: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    num_accepted_tokens: torch.Tensor | None,
    output: torch.Tensor,
    step: Step,
) -> None:
    """Compute the token of each request, or its token and draft tokens.

    Args:
        states: ``[blocks, ...]``, written; block 0 is no request's and keeps what it has.
        read: ``[requests]``, or ``[requests, steps]`` with a block for the state after each token.
        write: ``[requests]``, or ``[requests, steps]`` with a block for the state after each token.
        query_start_loc: ``[requests + 1]``; None for a token each.
        num_accepted_tokens: ``[requests]``, which of the blocks has the state to begin with, from
            1; or None.
        output: ``[tokens, ...]``, written; rows of no request are undefined.
        step: takes states ``[requests, ...]`` in float32 and the requests' tokens, and returns the
            new states and the output.
    """
    requests = len(read)
    if read.dim() == 1 or query_start_loc is None:
        read, write = (each if each.dim() == 1 else each[:, 0] for each in (read, write))
        before = states[read].float()
        after, result = step(before, slice(0, requests))
        states[write] = torch.where(_column(write > 0, before), after, before).to(states.dtype)
        output[:requests] = result.to(output.dtype)
        return
    query_start_loc = query_start_loc[: requests + 1]
    starts, lengths = query_start_loc[:-1], query_start_loc.diff()
    first = read[:, 0]
    if num_accepted_tokens is not None:
        first = read.gather(
            1, (num_accepted_tokens[:requests, None] - 1).clamp_min(0).long()
        ).squeeze(1)
    state, null, results = states[first].float(), states[0].float(), []
    for each in range(write.shape[1]):
        state, result = step(state, (starts + each).clamp_max(len(output) - 1))
        results.append(result)
        block = torch.where((lengths > each) & (first > 0), write[:, each], 0)
        states[block] = torch.where(_column(block > 0, state), state, null).to(states.dtype)
    request = requests_of(len(output), query_start_loc)
    place = (torch.arange(len(output), device=output.device) - starts[request]).clamp(
        0, len(results) - 1
    )
    output.copy_(torch.stack(results, 1)[request, place])


def _column(of_requests: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return of_requests.view(-1, *(1,) * (like.dim() - 1))
