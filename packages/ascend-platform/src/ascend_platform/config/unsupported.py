# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Every refusal of a configuration, and the features of vLLM that are refused by name."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_platform import quantization
from ascend_platform.attention import selector
from ascend_platform.config import (
    architectures,
    compilation,
    devices,
    kv_connectors,
    main_module,
    mla_prolog,
    model_runner,
    options,
    state_layers,
)
from ascend_platform.config.features import Feature
from ascend_platform.errors import RefusedError
from ascend_platform.overrides import guard
from ascend_platform.plugins import registry, requirements, slots
from ascend_platform.process import sockets

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _offloads_weights(config: VllmConfig) -> Any:
    offload = config.offload_config
    return offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size


def _fuses(config: VllmConfig) -> bool:
    passes = config.compilation_config.pass_config
    names = {
        field.name
        for field in dataclasses.fields(passes)
        if field.name.startswith(("fuse_", "enable_"))
    }
    return any(getattr(passes, name) is True for name in names - {"fuse_norm_quant"})


def _other_lora_on_experts(config: VllmConfig) -> str:
    lora, parallel = config.lora_config, config.parallel_config
    if not lora or not config.model_config.is_moe:
        return ""
    if lora.target_modules is not None and not any(
        target.rpartition(".")[2] == "experts" for target in lora.target_modules
    ):
        return ""
    others = {
        "data parallelism, whose ranks have different adapters in a slot": (
            parallel.data_parallel_size > 1
        ),
        "--enable-eplb, which moves experts without their adapters": parallel.enable_eplb,
        "--fully-sharded-loras": lora.fully_sharded_loras,
        "--enable-moe-shared-loras": getattr(lora, "enable_moe_shared_loras", False),
    }
    return ", ".join(name for name, asked in others.items() if asked)


def _other_cache_dtype(config: VllmConfig) -> str:
    dtype = config.cache_config.cache_dtype
    return "" if dtype in ("auto", str(config.model_config.dtype).split(".")[-1]) else dtype


def _needs_other_runner(config: VllmConfig) -> bool:
    return bool(getattr(config, "watermark_config", None) and not model_runner.choice(config).is_v2)


def _routed_experts(config: VllmConfig) -> str:
    """vLLM leaves this check to platforms that are not its own (``vllm/config/vllm.py``,
    _verify_aux_output_compatibility)."""
    if not config.aux_output_config.enabled or model_runner.choice(config).is_v2:
        return ""
    return "fix: leave the option out, or serve with V2, the default from vLLM 0.33 on"


def _other_encoder_cache(config: VllmConfig) -> bool:
    given = config.ec_transfer_config
    if given is None:
        return False
    return given.ec_connector != "ECExampleConnector" or not model_runner.choice(config).is_v2


def _has_agnostic_layers(config: VllmConfig) -> bool:
    # Since vLLM 0.32; read by the Transformers backend's models.
    return bool(getattr(envs, "VLLM_USE_HW_AGNOSTIC", False))


def _shards_sparse_context(config: VllmConfig) -> bool:
    return config.parallel_config.decode_context_parallel_size > 1 and selector.is_sparse(
        config.model_config
    )


def _other_image_attention(config: VllmConfig) -> bool:
    model, compared = config.model_config, ("Gemma3For", "Gemma4", "PaliGemmaFor")
    return model.is_mm_prefix_lm and not model.architecture.startswith(compared)


def _shards_image_context(config: VllmConfig) -> bool:
    shards = config.parallel_config.decode_context_parallel_size
    return shards > 1 and config.model_config.is_mm_prefix_lm


def _other_prefill_context(config: VllmConfig) -> str:
    """Features that prefill context parallelism is not supported with; vLLM has it in its V2
    runner."""
    from vllm.config import CUDAGraphMode

    parallel, model = config.parallel_config, config.model_config
    if parallel.prefill_context_parallel_size == 1 or model is None:
        return ""
    supported = CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY
    mode, own = config.compilation_config.cudagraph_mode, options.platform(config)
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


def _scaled_residual(config: VllmConfig) -> str:
    """openPangu's layers scale the residual, while their norms undo the scale of what is added to
    it (``openpangu.py``)."""
    text = config.model_config.hf_text_config
    scale = getattr(text, "routed_scaling_factor", None) or 1
    is_half = str(config.model_config.dtype) == "torch.float16"
    if not is_half or scale == 1 or not getattr(text, "sandwich_norm", False):
        return ""
    return f"routed_scaling_factor {scale}; fix: --dtype bfloat16"


def _other_placement(config: VllmConfig) -> str:
    strategy = config.parallel_config.expert_placement_strategy
    return "" if strategy == "linear" else strategy


def _other_profiler(config: VllmConfig) -> str:
    profiler = config.profiler_config.profiler
    return "" if profiler in (None, "torch") else profiler


def _other_kernels(config: VllmConfig) -> str:
    """Kernels that vLLM selects on CUDA and ROCm devices, and would ignore here."""
    names = ("moe_backend", "linear_backend", "sparse_indexer_topk_backend")
    kernels = {name: getattr(config.kernel_config, name, None) for name in names}
    # vLLM's default
    kernels["mamba_backend"] = config.mamba_config.backend.name.lower().replace("triton", "auto")
    if isinstance(config.additional_config, dict):
        kernels["gdn_prefill_backend"] = config.additional_config.get("gdn_prefill_backend")
    used = {name: value for name, value in kernels.items() if value not in (None, "auto")}
    return ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in used.items())


def _other_weight_transfer(config: VllmConfig) -> str:
    backend = getattr(config.weight_transfer_config, "backend", "")
    others = ("nccl", "ipc", "sparse_nccl", "nccl_m2n", "sharded_rdt")
    return backend if backend in others else ""


def _other_sleep(config: VllmConfig) -> str:
    model = config.model_config
    names = ("sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend")
    used = [name for name in names if getattr(model, name, False)]
    if model.sleep_mode_backend != "cumem":
        used.append(f"sleep_mode_backend {model.sleep_mode_backend}")
    return ", ".join(f"--{name.replace('_', '-')}" for name in used)


def _other_expert_transfer(config: VllmConfig) -> str:
    parallel = config.parallel_config
    way = getattr(parallel.eplb_config, "communicator", None) if parallel.enable_eplb else None
    if way in (None, "torch_gloo", "torch_nccl"):
        return ""
    # vLLM chooses nixl by itself where that package is installed.
    return f"""{way}; fix: --eplb-config '{{"communicator": "torch_gloo"}}'"""


FEATURES = (
    Feature(
        "encoder-cache connectors other than ECExampleConnector with vLLM's V2 model runner",
        _other_encoder_cache,
    ),
    Feature("weight offloading", _offloads_weights),
    Feature(
        "prefill context parallelism other than for decoders with vLLM's V2 model runner",
        _other_prefill_context,
    ),
    Feature("elastic expert parallelism", lambda config: config.parallel_config.enable_elastic_ep),
    Feature(
        "--enable-fault-tolerance", lambda config: config.parallel_config.enable_fault_tolerance
    ),
    Feature("dual batch overlap", lambda config: config.parallel_config.use_ubatching),
    Feature(
        "VLLM_USE_HW_AGNOSTIC (layers other than those that have NPU forms)", _has_agnostic_layers
    ),
    Feature(
        "--enable-layerwise-nvtx-tracing, for NVIDIA's profiler (--profiler-config '{\"profiler\":"
        ' "torch"}\' traces operators)',
        lambda config: config.observability_config.enable_layerwise_nvtx_tracing,
    ),
    Feature("profilers other than torch", _other_profiler),
    Feature("kernels of other devices", _other_kernels),
    Feature(
        "weight transfer of CUDA devices (hccl is ascend-communicator's)", _other_weight_transfer
    ),
    Feature(
        "expert load balancing by communicators other than torch_gloo and torch_nccl",
        _other_expert_transfer,
    ),
    Feature("sleep options of other devices", _other_sleep, of_model=True),
    Feature("batch invariance", lambda config: envs.VLLM_BATCH_INVARIANT),
    Feature("vLLM's V2 model runner, which watermarking needs", _needs_other_runner),
    Feature("--enable-return-routed-experts with vLLM's V1 model runner", _routed_experts),
    Feature("fusions by torch.compile other than fuse_norm_quant", _fuses),
    Feature(
        "LoRA on experts beyond tensor and expert parallelism (--lora-target-modules without"
        " experts serves the other layers)",
        _other_lora_on_experts,
        of_model=True,
    ),
    Feature(
        "LoRA on encoder-decoder models, of which vLLM knows the adapters of the decoder's tokens"
        " only",
        lambda config: config.lora_config and config.model_config.is_encoder_decoder,
        of_model=True,
    ),
    Feature(
        "LoRA with --kv-sharing-fast-prefill, whose last layers compute some tokens only",
        lambda config: config.lora_config and config.cache_config.kv_sharing_fast_prefill,
    ),
    Feature("KV cache dtypes other than the model's", _other_cache_dtype, of_model=True),
    Feature(
        "decode context parallelism with sparse latent attention (DSA), whose operator has no"
        " log-sum-exp over pages",
        _shards_sparse_context,
        of_model=True,
    ),
    Feature(
        "sandwich norms in float16, which vLLM computes wrongly", _scaled_residual, of_model=True
    ),
    Feature(
        "bidirectional attention between the tokens of an image beyond those of Gemma 3, Gemma 4 and"
        " PaliGemma (--limit-mm-per-prompt '{\"image\": 0}' serves the text model)",
        _other_image_attention,
        of_model=True,
    ),
    Feature(
        "decode context parallelism with bidirectional attention between the tokens of an image",
        _shards_image_context,
        of_model=True,
    ),
    Feature("expert placement strategies other than linear", _other_placement, of_model=True),
    Feature(
        "other architectures with state-space or linear attention layers",
        state_layers.other_architecture,
        of_model=True,
    ),
    Feature(
        "options with state-space and linear attention layers",
        state_layers.other_options,
        of_model=True,
    ),
)


def check(vllm_config: VllmConfig) -> None:
    """Refuse what is not supported. Nothing outside of the configuration is changed, so that a
    program may go on after a refusal.

    Raises:
        RefusedError: what is not supported, in one line.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    guard.check("common")
    main_module.check()
    if model is not None:
        architectures.check(model.architecture)
    quantization.check_weights(model)
    model_runner.check(vllm_config)
    architectures.check_chip(vllm_config)
    check_features(vllm_config)
    kv_connectors.check(vllm_config)
    check_drafts(vllm_config.speculative_config)
    check_load_format(vllm_config.load_config, vllm_config.quant_config is not None)
    devices.check(parallel)
    sockets.check_loopback(parallel)
    compilation.check(vllm_config)
    mla_prolog.check(vllm_config)
    if parallel.distributed_executor_backend != "external_launcher":
        sockets.check_directory()
    check_communicator(vllm_config)
    check_weight_transfer(vllm_config.weight_transfer_config)
    options.check(vllm_config.additional_config)


def check_features(vllm_config: VllmConfig) -> None:
    """Refuse all features asked for that are not supported.

    Raises:
        RefusedError: their names, in one line.
    """
    refused = []
    for feature in FEATURES:
        if feature.of_model and vllm_config.model_config is None:
            continue
        if asked := feature.asked(vllm_config):
            refused.append(f"{feature.name} ({asked})" if isinstance(asked, str) else feature.name)
    if refused:
        own = f"ascend-platform {requirements.version('ascend-platform')}"
        names = ", ".join(refused)
        raise RefusedError(f"{own} does not support {names} yet; fix: leave it out")


SHARDED_STATES = ("sharded_state", "runai_streamer_sharded")
"""Load formats that copy what an engine has saved to the parameters, without their weight loaders."""


def check_load_format(load_config: Any, is_quantized: bool = False) -> None:
    """Check --load-format, and its options by the function that its component offers.

    Raises:
        RefusedError: wrong options, a load format whose component is not active, or a sharded state
            of quantized weights.
    """
    if is_quantized and load_config.load_format in SHARDED_STATES:
        raise RefusedError(
            f"--load-format {load_config.load_format} supports unquantized weights: a sharded state"
            " is saved after the weights are processed for the NPU, and loading would process them"
            " again; fix: load the checkpoint, or load weights from a peer"
        )
    if check := slots.offered(f"load_options.{load_config.load_format}"):
        resolve_obj_by_qualname(check)(load_config.model_loader_extra_config)
    elif load_config.load_format in ("ascend_peer", "netloader"):
        raise RefusedError(
            f"--load-format {load_config.load_format} needs"
            f" {registry.with_state('ascend-model-loader')}"
        )


def check_weight_transfer(config: Any) -> None:
    """Refuse weight transfer by HCCL without the component that offers it.

    Raises:
        RefusedError: the component's distribution, and its state.
    """
    if getattr(config, "backend", "") == "hccl" and not slots.offered("weight_transfer.hccl"):
        raise RefusedError(
            f"weight transfer by hccl needs {registry.with_state('ascend-communicator')}"
        )


def check_drafts(config: Any) -> None:
    """Refuse drafters that are not supported with any model runner.

    Raises:
        RefusedError: the method by its name, and why.
    """
    draft = config and config.draft_model_config  # No model with n-grams.
    if draft and "OpenPanguMTPModel" in draft.architectures:
        raise RefusedError(
            "speculative decoding with openPangu's MTP is not supported: vLLM's drafter asks its"
            " decoder layer for use_sequence_parallel_moe, which only DeepSeek's has; fix: choose another"
            " method"
        )


def check_communicator(vllm_config: VllmConfig) -> None:
    """Refuse expert parallelism over data-parallel engines without ascend-communicator.

    Raises:
        RefusedError: the component's state, and what makes it active.
    """
    model, offered = vllm_config.model_config, slots.offered("communicator")
    if model and model.is_moe and vllm_config.parallel_config.use_all2all and not offered:
        raise RefusedError(
            "expert parallelism over data-parallel engines needs"
            f" {registry.with_state('ascend-communicator')}"
        )
