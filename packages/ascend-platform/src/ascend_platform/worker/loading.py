# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Steps of both model runners when a model is loaded: NPU forms of layers, rotary tables, adapters
and weights."""

import weakref
from typing import Any

import torch
from vllm.config import CompilationMode
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.utils.import_utils import resolve_obj_by_qualname

import ascend_platform.ops.moe.experts  # noqa: F401
from ascend_platform import host, options
from ascend_platform.attention import mla_prolog, selector
from ascend_platform.config import architectures
from ascend_platform.errors import RefusedError
from ascend_platform.logger import logger
from ascend_platform.overrides import guard, shims
from ascend_platform.plugins import slots
from ascend_platform.process import replacements
from ascend_platform.worker import rotary_tables

FOR_ALL_MODELS = ("ops.moe.router", "ops.shared_experts", "ops.tensor_parallel", "worker.eplb")
"""Modules whose replacements of vLLM's names every model needs."""


def register_vision_attention() -> None:
    """Register the offered MMEncoderAttention for multimodal encoders, once."""
    path = slots.offered("attention.vision")
    if path and MMEncoderAttention.__name__ not in op_registry_oot:
        attention = resolve_obj_by_qualname(path)
        if lacking := ", ".join(host.chip_family().lacks(*getattr(attention, "operators", ()))):
            text = "attention of encoders falls back to PyTorch: %s has no %s"
            logger.info(text, host.chip(), lacking)
        else:
            MMEncoderAttention.register_oot(attention)


def register_latent_layer() -> None:
    """Register the offered MultiHeadLatentAttentionWrapper, once."""
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper as Layer

    if (path := slots.offered(mla_prolog.SLOT)) and Layer.__name__ not in op_registry_oot:
        Layer.register_oot(resolve_obj_by_qualname(path))


def renew_kept_weights(model: Any, dtype: torch.dtype) -> None:
    """Compute again what layers keep of the model's weights, such as the copies of
    npu_mla_prolog_v3.

    vLLM's reload puts parameters on the meta device until their layer is loaded, and does the same
    when all are.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        for layer in model.modules():
            if isinstance(layer, MLAAttention) or hasattr(layer, "keeps_weights"):
                layer.process_weights_after_loading(dtype)


class ModelMixin:
    """Mixin for vLLM's model runners that loads a model for the NPU."""

    def load_model(self: Any, *arguments: Any, **named: Any) -> None:
        """Load the model as vLLM does, with rotary tables of its own, because sleep mode frees
        them."""
        guard.require("vllm.model_executor.layers.rotary_embedding:_ROPE_DICT")
        guard.install("common", *FOR_ALL_MODELS)
        compiled = self.compilation_config.mode != CompilationMode.NONE
        if compiled:
            guard.install("common", "graph.fusion_passes")
        if self.model_config.is_multimodal_model:
            register_vision_attention()
            if not host.chip_family().assigns_by_mask:
                guard.install("common", "ops.multimodal")
        if self.model_config.use_mla:
            shims.ask_platform_for_mla_prefill_backend()
        if options.rope_order(self.vllm_config) == "halves":
            register_latent_layer()
        _ROPE_DICT.clear()
        super().load_model(*arguments, **named)  # type: ignore[misc]
        model = self.get_model()
        models = self._check_positions()
        for each in models:
            if not compiled and self.lora_config is None and selector.is_fused(self.vllm_config):
                self._separate_projections(each)
        if check := getattr(self.vllm_config.quant_config, "check_loaded", None):
            check(model)
        if self.vllm_config.quant_config is not None and not compiled:
            self._fuse_norms(model)
        for each in models:
            self._note_loads(each)
        for layer in self.compilation_config.static_forward_context.values():
            # Workspace of vLLM's own prefill, which the profile run would reserve.
            if isinstance(layer, MLAAttention):
                layer._chunked_prefill_workspace_size = 0
            elif isinstance(layer, Attention):
                # A separate operator is for Dynamo, see opaque_attention_op.
                layer.use_direct_call = not compiled
        own = options.of(options.Platform, self.vllm_config)
        if architectures.has_sparse_attention(self.model_config) or "int8" in (
            own.index_cache,
            own.latent_cache,
        ):
            # vLLM has imported the model, which takes long.
            from ascend_platform.attention import indexer

            layers = self.compilation_config.static_forward_context
            indexer.install(layers, own.index_cache == "int8")
            if own.latent_cache == "int8":
                indexer.quantize_latents(layers)

    def _check_positions(self: Any) -> list[torch.nn.Module]:
        """The model, and the drafter if it is one, each with positions for its longest request."""
        models = [self.get_model()]
        rotary_tables.check(models[0], self.max_model_len)
        drafter = getattr(self, "drafter", None) or getattr(self, "speculator", None)
        if isinstance(model := getattr(drafter, "model", None), torch.nn.Module):
            # V1 stops drafting where the drafter's context ends.
            length = getattr(self, "effective_drafter_max_model_len", self.max_model_len)
            rotary_tables.check(model, min(length, self.max_model_len), is_drafter=True)
            models.append(model)
        return models

    def _note_loads(self: Any, model: torch.nn.Module) -> None:
        """Report weights that a trainer loads into a model of an engine that serves, and compute
        again what layers keep of them."""
        config, dtype = self.vllm_config, self.model_config.dtype
        keeps, load = self._keeps_weights(), getattr(type(model), "load_weights", None)
        if load is None:
            return
        # Without a cycle of references, so that the model is freed with its engine.
        loaded_into = weakref.ref(model)

        def load_weights(*arguments: Any, **named: Any) -> Any:
            replacements.note_weights(config)
            loaded = load(loaded_into(), *arguments, **named)
            if keeps:
                renew_kept_weights(loaded_into(), dtype)
            return loaded

        model.load_weights = load_weights  # type: ignore[assignment]

    def _keeps_weights(self: Any) -> bool:
        layers = self.get_model().modules()
        return mla_prolog.is_used(self.vllm_config) or any(
            hasattr(layer, "keeps_weights") for layer in layers
        )

    @staticmethod
    def _separate_projections(model: torch.nn.Module) -> None:
        """Give attention queries, keys and values as a tensor each: it cannot write slices."""
        from ascend_platform.ops import qkv_projection

        if not host.chip_family().lacks("npu_scatter_pa_kv_cache"):
            qkv_projection.install(model)

    def _fuse_norms(self: Any, model: torch.nn.Module) -> None:
        """Fuse norms with the quantization after them; a compiled model has a pass for it."""
        from ascend_platform.ops import norm_quant

        if self.compilation_config.pass_config.fuse_norm_quant:
            norm_quant.install(model)

    def load_lora_model(self: Any, *arguments: Any, **named: Any) -> torch.nn.Module:
        """Replace the model's layers by those with adapters, as vLLM does, with corrections; some
        adapters are refused."""
        guard.install("common", "lora.experts")
        model: torch.nn.Module = super().load_lora_model(*arguments, **named)  # type: ignore[misc]
        # It imports state-space layers, which are prepared by now.
        from ascend_platform.lora import layers

        layers.install(self.lora_manager)
        return model

    def reload_weights(self: Any, *arguments: Any, **named: Any) -> None:
        """Reload weights as vLLM does.

        Raises:
            RefusedError: the weights are quantized, so that the loaded tensors have been replaced
                by packed ones.
        """
        if self.vllm_config.quant_config is not None:
            raise RefusedError(
                "reload_weights is not supported with quantized weights; fix: sleep(level=1), which"
                " keeps the weights on the host"
            )
        replacements.note_weights(self.vllm_config)
        super().reload_weights(*arguments, **named)  # type: ignore[misc]
        if self._keeps_weights():
            renew_kept_weights(self.get_model(), self.model_config.dtype)
