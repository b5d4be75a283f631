# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Watermarks: vLLM's Triton kernels (``gpu/sample/watermark.py``) in PyTorch.

The numbers are those of vLLM's detector (``v1/watermarking/prfs/philox.py``). Nothing here
synchronizes with the device.
"""

import functools

import torch
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.watermarking.gumbel import GumbelWatermarker
from vllm.v1.watermarking.prfs import philox
from vllm.v1.watermarking.watermarker import WatermarkSample

from ascend_platform.runners.v2.kernels.step import current_step

_MASK = philox._UINT32_MASK
_MULTIPLIERS = philox._PHILOX_M0, philox._PHILOX_M1
_NUMBERS_AT_ONCE = 1 << 23
"""Random numbers computed at a time, which bounds the memory besides the result."""


def sample_watermarked(
    watermarker: GumbelWatermarker, logits: torch.Tensor, contexts: torch.Tensor
) -> WatermarkSample:
    """Sample a token for each row of logits with the Gumbel noise of its context; see :func:`draw`.

    Philox is the only function of ``WatermarkConfig``. vLLM's PyTorch form computes four words for
    each token and takes one.
    """
    return WatermarkSample(draw(watermarker.prf.key, logits, contexts), logits)


def draw(key: int, logits: torch.Tensor, contexts: torch.Tensor) -> torch.Tensor:
    """Tokens, int64 ``[rows]``, of logits ``[rows, vocab_size]`` and contexts, int32 or int64
    ``[rows, context_width]``."""
    parts = contexts.split(max(1, _NUMBERS_AT_ONCE // logits.shape[1]))
    uniform = torch.cat([philox_uniform(key, part, logits.shape[1]) for part in parts])
    return (logits.float() - uniform.log_().neg_().log_()).argmax(-1)


def philox_uniform(key: int, contexts: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Uniform numbers of each context for all tokens, float32 ``[rows, vocab_size]`` between 0 and
    1, exclusive."""
    device, width = contexts.device, contexts.shape[1]
    contexts = contexts.long() & _MASK
    words = torch.stack(
        [torch.full_like(contexts[:, 0], word) for word in (philox._CONTEXT_DOMAIN, width, 0, 0)]
    )
    for offset in range(0, width, 4):
        block = contexts[:, offset : offset + 4].t()
        if len(block) < 4:
            block = torch.cat(
                [
                    block,
                    *(torch.full_like(block[:1], _MASK - place) for place in range(len(block), 4)),
                ]
            )
        words = _philox(words ^ block, _keys((key & _MASK) ^ offset, key >> 32, device))
    # One of a token's two keys has the context.
    added, others = _keys(0, (key >> 32) ^ philox._TOKEN_DOMAIN, device).unbind(1)
    keys = torch.stack(
        [((words[3] ^ (key & _MASK)) + added) & _MASK, others.expand(-1, len(contexts))], 1
    )
    groups = torch.arange(-(-vocab_size // 4), device=device)
    counters = torch.stack(
        [
            groups.expand(len(contexts), -1),
            *(word[:, None].expand(-1, len(groups)) for word in words[:3]),
        ]
    )
    drawn = torch.stack(_philox(counters, keys[..., None]).unbind(), -1).view(len(contexts), -1)[
        :, :vocab_size
    ]
    upper = (drawn & (_MASK - 255)).float().mul_(2**-32).add_(2**-24)
    # The next lower float32, like vLLM's division by 2**24 + 1.
    return upper.sub_(upper, alpha=2**-24)


def _philox(counters: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10 of 32-bit words in int64, ``[4, ...]``; the keys of its rounds are ``[10, 2,
    ...]``."""
    multiplied, added = counters[0::2], counters[1::2]
    for of_round in keys.unbind():
        # Wraps like the unsigned 64-bit multiplication. The AI CPU would shift.
        products = torch.stack([multiplied[1] * _MULTIPLIERS[1], multiplied[0] * _MULTIPLIERS[0]])
        upper_halves = products.view(torch.int32)[..., 1::2].long()
        multiplied, added = (upper_halves ^ added ^ of_round) & _MASK, products
    return torch.stack([multiplied[0], added[0], multiplied[1], added[1]]) & _MASK


@functools.lru_cache(maxsize=64)
def _keys(first: int, second: int, device: torch.device) -> torch.Tensor:
    """The keys of each round, int64 ``[10, 2, 1]``; copied to the device once."""
    weyl = philox._PHILOX_W0, philox._PHILOX_W1
    by_round = [
        [(key + step * each) & _MASK for key, each in zip((first, second), weyl, strict=True)]
        for step in range(10)
    ]
    return torch.tensor(by_round, device=device)[..., None]


def repeated_context_mask(
    all_token_ids: torch.Tensor,
    req_indices: torch.Tensor,
    prompt_lens: torch.Tensor,
    total_lens: torch.Tensor,
    contexts: torch.Tensor,
    max_history: int | None = None,
    include_prompt: bool = False,
    skip_partial_context: bool = False,
    history_offsets: torch.Tensor | None = None,
    local_positions: torch.Tensor | None = None,
    num_speculative_steps: int = 0,
) -> torch.Tensor:
    """Whether the request of each row has had the row's context before, bool ``[rows]``; see vLLM's
    function.

    As many positions are searched as ``max_history``, or the step's longest request, has, up to a
    power of two.
    """
    width, length = contexts.shape[1], all_token_ids.shape[1]
    known = current_step().num_known_tokens(length)
    count = min(length, next_power_of_2(min(known, max_history or known)))
    rows = req_indices.clamp(min=0).long()
    prompts, totals = prompt_lens.index_select(0, rows).long(), total_lens.index_select(0, rows)
    start = torch.zeros_like(rows) if include_prompt else prompts
    positions = (totals - start)[:, None] + torch.arange(-count - width, 0, device=rows.device)
    elements = (positions.clamp(min=0) + start[:, None]).add_(rows[:, None], alpha=length)
    tokens = (
        all_token_ids.view(-1)
        .index_select(0, elements.view(-1))
        .view_as(positions)
        .masked_fill_(positions < 0, -1)
    )
    found = positions[:, width:] >= 0
    if max_history is not None:
        ages = torch.arange(count, 0, -1, device=rows.device)
        found &= ages <= (
            max_history if history_offsets is None else max_history - history_offsets[:, None]
        )
    for offset in range(width):
        found &= tokens[:, offset : offset + count] == contexts[:, offset, None]
    repeated = found.any(-1)
    if skip_partial_context:
        repeated |= totals - prompts < width
    if local_positions is not None:
        for offset in range(
            1, min(num_speculative_steps, max_history or num_speculative_steps, len(rows) - 1) + 1
        ):
            same = (contexts[offset:] == contexts[:-offset]).all(-1) & (
                req_indices[offset:] == req_indices[:-offset]
            )
            repeated[offset:] |= same & (
                local_positions[offset:] == local_positions[:-offset] + offset
            )
    if include_prompt and history_offsets is not None:
        repeated |= (contexts < 0).any(-1)
    return repeated & (req_indices >= 0)


def draft_watermarking_mask(
    all_token_ids: torch.Tensor,
    req_indices: torch.Tensor,
    prompt_lens: torch.Tensor,
    total_lens: torch.Tensor,
    prior_contexts: torch.Tensor,
    contexts: torch.Tensor,
    steps: torch.Tensor,
    enabled: torch.Tensor,
    max_history: int | None,
    include_prompt: bool,
) -> torch.Tensor:
    """Whether the next draft token of each row is watermarked, bool ``[rows]``; its context is
    added to ``prior_contexts``."""
    states = all_token_ids, req_indices, prompt_lens, total_lens
    repeated = repeated_context_mask(
        *states, contexts, max_history, include_prompt, history_offsets=steps
    )
    prior = prior_contexts[: len(contexts)]
    ages = steps[:, None] - torch.arange(prior.shape[1], device=steps.device)
    same = (prior == contexts[:, None]).all(-1) & (ages > 0)
    if max_history is not None:
        same &= ages <= max_history
    prior.scatter_(1, steps[:, None, None].expand(-1, 1, contexts.shape[1]), contexts[:, None])
    return enabled & ~(repeated | same.any(-1))
