# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Options that trade memory, streams or memory traffic for speed: their values, and the chips and
layouts that they need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ascend_platform import host
from ascend_platform.config import options
from ascend_platform.errors import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def rope_order(vllm_config: Any) -> str:
    """Order of the elements of latent attention's rotated keys in the KV cache: ``pairs``, as in
    the model, or ``halves``.

    KV caches of different orders have the same shape; with ``halves`` the even elements come first.
    """
    return "halves" if options.platform(vllm_config).mla_prolog else "pairs"


def max_decode_tokens(vllm_config: VllmConfig) -> int:
    """Tokens of the largest decode step: one for each request, and its drafts."""
    return vllm_config.scheduler_config.max_num_seqs * (1 + vllm_config.num_speculative_tokens)


def check(vllm_config: VllmConfig) -> None:
    """Refuse options that the chip, the layout or torch.compile does not allow.

    Raises:
        RefusedError: what is not supported, in one line.
    """
    from vllm.config import CompilationMode

    if not options.platform(vllm_config).matmul_all_reduce:
        return
    if vllm_config.compilation_config.mode not in (None, CompilationMode.NONE):
        raise RefusedError(
            "ascend.platform.matmul_all_reduce is not supported with torch.compile; fix: remove"
            ' it, or "cudagraph_mode": "FULL_DECODE_ONLY" in --compilation-config'
        )
    ranks, family = vllm_config.parallel_config.tensor_parallel_size, host.chip_family()
    if ranks not in family.matmul_all_reduce:
        supported = ", ".join(map(str, sorted(family.matmul_all_reduce))) or "none"
        raise RefusedError(
            f"ascend.platform.matmul_all_reduce is not supported with --tensor-parallel-size"
            f" {ranks} on {host.chip()}; supported: {supported}; fix: remove it"
        )
