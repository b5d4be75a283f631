# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Features of both model runners that are not supported."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ascend_platform.config.features import Feature

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def drafts(config: VllmConfig, asked: Callable[[Any], Any]) -> bool:
    """Whether the configuration has draft tokens, and ``asked`` is true of its options."""
    return config.speculative_config is not None and bool(asked(config.speculative_config))


def has_stages(config: VllmConfig) -> bool:
    """Whether the configuration has pipeline stages."""
    return config.parallel_config.pipeline_parallel_size > 1


def _drafts_in_stages(config: VllmConfig) -> bool:
    """Whether a drafter with layers follows a pipeline.

    vLLM makes the drafter of V1 in the last stage and reads it in all (``gpu_model_runner.py``),
    and some with V2 take themselves for a stage, such as ``qwen3_next_mtp.py``.
    """
    others = "ngram", "ngram_gpu"
    return has_stages(config) and drafts(config, lambda it: it.method not in others)


def _other_verification(config: VllmConfig) -> str:
    options = config.speculative_config
    method = getattr(options, "rejection_sample_method", "") if options is not None else ""
    return method if method in ("block", "fly") else ""


def _drafts_by_pangu(config: VllmConfig) -> bool:
    """Whether the drafter is openPangu's MTP module: vLLM's drafter asks its decoder layer
    for ``use_sequence_parallel_moe``, which only DeepSeek's layer defines."""
    options = config.speculative_config
    if options is None or options.draft_model_config is None:  # None with n-grams.
        return False
    return "OpenPanguMTPModel" in options.draft_model_config.architectures


FEATURES = (
    Feature(
        "dflash drafters, which need non-causal attention",
        lambda config: drafts(config, lambda it: it.use_dflash()),
        fix="choose another method",
    ),
    Feature(
        "gemma4_mtp drafters, which capture CUDA graphs of their own",
        lambda config: drafts(config, lambda it: it.use_gemma4_mtp()),
        fix="choose another method",
    ),
    Feature(
        "openPangu's MTP, which fails in vLLM's drafter",
        _drafts_by_pangu,
        fix="choose another method",
    ),
    Feature("block verification and FLy of draft tokens", _other_verification),
    Feature(
        "speculative decoding other than by n-grams with pipeline parallelism",
        _drafts_in_stages,
        fix="--pipeline-parallel-size 1 with a larger --tensor-parallel-size, or leave"
        " --speculative-config out",
    ),
    # Of vLLM 0.33's V2 model runner; V1 would ignore both options.
    Feature(
        "sampling masks",
        lambda config: getattr(config.model_config, "return_sampling_mask", False),
        of_model=True,
    ),
    Feature(
        "trace replay",
        lambda config: getattr(config.model_config, "enable_trace_replay", False),
        of_model=True,
    ),
)
