# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The option ``ascend.platform.mla_prolog``: npu_mla_prolog_v3 before the attention of latent
attention's decodes.

The operator stores the rotated part of a key with its even elements first, as halves; vLLM's layers
leave them in pairs. With the option all steps of an engine store halves, so that only the option
determines the contents of the KV cache. The operator's limits are those of op-plugin's page for
CANN 9.1 (branch 26.1.0); the page in the torch_npu wheel is older and has fewer sizes.
"""

from typing import TYPE_CHECKING

from ascend_platform import host, options
from ascend_platform.attention import selector
from ascend_platform.config import architectures
from ascend_platform.errors import RefusedError
from ascend_platform.plugins import registry, slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SLOT = "attention.latent_layer"
OPERATOR = "npu_mla_prolog_v3"
SIZES = {
    "hidden_size": (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192),
    "q_lora_rank": (1536, 2048),
    "kv_lora_rank": (512,),
    "qk_nope_head_dim": (128, 192),
    "qk_rope_head_dim": (64,),
    "num_attention_heads": tuple(2**power for power in range(8)),
}
"""Sizes that the operator supports, by the name in the model's configuration."""


def check(vllm_config: "VllmConfig") -> None:
    """Refuse the option for models that the operator does not take, and without ascend-attention.

    Raises:
        RefusedError: what was found and what is supported, in one line.
    """
    if not options.of(options.Platform, vllm_config).mla_prolog:
        return
    import torch

    model = vllm_config.model_config
    found = ""
    if model is None or not model.use_mla or architectures.has_sparse_attention(model):
        found = "a model without latent attention, or with sparse latent attention"
    elif model.dtype != torch.bfloat16:
        found = f"--dtype {str(model.dtype).removeprefix('torch.')}; supported: bfloat16"
    else:
        sizes = {name: getattr(model.hf_text_config, name, None) for name in SIZES}
        wrong = next((name for name, size in sizes.items() if size not in SIZES[name]), "")
        if wrong:
            found = f"{wrong} {sizes[wrong]}; supported: {', '.join(map(str, SIZES[wrong]))}"
        elif not slots.offered(SLOT):
            found = f"ascend-attention {registry.state('ascend-attention')}"
    if found:
        refused = f"ascend.platform.mla_prolog is not supported with {found}"
        raise RefusedError(f"{refused}; fix: remove it")


def describe(vllm_config: "VllmConfig") -> str:
    """Addition of the operator to the summary line; "" without the option."""
    if not options.of(options.Platform, vllm_config).mla_prolog:
        return ""
    if reason := reason_against(vllm_config):
        return f", {OPERATOR} disabled: {reason}"
    where = " in layers with bfloat16 or W8A8_DYNAMIC projections"
    where *= vllm_config.quant_config is not None
    return f", decodes with {OPERATOR}{where}"


def is_used(vllm_config: "VllmConfig") -> bool:
    """Whether decodes with latent attention compute what precedes the attention by the operator."""
    return options.of(options.Platform, vllm_config).mla_prolog and not reason_against(vllm_config)


def reason_against(vllm_config: "VllmConfig") -> str:
    """Why an engine with the option does not use the operator; "" if it does, unless its layers are
    quantized."""
    from vllm.config import CompilationMode

    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    reasons = {
        f"{host.chip()} has no {OPERATOR}": bool(host.chip_family().lacks(OPERATOR)),
        "torch.compile": vllm_config.compilation_config.mode not in (None, CompilationMode.NONE),
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "LoRA": vllm_config.lora_config is not None,
        "a prefill instance": transfer is not None and transfer.kv_role == "kv_producer",
        "built-in attention": not selector.is_fused(vllm_config),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
