# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The V1 runner's sampler and rejection sampler on the fused operators of top-k and top-p."""

import weakref
from contextvars import ContextVar
from typing import Any

import torch
import torch_npu
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from ascend_platform.overrides.guard import override
from ascend_platform.sampling import topk_topp


class NPUTopKTopPSampler(torch.nn.Module):
    """TopKTopPSampler on the fused operators, with vLLM's
    (``vllm/v1/sample/ops/topk_topp_sampler.py``) as a fallback.

    vLLM's implementation keeps all logits equal to the k-th largest; the operator keeps exactly k.
    """

    def __init__(self, native: TopKTopPSampler, runner: Any) -> None:
        super().__init__()
        self.native = native
        # runner.input_batch, which is sometimes replaced, has top-k on the host. It is a proxy, so
        # that the runner can be freed.
        self.runner = weakref.proxy(runner)
        self.uses_float64 = getattr(native, "use_fp64_gumbel", False)

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample one token per request.

        Args:
            logits: float32 ``[requests, vocab_size]``.
            generators: by row, for requests with a seed.
            k: int32 ``[requests]``, vocab_size for requests without top-k.
            p: float32 ``[requests]``, 1 for requests without top-p.

        Returns:
            Token ids int64 ``[requests]``, and the processed logits or log-probabilities if
            ``logprobs_mode`` needs them.
        """
        if self.uses_float64 or not self.supports(k):
            return self.native(logits, generators, k, p)
        noise = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        if len(generators) < len(noise):
            torch_npu.npu_sim_exponential_(noise)
        for row, generator in generators.items():
            torch_npu.npu_sim_exponential_(noise[row], generator=generator)
        mode = self.native.logprobs_mode
        need_logits = mode.startswith("processed")
        tokens, processed = topk_topp.top_k_top_p_sample(
            logits, k, p, q=noise, is_need_logits=need_logits
        )
        if not need_logits:
            return tokens, None
        return tokens, processed.log_softmax(-1) if mode == "processed_logprobs" else processed

    def mask_logits(
        self, logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> torch.Tensor:
        """Mask logits ``[rows, vocab_size]`` outside of top-k and top-p with minus infinity; k and
        p are ``[rows]``."""
        if not len(logits):  # No request has draft tokens; the operator needs a row.
            return logits
        if (k is None and p is None) or not self.supports(k):
            return apply_top_k_top_p(logits, k, p)
        return topk_topp.top_k_top_p_sample(logits, k, p, is_need_logits=True)[1]

    def supports(self, k: torch.Tensor | None) -> bool:
        """Whether the operator supports every request's k."""
        batch = self.runner.input_batch
        return k is None or topk_topp.supports(batch.top_k_cpu[: batch.num_reqs], batch.vocab_size)


_active: ContextVar[NPUTopKTopPSampler | None] = ContextVar("top-k top-p sampler", default=None)
"""The sampler of the engine whose rejection sampler runs; a process may have several engines."""


def _mask_logits(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """Replacement of vLLM's ``apply_top_k_top_p`` for the rejection sampler."""
    active = _active.get()
    return apply_top_k_top_p(logits, k, p) if active is None else active.mask_logits(logits, k, p)


def install(runner: Any) -> None:
    """Use the fused operators in a model runner's sampler and rejection sampler, on chips that have
    them."""
    if not topk_topp.has_operators():
        return
    sampler = runner.sampler.topk_topp_sampler = NPUTopKTopPSampler(
        runner.sampler.topk_topp_sampler, runner
    )
    if (rejection := getattr(runner, "rejection_sampler", None)) is not None:
        override("vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p", _mask_logits)

        def activate(*_: object) -> None:
            _active.set(sampler)

        rejection.register_forward_pre_hook(activate)
