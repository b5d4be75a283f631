# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's V1 model runner on the NPU: torch.npu streams, split KV caches and limited
capture sizes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CompilationMode, ParallelConfig, VllmConfig
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_cache_interface import KVCacheConfig

import ascend_platform.ops.fused_moe
import ascend_platform.ops.shared_experts
import ascend_platform.ops.tensor_parallel  # noqa: F401
from ascend_platform import compat, extension, host
from ascend_platform.attention import kv_cache, selector, state_cache
from ascend_platform.config import mla_prolog
from ascend_platform.config.state_layers import has_states
from ascend_platform.graph import acl_graph
from ascend_platform.graph.acl_graph import module_with_overrides
from ascend_platform.graph.capture_sizes import GraphSizeMixin
from ascend_platform.ops import punica
from ascend_platform.sampling import topk_topp
from ascend_platform.triton_overrides import drafter
from ascend_platform.triton_overrides.slot_mapping import null_slots
from ascend_platform.vllm_overrides import has_v1_runner, override, require
from ascend_platform.worker import rotary_tables, state_layers
from ascend_platform.worker.draft_lengths import DraftLengthsMixin
from ascend_platform.worker.host_inputs import HostInputsMixin

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

if TYPE_CHECKING or has_v1_runner():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
else:  # NPUModelRunner cannot be made, and is not: config/model_runner.py chooses V2
    GPUModelRunner = object

STREAM_NAMES = (
    "Stream",
    "Event",
    "stream",
    "current_stream",
    "default_stream",
    "set_stream",
    "synchronize",
)


# The V1 runner calls torch.cuda.Stream, Event, stream and current_stream directly, in __init__ and
# in every step (gpu_model_runner.py:276-298, 745-753). Only these modules get torch.npu's;
# torch.cuda itself is unchanged.
torch_on_npu = module_with_overrides(
    torch,
    cuda=module_with_overrides(
        torch.cuda, **{name: getattr(torch.npu, name) for name in STREAM_NAMES}
    ),
)
override("vllm.v1.worker.gpu_model_runner:torch", torch_on_npu)
override("vllm.v1.spec_decode.ngram_proposer_gpu:torch", torch_on_npu)
override("vllm.distributed.parallel_state:torch", torch_on_npu)
override("vllm.distributed.parallel_state:graph_capture", acl_graph.graph_capture)

require("vllm.model_executor.layers.rotary_embedding:_ROPE_DICT")


class NPUEplbState(EplbState):
    """EplbState with the device index that the weight transfer thread needs; vLLM sets it on CUDA
    and XPU only."""

    def __init__(self, parallel_config: ParallelConfig, device: torch.device) -> None:
        super().__init__(parallel_config, device)
        self.device_index = device.index


# load_model makes one by this name
override("vllm.distributed.eplb.eplb_state:EplbState", NPUEplbState)


def register_vision_attention() -> None:
    """Register the offered MMEncoderAttention for multimodal encoders, once."""
    if (
        path := extension.offered("attention.vision")
    ) and MMEncoderAttention.__name__ not in op_registry_oot:
        attention = resolve_obj_by_qualname(path)
        if lacking := host.chip_family().lacks(*getattr(attention, "operators", ())):
            extension.logger.info(
                "attention of encoders falls back to PyTorch: %s has no %s",
                host.chip(),
                ", ".join(lacking),
            )
        else:
            MMEncoderAttention.register_oot(attention)


def register_latent_layer() -> None:
    """Register the offered MultiHeadLatentAttentionWrapper, once."""
    from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper as Layer

    if (path := extension.offered(mla_prolog.SLOT)) and Layer.__name__ not in op_registry_oot:
        Layer.register_oot(resolve_obj_by_qualname(path))


def renew_latent_weights(model: Any, dtype: torch.dtype) -> None:
    """Compute again what latent attention keeps of the model's weights, such as the copies of
    npu_mla_prolog_v3.

    vLLM's reload puts parameters on the meta device until their layer is loaded, and does the same
    when all are.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        for layer in model.modules():
            if isinstance(layer, MLAAttention):
                layer.process_weights_after_loading(dtype)


class ModelMixin:
    """Mixin for vLLM's model runners that loads a model for the NPU."""

    def load_model(self: Any, *arguments: Any, **named: Any) -> None:
        """Load the model as vLLM does, with rotary tables of its own, because sleep mode frees
        them."""
        if self.model_config.is_multimodal_model:
            register_vision_attention()
        if self.model_config.use_mla:
            compat.ask_platform_for_mla_prefill_backend()
        if extension.rope_order(self.vllm_config) == "halves":
            register_latent_layer()
        _ROPE_DICT.clear()
        super().load_model(*arguments, **named)  # type: ignore[misc]
        model = self.get_model()
        drafter = getattr(
            getattr(self, "drafter", None) or getattr(self, "speculator", None), "model", None
        )
        for each in (model, drafter) if isinstance(drafter, torch.nn.Module) else (model,):
            rotary_tables.check(each, self.max_model_len)
        if check := getattr(self.vllm_config.quant_config, "check_loaded", None):
            check(model)
        if extension.uses_mla_prolog(self.vllm_config):
            load, dtype = model.load_weights, self.model_config.dtype

            def load_weights(weights: Any) -> Any:
                loaded = load(weights)
                renew_latent_weights(model, dtype)
                return loaded

            model.load_weights = load_weights  # trainers call it in an engine that serves
        compiled = self.compilation_config.mode != CompilationMode.NONE
        for layer in self.compilation_config.static_forward_context.values():
            # of vLLM's own prefill, which the profile run would reserve
            if isinstance(layer, MLAAttention):
                layer._chunked_prefill_workspace_size = 0
            elif isinstance(layer, Attention):
                # an operator of its own is for Dynamo, see opaque_attention_op
                layer.use_direct_call = not compiled
        if selector.is_sparse(self.model_config):
            # vLLM has imported the model, which takes long
            from ascend_platform.attention import indexer

            indexer.install(self.compilation_config.static_forward_context)

    def load_lora_model(self: Any, *arguments: Any, **named: Any) -> torch.nn.Module:
        """Replace the model's layers by those with adapters, as vLLM does, with corrections; some
        adapters are refused."""
        model: torch.nn.Module = super().load_lora_model(*arguments, **named)  # type: ignore[misc]
        # it imports state-space layers, which are prepared by now
        from ascend_platform.ops import lora_layers

        lora_layers.install(self.lora_manager)
        return model

    def reload_weights(self: Any, *arguments: Any, **named: Any) -> None:
        """Reload weights as vLLM does.

        Raises:
            RefusedError: the weights are quantized, so that the loaded tensors have been replaced
            by packed ones.
        """
        if self.vllm_config.quant_config is not None:
            raise extension.RefusedError(
                "reload_weights is not supported with quantized weights; fix: sleep(level=1), which"
                " keeps the weights on the host"
            )
        super().reload_weights(*arguments, **named)  # type: ignore[misc]
        if extension.uses_mla_prolog(self.vllm_config):
            renew_latent_weights(self.get_model(), self.model_config.dtype)


class NPUModelRunner(
    ModelMixin, HostInputsMixin, GraphSizeMixin, DraftLengthsMixin, GPUModelRunner
):
    """GPUModelRunner with limited capture sizes, exact lengths on the host, and keys and values in
    separate tensors."""

    _states: Sequence[tuple[int, torch.Tensor]] = ()
    """KV cache group and tensor ``[blocks, …]`` of each state of linear attention and state-space
    layers."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        if vllm_config.speculative_config:
            drafter.install()
        if has_states(vllm_config):
            state_layers.install(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        # of a drafter that is a model
        if capture := getattr(getattr(self, "drafter", None), "dummy_run", None):
            vars(self.drafter).update(dummy_run=acl_graph.drafter_pool()(capture))
        topk_topp.install(self)

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager | None = None,
    ) -> dict[str, tuple[torch.Tensor, ...]]:
        """Allocate the KV cache as vLLM does, then bind its parts to each layer, such as a
        KVCachePair, or states.

        ``self.kv_caches``, in which the runner copies blocks (``copy_kv_cache_blocks_inplace``),
        lists the parts of each layer, such as its keys, as caches of their own, all indexed by
        vLLM's block numbers.
        """
        kv_cache.check(kv_cache_config)
        caches = super().initialize_kv_cache_tensors(
            kv_cache_config, kernel_block_sizes, kv_cache_allocation_context
        )
        layers = self.compilation_config.static_forward_context
        states = state_cache.split(caches, kv_cache_config)
        pages = {name: kv_cache.split_layer(layers[name]) for name in caches if name not in states}
        parts = states | pages
        for name, split in parts.items():
            layers[name].kv_cache = split  # bind_kv_cache of MLAAttention takes a tensor alone
        # KV cache groups share memory: of a state and the pages in its place, the pages, which are
        # whole blocks, are listed
        self.kv_caches[:] = {
            tensor.data_ptr(): tensor for split in parts.values() for tensor in split
        }.values()
        self._states = [
            (group, state)
            for group, spec in enumerate(kv_cache_config.kv_cache_groups)
            for name in spec.layer_names
            for state in states.get(name, ())
        ]
        to_zero = (
            {tensor.data_ptr(): tensor for split in pages.values() for tensor in split}
            if states
            else {}
        )
        self._pages_to_zero = [
            each.view(kv_cache_config.num_blocks, -1) for each in to_zero.values()
        ]
        return parts

    def _init_kv_zero_meta(self) -> None:
        """Nothing: vLLM's zeroing of blocks is a Triton kernel over addresses."""

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        """Zero new blocks of attention layers, which may hold the states of other layers."""
        blocks = torch.tensor(block_ids).pin_memory().to(self.device, non_blocking=True)
        for pages in self._pages_to_zero:
            pages[blocks] = 0

    def _update_states(self, scheduler_output: "SchedulerOutput") -> Any:
        """Also zero the states of prompts of one token that come with places for draft tokens.

        vLLM's scheduler adds the places so that the step stays uniform
        (``vllm/v1/core/sched/scheduler.py``, pad_spec_decode). The layers then take the prompt for
        a decode, which begins with what its block holds, of whichever request had it before.
        """
        deferred = super()._update_states(scheduler_output)
        if self._states:
            for request in map(
                self.requests.__getitem__, scheduler_output.scheduled_spec_decode_tokens
            ):
                if request.num_computed_tokens == 0:
                    for group, state in self._states:
                        state[request.block_ids[group][0]] = 0
        return deferred

    def _get_prompt_logprobs_dict(self, hidden_states: torch.Tensor, *args: Any) -> dict[str, Any]:
        """Compute log-probabilities of prompts, with each prompt's adapter on ``lm_head``."""
        if self.lora_config is None or not self.num_prompt_logprobs:
            return super()._get_prompt_logprobs_dict(hidden_states, *args)
        compute_logits: Any = self.model.compute_logits
        self.model.compute_logits = punica.of_tokens(
            self.lora_manager, compute_logits, hidden_states
        )
        try:
            return super()._get_prompt_logprobs_dict(hidden_states, *args)
        finally:
            self.model.compute_logits = compute_logits

    def _build_attention_metadata(
        self, num_tokens: int, *args: Any, slot_mappings: Any = None, **kwargs: Any
    ) -> Any:
        """Map padding slots to the null block; npu_scatter_pa_kv_cache rejects slot -1.

        In a dummy run (without ``num_scheduled_tokens``) all tokens are padding tokens.
        """
        first_padding = 0 if kwargs.get("num_scheduled_tokens") is None else num_tokens
        for slots in (slot_mappings or {}).values():
            if first_padding < len(slots):
                slots[first_padding:].copy_(
                    null_slots(len(slots), self.cache_config.block_size, slots.device)[
                        first_padding:
                    ]
                )
        kwargs["slot_mappings"] = slot_mappings
        return super()._build_attention_metadata(num_tokens, *args, **kwargs)
