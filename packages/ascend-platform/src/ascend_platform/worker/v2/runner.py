"""vLLM's V2 model runner on the NPU: torch.npu streams, split KV caches, and PyTorch in place of Triton kernels."""

from typing import Any

import torch
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from ascend_platform.attention import kv_cache
from ascend_platform.vllm_overrides import override
from ascend_platform.worker.model_runner import torch_on_npu
from ascend_platform.worker.v2 import buffers, graphs, inputs, overrides, sampling  # noqa: F401
from ascend_platform.worker.v2.block_tables import NPUBlockTables

_init_kv_cache = attn_utils.init_kv_cache


def init_kv_cache(layers: dict[str, Any], config: Any, *args: Any, **kwargs: Any) -> dict[str, kv_cache.KVCachePair]:
    """Allocate the KV cache as vLLM does, then bind a KVCachePair to each layer."""
    kv_cache.check(config)
    if (count := len(config.kv_cache_groups)) > 1:
        raise NotImplementedError(f"the model has {count} KV cache groups, and the V2 model runner supports one; fix: use V1")
    caches = _init_kv_cache(layers, config, *args, **kwargs)
    pairs = {name: kv_cache.split_kv_cache(layers[name].kv_cache, layers[name].head_size) for name in caches}
    for name, pair in pairs.items():
        layers[name].bind_kv_cache(pair)
    return pairs


override("vllm.v1.worker.gpu.model_runner:torch", torch_on_npu)
override("vllm.v1.worker.gpu.async_utils:torch", torch_on_npu)
override("vllm.v1.worker.gpu.structured_outputs:torch", torch_on_npu)
override("vllm.v1.worker.gpu.spec_decode.utils:torch", torch_on_npu)
override("vllm.v1.worker.gpu.attn_utils:init_kv_cache", init_kv_cache)
override("vllm.v1.worker.gpu.block_table:BlockTables", NPUBlockTables)
buffers.install()
graphs.install()
inputs.install()
sampling.install()


class NPUModelRunnerV2(GPUModelRunner):
    """vLLM's V2 GPUModelRunner; what it does not serve is refused by ``ascend_platform/config/model_runner.py``."""

    cudagraph_manager: Any
    model: Any
    model_state: Any
    sampler: Any
    block_tables: Any

    def load_model(self, *arguments: Any, **named: Any) -> None:
        """Load the model as vLLM does, with rotary tables of its own, because sleep mode frees them."""
        _ROPE_DICT.clear()
        super().load_model(*arguments, **named)
        prepare = self.model_state.prepare_attn

        def prepare_attn(*args: Any, **kwargs: Any) -> Any:
            metadata = prepare(*args, **kwargs)
            if self.cudagraph_manager is not None:
                self.cudagraph_manager.attn_metadata = metadata
            return metadata

        vars(self.model_state)["prepare_attn"] = prepare_attn

    def initialize_kv_cache(self, *arguments: Any, **named: Any) -> None:
        """Allocate the KV cache; ``self.kv_caches``, in which blocks are copied, lists keys and values as two caches."""
        super().initialize_kv_cache(*arguments, **named)
        tensors = [tensor for pair in self.kv_caches for tensor in pair]
        self.kv_caches = list({tensor.data_ptr(): tensor for tensor in tensors}.values())  # KV cache groups share tensors

    def prepare_inputs(self, scheduler_output: Any, batch: Any, *arguments: Any) -> InputBatch:
        with inputs.preparing(inputs.Step(batch.num_scheduled_tokens, batch.has_prefill)):
            return super().prepare_inputs(scheduler_output, batch, *arguments)

    def prepare_attn(self, batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """As vLLM's, with the number of tokens, which its kernel reads on the device."""
        computed = self.req_states.num_computed_tokens.gpu
        padded = batch.num_reqs_after_padding
        tables = self.block_tables.gather_block_tables(batch.idx_mapping, padded, num_computed_tokens=computed)
        slots = self.block_tables.compute_slot_mappings(
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            batch.num_tokens_after_padding,
            num_tokens=batch.num_tokens,
        )
        return tables, slots

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        """Sample greedily; other sampling parameters, which vLLM tries too, are refused."""
        num_reqs = len(hidden_states)
        batch = InputBatch.make_dummy(num_reqs, num_reqs, self.input_buffers)
        self.sampler(self.model.compute_logits(hidden_states), batch)

    def capture_model(self, **named: Any) -> int:
        """Capture graphs as vLLM does, without its warning where there are none."""
        if not self.needs_cudagraph_capture():
            return 0
        set_cudagraph_capturing_enabled(True)  # a V1 runner of this process has disabled it after its captures
        try:
            return super().capture_model(**named)
        finally:
            set_cudagraph_capturing_enabled(False)
