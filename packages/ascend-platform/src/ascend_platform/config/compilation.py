"""Graph modes and torch.compile passes: defaults on Ascend NPUs, and modes that are refused."""

import dataclasses
import os
from typing import TYPE_CHECKING

from ascend_platform import extension
from ascend_platform.attention import selector

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def set_defaults(vllm_config: "VllmConfig") -> None:
    """Set the graph mode, the compilation mode and the passes that the user has not set."""
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.config.vllm import OptimizationLevel

    compilation, model = vllm_config.compilation_config, vllm_config.model_config
    if compilation.cudagraph_mode is None and vllm_config.optimization_level == OptimizationLevel.O2:
        pooling = model is not None and model.pooler_config is not None
        compilation.cudagraph_mode = CUDAGraphMode.NONE if pooling else CUDAGraphMode.FULL_DECODE_ONLY
    mode = compilation.cudagraph_mode
    if compilation.mode is None and mode is not None and not mode.requires_piecewise_compilation():
        compilation.mode = CompilationMode.NONE  # without Inductor, compiling only serves to split a model into pieces
    if compilation.compile_sizes is None:
        compilation.compile_sizes = []
    for field in dataclasses.fields(compilation.pass_config):
        if getattr(compilation.pass_config, field.name) is None:  # vLLM's other fusions create CUDA operators
            setattr(compilation.pass_config, field.name, field.name == "fuse_norm_quant")


INDEXER_OP = "vllm::npu_sparse_indexer"
"""The operator of ``ascend_platform.attention.indexer``, which piecewise graphs leave out like attention."""


def split_at_indexers(vllm_config: "VllmConfig") -> None:
    """Split a compiled model with sparse latent attention at its indexers, too; vLLM's list has its own operator for them."""
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    if compilation.mode != CompilationMode.VLLM_COMPILE or not selector.is_sparse(vllm_config.model_config):
        return
    if compilation.splitting_ops is None:
        updates = "vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update"  # as set_splitting_ops_for_v1 adds
        compilation.splitting_ops = [*compilation._attention_ops, *updates]
    if compilation.splitting_ops and INDEXER_OP not in compilation.splitting_ops:
        compilation.splitting_ops.append(INDEXER_OP)


def check(vllm_config: "VllmConfig") -> None:
    """Refuse cudagraph_mode FULL with attention that cannot be captured, and graphs with TASK_QUEUE_ENABLE=2.

    Raises:
        RefusedError: the modes that are supported, in one line.
    """
    from vllm.config import CUDAGraphMode

    if vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE and os.environ.get("TASK_QUEUE_ENABLE") == "2":
        raise extension.RefusedError(
            "torch_npu captures no graphs with TASK_QUEUE_ENABLE=2; fix: export TASK_QUEUE_ENABLE=1, or --enforce-eager"
        )
    if vllm_config.model_config is None or vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.FULL:
        return
    if (attention := selector.describe_backend(vllm_config)).startswith("built-in"):
        raise extension.RefusedError(
            f"cudagraph_mode FULL needs attention that can be captured, and this model's is {attention}; "
            "supported: PIECEWISE, NONE"
        )
