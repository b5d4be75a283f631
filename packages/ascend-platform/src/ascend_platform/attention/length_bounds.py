# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sequence lengths on the host, without the draft tokens that were rejected.

This module imports neither torch nor vLLM, because ``ascend_platform.extension`` exports it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True)
class Rejected:
    """Rejected draft tokens, which ``seq_lens_cpu_upper_bound`` counts.

    Attributes:
        count: returns the number of each request; it may wait for the device.
        drafts: number of draft tokens of each request, while the host cannot know yet how many are
            rejected; None after that.
    """

    count: Callable[[], list[int]]
    drafts: list[int] | None = None


_rejected: ContextVar[tuple[Rejected, ...]] = ContextVar("rejected draft tokens", default=())


@contextmanager
def subtract_rejected(rejected: Rejected | None) -> Iterator[None]:
    """Subtract rejected draft tokens from the host sequence lengths of metadata built in this
    context."""
    reset = _rejected.set((*_rejected.get(), rejected) if rejected else _rejected.get())
    try:
        yield
    finally:
        _rejected.reset(reset)


def host_lengths(common: Any, title: str) -> list[int]:
    """Sequence lengths of a step as a host list.

    A length counts the tokens in the KV cache after the tokens of this step are written. With draft tokens in
    flight, this waits for the number of accepted ones; ``deferred_host_lengths`` lets the device
    start before.

    Args:
        common: vLLM's CommonAttentionMetadata.
        title: name of the attention in the error message.

    Raises:
        NotImplementedError: causality differs between requests, or the sequence lengths are not on
            the host.
    """
    return deferred_host_lengths(common, title)()


def deferred_host_lengths(common: Any, title: str) -> Callable[[], list[int]]:
    """A function that returns a step's ``host_lengths``, to be called within the step: it may wait
    for the device."""
    bounds = common.seq_lens_cpu_upper_bound
    if not isinstance(common.causal, bool) or bounds is None:
        raise NotImplementedError(
            f"{title} supports batches that are causal as a whole or not at all, with seq_lens on"
            " the host"
        )
    # The sequence lengths of cross attention are the encoder's.
    rejected = _rejected.get() if common.causal else ()
    return functools.partial(_subtract, bounds[: common.num_reqs].tolist(), rejected)


def draft_length_bounds(common: Any) -> tuple[list[int], list[int]] | None:
    """Upper bounds of the sequence lengths in a drafter's pass after the first, and how many tokens
    each may be too high.

    The host does not know yet how many draft tokens are rejected, and ``host_lengths`` would wait
    for it. ``common.seq_lens`` on the device is exact. None if the host knows the sequence lengths.
    """
    rejected = _rejected.get()
    drafts = next((each.drafts for each in rejected if each.drafts is not None), None)
    if drafts is None:
        return None
    known = tuple(each for each in rejected if each.drafts is None)
    return _subtract(common.seq_lens_cpu_upper_bound[: common.num_reqs].tolist(), known), drafts


def _subtract(bounds: list[int], rejected: Sequence[Rejected]) -> list[int]:
    counts = [each.count() for each in rejected]
    return [bound - sum(each) for bound, *each in zip_longest(bounds, *counts, fillvalue=0)]
