"""Which attention serves a layer: the one that a component offers, or else the built-in one."""

from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_platform import extension
from ascend_platform.attention.base import AttentionFeature

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

BUILT_IN_ATTENTION = "ascend_platform.attention.paged.PagedAttentionBackend"
BUILT_IN_ENCODER = "ascend_platform.attention.encoder.EncoderAttentionBackend"


def attention_for(config: "AttentionSelectorConfig", model: Any) -> tuple[str, str]:
    """The attention for a layer: its qualified name, and which it is and why, for people.

    The one offered for the layer's kind if it takes the layer, else the built-in one.

    Raises:
        RefusedError: neither takes the layer.
    """
    kind = "encoder" if config.attn_type == "encoder_only" else "sinks" if config.has_sink else "dense"
    built_in = BUILT_IN_ENCODER if kind == "encoder" else BUILT_IN_ATTENTION
    reason = f"ascend-attention is {extension.state('ascend-attention')}"
    if path := extension.offered(f"attention.{kind}"):
        obstacles = _obstacles(path, config, model)
        if not obstacles:
            return path, f"fused (ascend-attention {extension.version('ascend-attention')})"
        reason = f"the fused one does not take this model: {', '.join(obstacles)}"
    if obstacles := _obstacles(built_in, config, model):
        raise extension.RefusedError(
            f"ascend-platform {extension.version('ascend-platform')} serves dense attention; the model needs another: "
            f"{', '.join(obstacles)}"
        )
    return built_in, f"built-in PyTorch ({reason})"


def _obstacles(path: str, config: "AttentionSelectorConfig", model: Any) -> list[str]:
    backend = resolve_obj_by_qualname(path)
    # vLLM tells the layer of these, and its selector nothing
    asked = {
        AttentionFeature.ALIBI: model is not None and model.uses_alibi,
        AttentionFeature.LOGITS_SOFT_CAP: model is not None
        and bool(getattr(model.hf_text_config, "attn_logit_softcapping", None)),
    }
    serves = getattr(backend.get_impl_cls(), "serves", ())
    found = [f"{feature.value} not supported" for feature, wanted in asked.items() if wanted and feature not in serves]
    return backend.validate_configuration(device_capability=None, **config._asdict()) + found


def attention_of(vllm_config: "VllmConfig") -> str:
    """Which attention serves the model, and why, for people."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    model, cache = vllm_config.model_config, vllm_config.cache_config
    block_size = cache.block_size if cache.user_specified_block_size else None
    try:
        dtype = cast(torch.dtype, model.dtype)  # resolved by now
        config = AttentionSelectorConfig(model.get_head_size(), dtype, cache.cache_dtype, block_size)
        if model.attn_type == "encoder_only":
            config = config._replace(attn_type="encoder_only")
        return attention_for(config, model)[1]
    except extension.RefusedError as error:
        return f"none ({error})"
