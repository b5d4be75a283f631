"""Features of vLLM that this version refuses by name."""

import dataclasses
from typing import TYPE_CHECKING, Any

from vllm import envs

from ascend_platform import extension

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check(vllm_config: "VllmConfig") -> None:
    """Refuse what comes in later versions.

    Raises:
        RefusedError: everything asked for that is not supported, in one line.
    """
    if refused := [what for what, asked in _later_features(vllm_config).items() if asked]:
        raise extension.RefusedError(
            f"ascend-platform {extension.version('ascend-platform')} serves models without {', '.join(refused)}; these come later"
        )


def check_communicator(vllm_config: "VllmConfig") -> None:
    """Refuse experts of several data-parallel engines without ascend-communicator.

    Raises:
        RefusedError: what to install or to name in VLLM_PLUGINS.
    """
    model, offered = vllm_config.model_config, extension.offered("communicator")
    if model and model.is_moe and vllm_config.parallel_config.use_all2all and not offered:
        raise extension.RefusedError(
            "experts of several data-parallel engines need ascend-communicator, which is "
            f"{extension.state('ascend-communicator')}; install it, and let VLLM_PLUGINS name ascend_communicator"
        )


def _later_features(vllm_config: "VllmConfig") -> dict[str, Any]:
    """What comes in later versions, and whether it is asked for."""
    parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
    offload, passes = vllm_config.offload_config, vllm_config.compilation_config.pass_config
    features: dict[str, Any] = {
        "encoder-cache connectors": vllm_config.ec_transfer_config,
        "weight offloading": offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "elastic expert parallelism": parallel.enable_elastic_ep,
        "fault tolerance by instruction (--enable-fault-tolerance)": parallel.enable_fault_tolerance,
        "dual batch overlap": parallel.use_ubatching,
        "batch invariance": envs.VLLM_BATCH_INVARIANT,
        "vLLM's second model runner, which watermarking needs": vllm_config.use_v2_model_runner,
        "fusions by torch.compile other than fuse_norm_quant": any(
            getattr(passes, field.name) is True
            and field.name.startswith(("fuse_", "enable_"))
            and field.name != "fuse_norm_quant"
            for field in dataclasses.fields(passes)
        ),
    }
    if model is not None:
        targets = vllm_config.lora_config.target_modules if vllm_config.lora_config else None
        features |= {
            "LoRA on experts (--lora-target-modules without experts serves the other layers)": vllm_config.lora_config
            and model.is_moe
            and (targets is None or any(target.rpartition(".")[2] == "experts" for target in targets)),
            f"a KV cache of {cache.cache_dtype}": cache.cache_dtype not in ("auto", str(model.dtype).split(".")[-1]),
            "MLA": model.use_mla,
            f"experts placed {parallel.expert_placement_strategy}": parallel.expert_placement_strategy != "linear",
            "state-space layers": model.is_hybrid or model.is_attention_free,
        }
    return features
