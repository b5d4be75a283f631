# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Top-k, top-p and random sampling with two fused operators, on chips that have them.

npu_sim_exponential_ draws the noise, npu_top_k_top_p_sample does the rest. The steps before are
vLLM's, in PyTorch: penalties, bias, bad words, min-p, temperature. Shapes, dtypes and limits of the
operators are those of ``torch_npu/_op_plugin_docs.py`` in the torch_npu wheel.
"""

import functools
from typing import Any

import numpy as np
import torch
import torch_npu

from ascend_platform.chips import chip

MAX_TOP_K = 1024
"""The operator ignores a larger k."""


def supports(top_k: np.ndarray, vocab_size: int) -> bool:
    """Whether the chip has the operators, and they support every request's k, ``vocab_size`` for
    requests without top-k."""
    return has_operators() and not ((top_k > MAX_TOP_K) & (top_k < vocab_size)).any()


@functools.cache
def has_operators() -> bool:
    """Whether this process's chip has the operators."""
    return chip().family.top_k_top_p


def top_k_top_p_sample(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, **options: Any
) -> Any:
    rows = logits.shape[0]
    if k is None:
        k = torch.zeros(rows, dtype=torch.int32, device=logits.device)
    p = (
        torch.ones(rows, dtype=logits.dtype, device=logits.device)
        if p is None
        else p.to(logits.dtype)
    )
    return torch_npu.npu_top_k_top_p_sample(logits, k.int(), p, **options)
