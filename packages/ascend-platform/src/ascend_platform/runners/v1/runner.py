# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's V1 model runner on the NPU: torch.npu streams, split KV caches and limited
capture sizes."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from vllm.compilation.decorators import ignore_torch_compile
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_pp_group
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.spec_decode.ngram_proposer_gpu import NgramGPUKernel
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ascend_platform.attention import kv_cache
from ascend_platform.config.state_layers import has_states
from ascend_platform.graph import acl_graph
from ascend_platform.kernels import ragged
from ascend_platform.lora import punica
from ascend_platform.overrides import guard
from ascend_platform.runners.v1 import topk_topp
from ascend_platform.runners.v1.draft_lengths import DraftLengthsMixin
from ascend_platform.runners.v1.embedded_prompts import EmbeddedPromptsMixin
from ascend_platform.runners.v1.encoder_graphs import EncoderGraphMixin
from ascend_platform.runners.v1.graph_sizes import GraphSizeMixin
from ascend_platform.runners.v1.host_inputs import HostInputsMixin
from ascend_platform.runners.v1.local_argmax import LocalArgmaxMixin
from ascend_platform.runners.v1.sampling_step import SamplingStepMixin
from ascend_platform.runners.v1.trimmed_drafts import TrimmedDraftsMixin
from ascend_platform.state_layers import replacements, state_cache
from ascend_platform.worker.loading import ModelMixin

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class NPUModelRunner(  # type: ignore[misc]  # sample_tokens, whose decorator has no types
    LocalArgmaxMixin,
    SamplingStepMixin,
    EmbeddedPromptsMixin,
    TrimmedDraftsMixin,
    ModelMixin,
    HostInputsMixin,
    EncoderGraphMixin,
    GraphSizeMixin,
    DraftLengthsMixin,
    GPUModelRunner,
):
    """GPUModelRunner with limited capture sizes, exact sequence lengths on the host, and keys and
    values in separate tensors."""

    _state_layers: Mapping[int, list[str]] = MappingProxyType({})
    """Names of the linear attention and state-space layers of each KV cache group."""
    _has_prefill = False
    """Whether the layers with states take a request of the step for a prefill."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        install()
        if has_states(vllm_config):
            replacements.install(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        # For a drafter that is a model.
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
        self.take_slots()
        caches = super().initialize_kv_cache_tensors(
            kv_cache_config, kernel_block_sizes, kv_cache_allocation_context
        )
        parts = state_cache.bind(
            self.compilation_config.static_forward_context, caches, kv_cache_config
        )
        self.kv_caches[:] = kv_cache.distinct_tensors(parts.values())
        with_states = {n for n, part in parts.items() if isinstance(part, state_cache.LayerStates)}
        self._state_layers = {
            group: [name for name in spec.layer_names if name in with_states]
            for group, spec in enumerate(kv_cache_config.kv_cache_groups)
            if not with_states.isdisjoint(spec.layer_names)
        }
        self._zeroer = state_cache.BlockZeroer(parts.values(), kv_cache_config.num_blocks)
        return parts

    def capture_model(self) -> int:
        """Capture graphs, then run the largest step and its sampling once to reserve their memory;
        V2 has sampled when memory was profiled."""
        graph_bytes = super().capture_model()
        if get_pp_group().is_last_rank:
            scheduler = self.scheduler_config
            num_reqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
            hidden, last_hidden = self._dummy_run(
                num_reqs, skip_eplb=True, cudagraph_runtime_mode=CUDAGraphMode.NONE
            )
            if self.is_pooling_model:
                self._dummy_pooler_run(hidden)
            else:
                self._dummy_sampler_run(last_hidden)
        return graph_bytes

    def _init_kv_zero_meta(self) -> None:
        """No-op: vLLM's zeroing of blocks is a Triton kernel over addresses."""

    def _zero_block_ids(self, block_ids: list[int]) -> None:
        self._zeroer.zero_block_ids(block_ids)

    def _update_states(self, scheduler_output: "SchedulerOutput") -> Any:
        """Also reset the state of one-token prompts that have draft slots.

        vLLM's scheduler adds the draft slots so that the step stays uniform
        (``vllm/v1/core/sched/scheduler.py``, pad_spec_decode). The layers then take the prompt for
        a decode, which begins with the contents of its block from an earlier request.
        """
        deferred = super()._update_states(scheduler_output)
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if has_states(self.vllm_config):
            rows = self.input_batch.num_reqs
            computed = self.input_batch.num_computed_tokens_cpu[:rows]
            self._has_prefill = len(drafts) < rows if self.num_spec_tokens else not computed.all()
        for name in drafts if self._state_layers else ():
            request = self.requests[name]
            if request.num_computed_tokens == 0:
                layers = self.compilation_config.static_forward_context
                for group, names in self._state_layers.items():
                    state_cache.clear(layers, names, request.block_ids[group][0])
        return deferred

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        """Replay no decode graph for a prefill of as many tokens as a decode.

        vLLM looks at the number of tokens only, and the graph would read the indices of states that
        an earlier step has left. A dummy run says itself what it is.
        """
        if self._has_prefill:
            kwargs.setdefault("force_uniform_decode", False)
        return super()._determine_batch_execution_and_padding(*args, **kwargs)

    def _get_prompt_logprobs_dict(self, hidden_states: torch.Tensor, *args: Any) -> dict[str, Any]:
        """Compute log-probabilities of prompts, with each prompt's adapter on ``lm_head``."""
        if self.lora_config is None or not self.num_prompt_logprobs:
            return super()._get_prompt_logprobs_dict(hidden_states, *args)
        model, manager = self.model, self.lora_manager
        compute_logits: Any = model.compute_logits
        model.compute_logits = punica.of_tokens(manager, compute_logits, hidden_states)
        try:
            return super()._get_prompt_logprobs_dict(hidden_states, *args)
        finally:
            model.compute_logits = compute_logits

    def _build_attention_metadata(
        self, num_tokens: int, *args: Any, slot_mappings: Any = None, **kwargs: Any
    ) -> Any:
        """Map padding slots to the null block; npu_scatter_pa_kv_cache rejects slot -1.

        In a dummy run (without ``num_scheduled_tokens``) all tokens are padding tokens.
        """
        first_padding = 0 if kwargs.get("num_scheduled_tokens") is None else num_tokens
        for group, slots in (slot_mappings or {}).items():
            size = self.kv_cache_config.kv_cache_groups[group].kv_cache_spec.block_size
            size = min(size, self.cache_config.block_size)
            ragged.fill_null_slots(slots, first_padding, size)
        kwargs["slot_mappings"] = slot_mappings
        return super()._build_attention_metadata(num_tokens, *args, **kwargs)


def install() -> None:
    """Replace what V1 needs of vLLM in this process."""
    ignore_torch_compile(NgramGPUKernel)  # Its configuration requires Inductor.
    guard.install("v1")
