# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Attention backend selection: the backend offered by a component, or the built-in one as a
fallback."""

from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_platform import host
from ascend_platform.attention.base import AttentionFeature
from ascend_platform.config import architectures
from ascend_platform.errors import RefusedError
from ascend_platform.plugins import registry, requirements, slots

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

BUILT_IN = {
    "dense": "ascend_platform.attention.paged.PagedAttentionBackend",
    "sinks": "ascend_platform.attention.paged.PagedAttentionBackend",
    "encoder": "ascend_platform.attention.encoder.EncoderAttentionBackend",
    "latent": "ascend_platform.attention.latent.PagedLatentAttentionBackend",
    "latent_sparse": "ascend_platform.attention.sparse_latent.PagedSparseLatentAttentionBackend",
}
"""The built-in backend of each slot."""


def select_backend(config: "AttentionSelectorConfig", model: Any) -> tuple[str, str]:
    """Select the attention backend of a layer, of vLLM's current configuration.

    The backend that is offered for the layer's slot is used if it supports the layer, otherwise the
    built-in one.

    Returns:
        The backend's qualified name, and a description with the reason of a fallback.

    Raises:
        RefusedError: neither backend supports the layer.
    """
    slot = "sinks" if config.has_sink else "dense"
    if config.attn_type == "encoder_only":
        slot = "encoder"
    if config.use_mla:
        slot = "latent_sparse" if config.use_sparse else "latent"
    built_in = BUILT_IN[slot]
    reason = f"ascend-attention is {registry.state('ascend-attention')}"
    if path := _offered(slot):
        reasons = _unsupported_reasons(path, config, model)
        if not reasons:
            return path, f"fused (ascend-attention {requirements.version('ascend-attention')})"
        reason = f"fused attention disabled: {', '.join(reasons)}"
    if reasons := _unsupported_reasons(built_in, config, model):
        own = f"no attention backend of ascend-platform {requirements.version('ascend-platform')}"
        why = ", ".join(reasons)
        raise RefusedError(f"{own} supports the model: {why}; fix: serve another model")
    return built_in, f"built-in PyTorch ({reason})"


def _offered(slot: str) -> str | None:
    """The backend offered for a slot: of this chip's order of the KV cache, if the chip supports
    its operators."""
    fractal = slots.offered(f"attention.{slot}_fractal")
    if fractal and not _lacking(resolve_obj_by_qualname(fractal)):
        return fractal
    return slots.offered(f"attention.{slot}")


def _lacking(backend: Any) -> list[str]:
    """Operators of a backend that this process's chip does not have."""
    return host.chip_family().lacks(*getattr(backend.get_impl_cls(), "operators", ()))


_WITH_ALIBI = ("Step1ForCausalLM",)
"""Architectures with ALiBi that vLLM's ``ModelConfig.uses_alibi`` does not know."""


def _unsupported_reasons(path: str, config: "AttentionSelectorConfig", model: Any) -> list[str]:
    backend = resolve_obj_by_qualname(path)
    # vLLM passes these only to the layer; AttentionSelectorConfig lacks them.
    requested = []
    if model is not None and (model.uses_alibi or model.architecture in _WITH_ALIBI):
        requested.append(AttentionFeature.ALIBI)
    if model is not None and getattr(model.hf_text_config, "attn_logit_softcapping", None):
        requested.append(AttentionFeature.LOGITS_SOFT_CAP)
    impl = backend.get_impl_cls()
    lacking = _lacking(backend)
    missing = [feature for feature in requested if feature not in getattr(impl, "serves", ())]
    reasons = backend.validate_configuration(device_capability=None, **config._asdict())
    reasons += [f"{feature.value} not supported" for feature in missing]
    return reasons + [f"{host.chip()} has no {operator}" for operator in lacking]


def _select_for_model(vllm_config: "VllmConfig") -> tuple[str, str]:
    """As `select_backend`, for the model's decoder layers, before they exist."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import AttentionSelectorConfig

    model, cache = vllm_config.model_config, vllm_config.cache_config
    block_size = cache.block_size if cache.user_specified_block_size else None
    dtype = cast(torch.dtype, model.dtype)  # resolved by now
    config = AttentionSelectorConfig(
        model.get_head_size(), dtype, cache.cache_dtype, block_size, model.use_mla
    )
    transfer = vllm_config.kv_transfer_config
    has_connector = transfer is not None and transfer.is_kv_transfer_instance
    config = config._replace(
        use_sparse=architectures.has_sparse_attention(model), use_kv_connector=has_connector
    )
    if model.attn_type == "encoder_only":
        config = config._replace(attn_type="encoder_only")
    with set_current_vllm_config(vllm_config):
        return select_backend(config, model)


def describe_backend(vllm_config: "VllmConfig") -> str:
    """Describe the model's attention backend for the log: ``fused (...)``, ``built-in PyTorch
    (reason)`` or ``none (error)``."""
    try:
        return _select_for_model(vllm_config)[1]
    except RefusedError as error:
        return f"none ({error})"


def is_fused(vllm_config: "VllmConfig") -> bool:
    """Whether the model's attention backend is one that a component offers."""
    try:
        return _select_for_model(vllm_config)[0] not in BUILT_IN.values()
    except RefusedError:
        return False
