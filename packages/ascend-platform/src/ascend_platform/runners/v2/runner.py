# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's V2 model runner on the NPU: torch.npu streams, split KV caches, and PyTorch instead of
Triton kernels."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from ascend_platform.attention import kv_cache, length_bounds
from ascend_platform.config import compilation
from ascend_platform.config.state_layers import has_states
from ascend_platform.graph import capture_sizes, encoder_graphs
from ascend_platform.graph.acl_graph import module_with_overrides
from ascend_platform.lora import punica
from ascend_platform.overrides import guard
from ascend_platform.runners.v2.draft_lengths import DraftLengthsMixin
from ascend_platform.runners.v2.kernels import buffers, input_batch
from ascend_platform.runners.v2.kernels.block_table import NPUPCPManager
from ascend_platform.runners.v2.kernels.device_step import DeviceStep
from ascend_platform.runners.v2.kernels.host_step import HostStep
from ascend_platform.runners.v2.kernels.step import running
from ascend_platform.runners.v2.sampler import NPUSampler
from ascend_platform.sampling import local_argmax
from ascend_platform.state_layers import replacements, state_cache
from ascend_platform.worker import process_groups
from ascend_platform.worker.loading import ModelMixin
from ascend_platform.worker.torch_npu_view import torch_on_npu

torch_of_runner = module_with_overrides(
    torch_on_npu, arange=input_batch.arange, zeros=input_batch.zeros
)
_init_kv_cache = attn_utils.init_kv_cache


def init_kv_cache(layers: dict[str, Any], config: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Allocate the KV cache as vLLM does, then bind its parts to each layer, such as a KVCachePair,
    or states."""
    kv_cache.check(config)
    caches = _init_kv_cache(layers, config, *args, **kwargs)
    return state_cache.bind(layers, caches, config)


class NPUModelRunner(ModelMixin, DraftLengthsMixin, GPUModelRunner):
    """vLLM's V2 GPUModelRunner; what it does not serve is refused by
    ``ascend_platform/config/model_runner.py``."""

    cudagraph_manager: Any
    model: Any
    model_state: Any
    pcp_manager: Any
    sampler: Any
    block_tables: Any
    speculator: Any
    req_states: Any
    kv_block_zeroer: Any
    _step: DeviceStep | HostStep | None = None
    """The last step; None after a dummy run."""
    _local_argmax: local_argmax.LocalArgmax | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        guard.install("v2")
        if has_states(vllm_config):
            replacements.install(vllm_config)
        self._sent = buffers.SentInputs()
        super().__init__(vllm_config, device)
        # This subtracts its communicator's buffers from the KV cache's budget.
        if (pp := self.pp_handler) is not None:
            create = process_groups.create_communicator_of_broadcasts
            create(pp.broadcast_group, pp.last_rank, device)
        self._make_lora_inputs = self.lora_state.make_lora_inputs
        vars(self.lora_state).update(make_lora_inputs=self._make_lora_inputs_of_logits)
        parallel = vllm_config.parallel_config
        self._has_lockstep = (
            parallel.distributed_executor_backend == "external_launcher"
            and parallel.data_parallel_size > 1
        )

    def _make_lora_inputs_of_logits(
        self, *arguments: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], set[Any]]:
        """Like the base method, but set the adapter of each logit first; vLLM has one per request,
        with draft tokens too."""
        of_requests, of_tokens, requests = self._make_lora_inputs(*arguments)
        assert self._step is not None
        return self._step.per_logit(of_requests), of_tokens, requests

    def load_model(self, *arguments: Any, **named: Any) -> None:
        """Load the model, and let graphs know each step's attention metadata."""
        super().load_model(*arguments, **named)
        if type(self.sampler) is NPUSampler and self.batch_sharder is None:
            self._local_argmax = local_argmax.LocalArgmax.of(self.model, self.vllm_config)
        if compilation.captures_encoder(self.vllm_config) and self.supports_mm_inputs:
            encoder_graphs.is_served(self.get_model())
        prepare = self.model_state.prepare_attn

        def prepare_attn(*args: Any, **kwargs: Any) -> Any:
            with length_bounds.subtract_rejected(self._before):
                metadata = prepare(*args, **kwargs)
            if self.cudagraph_manager is not None:
                self.cudagraph_manager.attn_metadata = metadata
            return metadata

        def prepare_inputs(batch: InputBatch, *args: Any) -> Any:
            step = self._step or DeviceStep(batch.num_scheduled_tokens, batch.has_prefill)
            with running(step):
                inputs = prepare_model_inputs(batch, *args)
            if self._step is None and getattr(self.model_state, "rope_state", None) is not None:
                # A dummy batch has the offset of another request: positions may be negative.
                inputs["positions"].zero_()
            return inputs

        if self.lora_config and (worker := self.prompt_logprobs_worker) is not None:
            for name in ("compute_prompt_logprobs", "compute_prompt_token_id_logprobs"):
                if score := getattr(worker, name, None):
                    vars(worker)[name] = self._with_adapters(score)
        prepare_model_inputs = self.model_state.prepare_inputs
        self._get_cg_support = self.model_state.get_additional_cg_support
        vars(self.model_state).update(
            prepare_attn=prepare_attn,
            prepare_inputs=prepare_inputs,
            get_additional_cg_support=self._get_least_cg_support,
        )

    def _get_least_cg_support(self) -> tuple[AttentionCGSupport, str | None]:
        """The support of graphs that all pipeline stages have, and the backend that has no more."""
        own = attn_utils.get_attn_cg_support(self.attn_groups, self.vllm_config)
        own = own.narrow(*self._get_cg_support())
        if self.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
            return own.min_cg_support, own.min_cg_attn_backend  # Only the encoder's stage is here.
        least = AttentionCGSupport(capture_sizes.least_support(own.min_cg_support.value))
        is_own = least == own.min_cg_support
        return least, own.min_cg_attn_backend if is_own else "AnotherStage"

    def _with_adapters(self, score: Callable[..., Any]) -> Callable[..., Any]:
        """Let a method of PromptLogprobsWorker compute logits with each prompt's adapter on
        ``lm_head``."""

        def scored(
            compute_logits: Callable[..., Any], hidden_states: torch.Tensor, *args: Any
        ) -> Any:
            compute = punica.of_tokens(self.lora_manager, compute_logits, hidden_states)
            return score(compute, hidden_states, *args)

        return scored

    @property
    def pcp_manager_cls(self) -> type[NPUPCPManager]:
        return NPUPCPManager

    def initialize_kv_cache(self, *arguments: Any, **named: Any) -> None:
        """Allocate the KV cache; ``self.kv_caches``, in which blocks are copied, lists keys and
        values as two caches."""
        super().initialize_kv_cache(*arguments, **named)
        self._bound = self.kv_caches
        self.kv_caches = kv_cache.distinct_tensors(self._bound)

    def _init_kv_zero_meta(self) -> None:
        self.kv_block_zeroer = state_cache.BlockZeroer(self._bound, self.kv_cache_config.num_blocks)

    def _describe(self, batch: Any) -> DeviceStep | HostStep:
        """The host's knowledge of a step. With draft tokens the scheduler's numbers are upper
        bounds."""
        rows, states = batch.idx_mapping_np, self.req_states
        counts_output = True
        if self.sampler is not None:
            counts_output = bool(self.sampler.penalties_state.use_penalty[rows].any())
        if not self.num_speculative_steps:
            return HostStep(
                rows,
                batch.num_scheduled_tokens,
                states.num_computed_tokens_np[rows],
                batch.prefill_len_np,
                states.all_token_ids.gpu,
                states.indices,
                counts_output,
                self._sent,
            )
        of_sampler: dict[str, Any] = {}
        if self.sampler is not None:  # for the rejection sampler
            sampling = self.sampler.sampling_states
            of_sampler["is_greedy"] = bool((sampling.temperature.np[rows] == 0).all())
            of_sampler["has_seeds"] = sampling.any_explicit_seed(rows)
            of_sampler["seeds_set"] = self.sampler.seeds_set.gpu
        return DeviceStep(
            batch.num_scheduled_tokens,
            batch.has_prefill,
            counts_output,
            batch.num_draft_tokens_np,
            looks_ahead=self.speculator is not None,
            **of_sampler,
        )

    def prepare_inputs(self, scheduler_output: Any, batch: Any, *arguments: Any) -> InputBatch:
        step = self._step = self._describe(batch)
        step.are_constants_shared = not step.has_drafts
        try:
            with running(step):
                prepared = super().prepare_inputs(scheduler_output, batch, *arguments)
        finally:
            step.are_constants_shared = False
        reads = self.sampler is not None and self.sampler.reads_lengths(batch.idx_mapping_np)
        # Those of a rank's parts of the requests are another number.
        of_all = prepared if self.pcp_manager is None else self.pcp_manager.global_batch
        if reads or (of_all is not prepared and self.block_tables.has_sliding_window_groups):
            step.write_lengths(of_all.idx_mapping, self.req_states.lengths)
        return prepared

    def add_requests(self, scheduler_output: Any) -> None:
        """Like the base method, but do not count token 0 for prompts that are given as embeddings:
        it stands for their unknown tokens."""
        super().add_requests(scheduler_output)
        penalties = None if self.sampler is None else self.sampler.penalties_state
        for new in scheduler_output.scheduled_new_reqs:
            if penalties is None or new.prompt_embeds is None:
                continue
            row = self.req_states.req_id_to_index[new.req_id]
            ids = new.prompt_token_ids or []
            are_ids = new.prompt_is_token_ids or [False] * len(ids)
            has_zero = any(not each and is_id for each, is_id in zip(ids, are_ids, strict=True))
            if penalties.use_penalty[row] and not has_zero:
                penalties.prompt_bin_mask[row, 0].bitwise_and_(~1)

    def execute_model(self, scheduler_output: Any, *arguments: Any, **named: Any) -> Any:
        """Like the base method; an engine without tokens under the external launcher runs a dummy
        step, as with V1.

        The others wait for this engine's number of tokens.
        """
        if named.get("dummy_run"):
            self._step = None
            self._sent.forget()
        output = super().execute_model(scheduler_output, *arguments, **named)
        if self._has_lockstep and not (
            named.get("dummy_run") or scheduler_output.total_num_scheduled_tokens
        ):
            self._dummy_run(1, uniform_decode=True)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        with running(self._step):  # Of the batch that execute_model ran last.
            return super().sample_tokens(grammar_output)

    def sample(self, hidden_states: torch.Tensor, batch: InputBatch, grammar_output: Any) -> Any:
        def reads_argmax() -> bool:
            return grammar_output is None and self.sampler.reads_argmax(batch.idx_mapping_np)

        with local_argmax.active(self._local_argmax, reads_argmax):
            return super().sample(hidden_states, batch, grammar_output)

    def prepare_attn(self, batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Like the base method, but pass the number of tokens, which its kernel reads on the
        device."""
        assert self._step is not None
        computed = self.req_states.num_computed_tokens.gpu
        if self.pcp_manager is not None:
            return self.pcp_manager.prepare_attn(batch, self._step, computed)
        padded = batch.num_reqs_after_padding
        tables = self.block_tables.gather_block_tables(
            batch.idx_mapping, padded, num_computed_tokens=computed, step=self._step
        )
        slots = self._step.compute_slot_mappings(
            self.block_tables,
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            batch.num_tokens_after_padding,
            num_tokens=batch.num_tokens,
        )
        return tables, slots

    def capture_model(self, **named: Any) -> int:
        """Capture graphs as vLLM does, without its warning where there are none."""
        if not self.needs_cudagraph_capture():
            return 0
        self._sent.forget()
        # A V1 runner of this process has disabled it after its captures.
        set_cudagraph_capturing_enabled(True)
        try:
            return super().capture_model(**named)
        finally:
            set_cudagraph_capturing_enabled(False)

    def profile_cudagraph_memory(self) -> int:
        """Estimate graph memory as vLLM does, whose function clears all wrappers' graphs, with this
        runner's wrappers only."""
        with capture_sizes.without_other_engines(self.compilation_config):
            return super().profile_cudagraph_memory()
