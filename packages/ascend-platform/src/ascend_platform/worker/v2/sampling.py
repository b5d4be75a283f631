"""Sampling and log-probabilities of the V2 runner: vLLM's Triton kernels (``gpu/sample/``) in PyTorch."""

from collections.abc import Callable
from typing import Any

import torch

from ascend_platform.vllm_overrides import override


def gumbel_sample(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The most probable token of each row, int64 ``[rows]``; requests with a temperature are refused."""
    return logits.argmax(-1)


def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of these tokens, float32 ``[rows, tokens]``, from logits ``[rows, vocab_size]``."""
    logits = logits.float()
    return logits.gather(-1, token_ids.long()).sub_(logits.logsumexp(-1, keepdim=True))


def rank_tokens(
    ranks: torch.Tensor, logits: torch.Tensor, stride: int, token_ids: torch.Tensor, vocab_size: int, BLOCK_SIZE: int
) -> None:
    """Replaces ``_ranks_kernel``: how many logits are not below the token's, int64 ``[rows]``, written."""
    chosen = logits.gather(-1, token_ids.long().view(-1, 1))
    torch.sum(logits >= chosen, -1, out=ranks)


def get_prompt_logprobs_token_ids(
    num_tokens: int,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    all_token_ids: torch.Tensor,
) -> torch.Tensor:
    """The token that follows each of the step's tokens in its request, int64 ``[num_tokens]``."""
    num_reqs, width = len(idx_mapping), all_token_ids.shape[1]
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=idx_mapping.device)
    rows = torch.bucketize(tokens, query_start_loc[1 : num_reqs + 1], right=True)
    shift = num_computed_tokens.index_select(0, idx_mapping) - query_start_loc[:num_reqs] + 1
    following = (tokens + shift.index_select(0, rows)).clamp(max=width - 1)  # of the last token there is none
    elements = torch.add(following, idx_mapping.index_select(0, rows), alpha=width)
    return all_token_ids.view(-1).index_select(0, elements).long()


_PREFIX = "vllm.v1.worker.gpu.sample.logprob:"

OVERRIDES: dict[str, Callable[..., Any]] = {"_ranks_kernel": rank_tokens}
"""Kernels of ``overrides.OVERRIDES``, and the functions that take their arguments."""


def install() -> None:
    from ascend_platform import triton_overrides

    override("vllm.v1.worker.gpu.sample.gumbel:gumbel_sample", gumbel_sample)
    override("vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs", compute_token_logprobs)
    override("vllm.v1.worker.gpu.sample.prompt_logprob:get_prompt_logprobs_token_ids", get_prompt_logprobs_token_ids)
    triton_overrides.register({_PREFIX + name: function for name, function in OVERRIDES.items()})
