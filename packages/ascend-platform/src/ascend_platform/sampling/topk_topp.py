"""Sampling, with top-k and top-p or without, in two operators where the chip has them.

npu_sim_exponential_ makes the noise, and npu_top_k_top_p_sample all the rest. What comes before is vLLM's, in PyTorch: penalties,
bias, bad words, min-p, temperature. The operators' shapes, dtypes and limits are those of ``torch_npu/_op_plugin_docs.py`` in the
torch_npu wheel.
"""

import weakref
from typing import Any

import torch
import torch_npu
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from ascend_platform import extension
from ascend_platform.vllm_overrides import override

MOST_K = 1024
"""The operator takes a larger k as none at all."""


class NPUTopKTopPSampler(torch.nn.Module):
    """vLLM's TopKTopPSampler (``vllm/v1/sample/ops/topk_topp_sampler.py``), which keeps what the operators do not take.

    Of logits that are equal to the k-th largest, vLLM's implementation keeps all; the operator keeps k in total.
    """

    def __init__(self, native: TopKTopPSampler, runner: Any) -> None:
        super().__init__()
        self.native = native
        # its input_batch, which it replaces, has each request's k on the host; a former engine's runner must be able to go
        self.runner = weakref.proxy(runner)
        self.in_float64 = getattr(native, "use_fp64_gumbel", False)

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sampled tokens, int64 ``[requests]``, and the processed logits or log-probabilities if they are asked for.

        Args:
            logits: float32 ``[requests, vocabulary]``.
            generators: those of the requests with a seed of their own.
            k: int32 ``[requests]``, the vocabulary's size where a request has none.
            p: float32 ``[requests]``, 1 where a request has none.
        """
        if self.in_float64 or not self.takes(k):
            return self.native(logits, generators, k, p)
        noise = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        if len(generators) < len(noise):
            torch_npu.npu_sim_exponential_(noise)
        for row, generator in generators.items():
            torch_npu.npu_sim_exponential_(noise[row], generator=generator)
        mode = self.native.logprobs_mode
        wanted = mode.startswith("processed")
        tokens, processed = _operator(logits, k, p, q=noise, is_need_logits=wanted)
        if not wanted:
            return tokens, None
        return tokens, processed.log_softmax(-1) if mode == "processed_logprobs" else processed

    def restrict(self, logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        """The logits ``[rows, vocabulary]``, those that top-k and top-p leave out at minus infinity; k and p ``[rows]``."""
        if (k is None and p is None) or not self.takes(k):
            return apply_top_k_top_p(logits, k, p)
        return _operator(logits, k, p, is_need_logits=True)[1]

    def takes(self, k: torch.Tensor | None) -> bool:
        """Whether every request's k is one that the operator takes, or none."""
        if k is None:
            return True
        batch = self.runner.input_batch
        asked = batch.top_k_cpu[: batch.num_reqs]
        return not ((asked > MOST_K) & (asked < batch.vocab_size)).any()


def _operator(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, **options: Any) -> Any:
    rows = logits.shape[0]
    if k is None:
        k = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    p = torch.ones(rows, dtype=logits.dtype, device=logits.device) if p is None else p.to(logits.dtype)
    return torch_npu.npu_top_k_top_p_sample(logits, k.int(), p, **options)


_active: NPUTopKTopPSampler | None = None
"""The sampler of the engine whose rejection sampler ran last; a process may have several engines."""


def _restrict(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """The rejection sampler's top-k and top-p: ``apply_top_k_top_p`` of vLLM."""
    return apply_top_k_top_p(logits, k, p) if _active is None else _active.restrict(logits, k, p)


def install(runner: Any) -> None:
    """Give a model runner this sampler, and its rejection sampler the operator, where the chip has the operators."""
    if not extension.chip().family.top_k_top_p:
        return
    sampler = runner.sampler.topk_topp_sampler = NPUTopKTopPSampler(runner.sampler.topk_topp_sampler, runner)
    if (rejection := getattr(runner, "rejection_sampler", None)) is not None:
        override("vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p", _restrict)

        def activate(*_: object) -> None:
            global _active
            _active = sampler

        rejection.register_forward_pre_hook(activate)
