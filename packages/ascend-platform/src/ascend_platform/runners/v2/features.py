# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Features that the V2 model runner does not support on NPUs, and prefill context parallelism, which
it has for some models."""

from __future__ import annotations

import contextlib
import importlib.metadata
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ascend_platform import options
from ascend_platform.config import model_runner, state_layers
from ascend_platform.config.features import V2, Feature
from ascend_platform.runners.features import drafts

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _logits_processors(config: VllmConfig) -> Iterator[Any]:
    """Those of the configuration and of installed plugins; vLLM reports what cannot be loaded."""
    for processor in config.model_config.logits_processors or ():
        with contextlib.suppress(Exception):
            yield pkgutil.resolve_name(processor) if isinstance(processor, str) else processor
    for point in importlib.metadata.entry_points(group="vllm.logits_processors"):
        with contextlib.suppress(Exception):
            yield point.load()


def _has_v1_logits_processors(config: VllmConfig) -> bool:
    if config.model_config.runner_type == "pooling":  # which vLLM refuses with any
        return False
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

    return any(
        isinstance(each, type) and not issubclass(each, LogitsProcessor)
        for each in _logits_processors(config)
    )


def _pools_by_plugin(config: VllmConfig) -> bool:
    """Whether the pooling task is that of a plugin, which V2 lacks
    (``vllm/v1/worker/gpu/pool/pooling_runner.py``)."""
    pooler, architecture = config.model_config.pooler_config, config.model_config.architecture
    if not pooler:
        return False
    return pooler.task == "plugin" or (not pooler.task and architecture == "Terratorch")


def _other_prefill_context(config: VllmConfig) -> str:
    """Features that prefill context parallelism is not supported with; vLLM supports it in its
    V2 runner."""
    from vllm.config import CUDAGraphMode

    parallel, model = config.parallel_config, config.model_config
    if parallel.prefill_context_parallel_size == 1 or model is None:
        return ""
    supported = CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY
    mode, own = config.compilation_config.cudagraph_mode, options.of(options.Platform, config)
    others = {
        "vLLM's V1 model runner": not model_runner.choice(config).is_v2,
        "state-space or linear attention layers": state_layers.has_states(config),
        "encoder-decoder models": model.is_encoder_decoder,
        "pooling models": model.runner_type == "pooling",
        "images, audio and video": model.supports_multimodal_inputs,
        # vLLM takes a request's part at its number of computed tokens, for a rank's parts too.
        "M-RoPE": model.uses_mrope,
        "prompts given as embeddings": model.enable_prompt_embeds,
        "chunked local attention": getattr(model.hf_text_config, "attention_chunk_size", None),
        "data parallelism": parallel.data_parallel_size > 1,
        "expert load balancing": parallel.enable_eplb,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "speculative decoding": config.speculative_config,
        "LoRA": config.lora_config,
        "KV connectors": config.kv_transfer_config,
        "int8 caches of sparse attention": "int8" in (own.index_cache, own.latent_cache),
        "graph modes other than FULL_DECODE_ONLY": mode not in supported,
    }
    return ", ".join(name for name, asked in others.items() if asked)


FEATURES = (
    Feature(
        "dspark drafters",
        lambda config: drafts(config, lambda it: it.use_dspark()),
        runners=V2,
    ),
    Feature(
        "MTP with several modules",
        lambda config: drafts(config, lambda it: it.use_multi_module_mtp()),
        runners=V2,
    ),
    Feature(
        "extract_hidden_states",
        lambda config: drafts(config, lambda it: it.method == "extract_hidden_states"),
        runners=V2,
    ),
    Feature(
        "adaptive draft verification",
        lambda config: drafts(config, lambda it: it.enable_adaptive_verification),
        runners=V2,
    ),
    Feature(
        "batch-sharded sampling",
        lambda config: config.parallel_config.enable_batch_sharded_sampling,
        runners=V2,
    ),
    Feature(
        "KV-sharing fast prefill",
        lambda config: config.cache_config.kv_sharing_fast_prefill,
        runners=V2,
    ),
    Feature(
        "logits processors with V1's interface",
        _has_v1_logits_processors,
        of_model=True,
        runners=V2,
    ),
    Feature("the pooling task plugin", _pools_by_plugin, of_model=True, runners=V2),
    Feature(
        "prefill context parallelism other than for decoders with vLLM's V2 model runner",
        _other_prefill_context,
    ),
)
