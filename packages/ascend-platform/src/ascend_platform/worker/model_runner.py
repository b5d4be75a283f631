"""vLLM's V1 model runner on the NPU, with torch.npu's streams, and keys and values in tensors of their own."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import ascend_platform.ops.fused_moe  # noqa: F401  (before a model's layers are made)
from ascend_platform import extension
from ascend_platform.attention import kv_cache
from ascend_platform.graph import acl_graph
from ascend_platform.graph.acl_graph import view
from ascend_platform.graph.capture_sizes import CaptureMixin
from ascend_platform.sampling import topk_topp
from ascend_platform.triton_overrides import drafter
from ascend_platform.triton_overrides.slot_mapping import null_slots
from ascend_platform.vllm_overrides import override

STREAM_NAMES = ("Stream", "Event", "stream", "current_stream", "default_stream", "set_stream", "synchronize")


# The V1 runner writes torch.cuda.Stream, Event, stream and current_stream in its own text, in __init__ and in every
# step (gpu_model_runner.py:276-298, 745-753). torch.cuda itself stays as it is: only these modules see torch.npu's.
_torch = view(torch, cuda=view(torch.cuda, **{name: getattr(torch.npu, name) for name in STREAM_NAMES}))
override("vllm.v1.worker.gpu_model_runner:torch", _torch)
override("vllm.distributed.parallel_state:torch", _torch)
override("vllm.distributed.parallel_state:graph_capture", acl_graph.graph_capture)


class NPUEplbState(EplbState):
    """EplbState that knows its device, which the thread that moves experts' weights wants; vLLM's does for CUDA and XPU alone."""

    def __init__(self, parallel_config: ParallelConfig, device: torch.device) -> None:
        super().__init__(parallel_config, device)
        self.device_index = device.index


override("vllm.distributed.eplb.eplb_state:EplbState", NPUEplbState)  # load_model makes one by this name


def take_vision_attention() -> None:
    """Let the encoders of images and sounds attend by the offered MMEncoderAttention, once."""
    if (path := extension.offered("attention.vision")) and MMEncoderAttention.__name__ not in op_registry_oot:
        MMEncoderAttention.register_oot(resolve_obj_by_qualname(path))


class NPUModelRunner(CaptureMixin, GPUModelRunner):
    """GPUModelRunner with as many graphs as fit, and with keys and values in tensors of their own."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        if vllm_config.speculative_config:
            drafter.install()
        if vllm_config.model_config.is_multimodal_model:
            take_vision_attention()
        super().__init__(vllm_config, *args, **kwargs)
        topk_topp.install(self)

    def reload_weights(self, *arguments: Any, **named: Any) -> None:
        """As vLLM's.

        Raises:
            RefusedError: the weights are quantized: what was loaded has been replaced by what the operators take.
        """
        if self.vllm_config.quant_config is not None:
            raise extension.RefusedError(
                "reload_weights is served with weights that are not quantized, and these are: sleep(level=1) keeps them"
            )
        super().reload_weights(*arguments, **named)

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager | None = None,
    ) -> dict[str, kv_cache.KVCachePair]:
        """Allocate as vLLM does, then give every layer its :class:`~ascend_platform.attention.kv_cache.KVCachePair`.

        ``self.kv_caches``, from which the runner copies blocks (``copy_kv_cache_blocks_inplace``), holds the keys and
        the values of each layer as two caches, both addressed by vLLM's block numbers.
        """
        kv_cache.check(kv_cache_config)
        caches = super().initialize_kv_cache_tensors(kv_cache_config, kernel_block_sizes, kv_cache_allocation_context)
        layers = self.compilation_config.static_forward_context
        pages = {name: kv_cache.split_kv_cache(layers[name].kv_cache, layers[name].head_size) for name in caches}
        for name, layer_pages in pages.items():
            layers[name].bind_kv_cache(layer_pages)
        every = [tensor for layer_pages in pages.values() for tensor in layer_pages]
        self.kv_caches[:] = {tensor.data_ptr(): tensor for tensor in every}.values()  # layers of several groups share them
        return pages

    def _build_attention_metadata(self, num_tokens: int, *args: Any, slot_mappings: Any = None, **kwargs: Any) -> Any:
        """Let tokens of no request write to the null block: the kernel that writes the cache takes no negative places.

        Of a step these are what it is padded with; a run without requests (no ``num_scheduled_tokens``) has no others.
        """
        first = 0 if kwargs.get("num_scheduled_tokens") is None else num_tokens
        for places in (slot_mappings or {}).values():
            if first < len(places):
                places[first:].copy_(null_slots(len(places), self.cache_config.block_size, places.device)[first:])
        kwargs["slot_mappings"] = slot_mappings
        return super()._build_attention_metadata(num_tokens, *args, **kwargs)
