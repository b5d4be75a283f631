# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Greedy sampling with tensor parallelism from each rank's part of the vocabulary.

Each rank finds the best of its logits, and the ranks gather these values and token ids instead of
all logits. Steps in which sampling reads more than the best token compute logits as vLLM does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from vllm import envs
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from ascend_platform import options

MIN_RANKS = 8
"""Ranks from which on the gather of all logits is worth avoiding; see docs/defaults.md."""


class LocalArgmax:
    """The logits of a model in steps whose sampling reads the best token only."""

    def __init__(self, processors: list[LogitsProcessor]) -> None:
        self._processors = processors
        self._start: int | None = None
        """First token id of this rank's part; None if the last logits are of all tokens."""

    @classmethod
    def of(cls, model: Any, vllm_config: Any) -> LocalArgmax | None:
        """Return one for a model, None where it is off or does not apply.

        A model that changes logits after its LogitsProcessor may do so by token ids.
        """
        ranks = vllm_config.parallel_config.tensor_parallel_size
        chosen = options.of(options.Platform, vllm_config).local_argmax
        processors = [each for each in model.modules() if isinstance(each, LogitsProcessor)]
        if (
            ranks == 1
            or not (ranks >= MIN_RANKS if chosen is None else chosen)
            or vllm_config.lora_config is not None
            or envs.VLLM_COMPUTE_NANS_IN_LOGITS
            or any(each.logits_as_input for each in processors)
        ):
            return None
        found = cls(processors)
        return found if found._is_last(model, vllm_config.model_config) else None

    def _is_last(self, model: Any, config: Any) -> bool:
        """Whether the model returns what its LogitsProcessor does, unchanged."""
        mark, device = object(), next(model.parameters()).device
        hidden = torch.zeros(1, config.get_hidden_size(), dtype=config.dtype, device=device)
        with self._replaced(lambda *_, **__: mark):
            try:
                return model.compute_logits(hidden) is mark
            except (AttributeError, RuntimeError, TypeError):  # It computes with the mark.
                return False

    @contextlib.contextmanager
    def _replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        for each in self._processors:
            vars(each).update(forward=partial(forward, each))
        try:
            yield
        finally:
            for each in self._processors:
                del vars(each)["forward"]

    @contextlib.contextmanager
    def step(self, reads_argmax: Callable[[], bool]) -> Iterator[None]:
        """Context of a step's logits; ``reads_argmax`` is called when they are computed, and must
        have the same answer on all ranks."""
        self._start = None
        with self._replaced(partial(self._forward, reads_argmax)):
            yield

    def _forward(
        self,
        reads_argmax: Callable[[], bool],
        processor: LogitsProcessor,
        lm_head: Any,
        *arguments: Any,
        **named: Any,
    ) -> torch.Tensor | None:
        compute: Any = partial(type(processor).forward, processor, lm_head, *arguments, **named)
        if lm_head.tp_size == 1 or not reads_argmax():
            every: torch.Tensor | None = compute()
            return every
        logits: torch.Tensor = compute(skip_gather=True)
        part = lm_head.shard_indices
        if part.num_org_elements < logits.shape[-1]:
            logits[..., part.num_org_elements :] = -torch.inf
        self._start = part.org_vocab_start_index
        return logits

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """The best token of each row, int64 ``[rows]``; of several the one with the lowest id."""
        if self._start is None:
            return logits.argmax(-1)
        values, indices = logits.max(-1)
        # Token ids are exact in float32 up to 2 ** 24.
        pairs = torch.stack((values.float(), (indices + self._start).float()))
        gathered = tensor_model_parallel_all_gather(pairs[None], dim=0)
        ranks = gathered[:, 0].argmax(0, keepdim=True)
        return gathered[:, 1].gather(0, ranks)[0].long()


_active: ContextVar[LocalArgmax | None] = ContextVar("argmax of a step", default=None)


@contextlib.contextmanager
def active(found: LocalArgmax | None, reads_argmax: Callable[[], bool]) -> Iterator[None]:
    """Context of a step's logits and sampling, in which :func:`argmax` is of all ranks."""
    if found is None:
        yield
        return
    token = _active.set(found)
    try:
        with found.step(reads_argmax):
            yield
    finally:
        _active.reset(token)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The best token of each row in the step that samples, int64 ``[rows]``."""
    found = _active.get()
    return logits.argmax(-1) if found is None else found.argmax(logits)
