# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Graph modes and torch.compile passes: defaults on Ascend NPUs, and modes that are refused."""

import dataclasses
import os
from typing import TYPE_CHECKING

from ascend_platform.config import architectures
from ascend_platform.errors import RefusedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def set_defaults(vllm_config: "VllmConfig") -> None:
    """Set the graph mode, the compilation mode and the passes that the user has not set."""
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.config.vllm import OptimizationLevel

    compilation, model = vllm_config.compilation_config, vllm_config.model_config
    is_o2 = vllm_config.optimization_level == OptimizationLevel.O2
    if compilation.cudagraph_mode is None and is_o2:
        pooling = model is not None and model.pooler_config is not None
        mode_name = "NONE" if pooling else "FULL_DECODE_ONLY"
        compilation.cudagraph_mode = CUDAGraphMode[mode_name]
    mode = compilation.cudagraph_mode
    if compilation.mode is None and mode is not None and not mode.requires_piecewise_compilation():
        # Without Inductor, compiling only serves to split a model into pieces.
        compilation.mode = CompilationMode.NONE
    sizes, largest = compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size
    if sizes is None and largest is None:
        _with_default_sizes.add(vllm_config.instance_id)
    if compilation.compile_sizes is None:
        compilation.compile_sizes = []
    for field in dataclasses.fields(compilation.pass_config):
        # vLLM's other fusions create CUDA operators
        if getattr(compilation.pass_config, field.name) is None:
            setattr(compilation.pass_config, field.name, field.name == "fuse_norm_quant")


_with_default_sizes: set[str] = set()
"""``instance_id`` of configurations in which the user has not set capture sizes."""

SIZE_STEP = 64
"""Tokens between capture sizes above vLLM's largest, 512."""


def cover_largest_decode(vllm_config: "VllmConfig") -> None:
    """Add capture sizes up to the largest decode step in tokens, which with draft tokens is easily
    above vLLM's largest."""
    from vllm.config import CUDAGraphMode

    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    sizes, length = compilation.cudagraph_capture_sizes, vllm_config.uniform_decode_query_len
    is_default = (
        vllm_config.instance_id in _with_default_sizes
        and compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
    )
    if not sizes or not is_default:
        return
    largest = scheduler.max_num_seqs
    requests = (*range(sizes[-1] // length, largest, max(SIZE_STEP // length, 1)), largest)
    most = scheduler.max_num_batched_tokens
    more = [each * length for each in requests if sizes[-1] < each * length <= most]
    compilation.cudagraph_capture_sizes = [*sizes, *more]
    compilation.max_cudagraph_capture_size = compilation.cudagraph_capture_sizes[-1]


INDEXER_OP = "vllm::npu_sparse_indexer"
"""The operator of ``ascend_platform.attention.indexer``, which piecewise graphs leave out like
attention."""


def split_at_indexers(vllm_config: "VllmConfig") -> None:
    """Split a compiled model with sparse latent attention at its indexers, too; vLLM's list has its
    own operator for them."""
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    is_compiled = compilation.mode == CompilationMode.VLLM_COMPILE
    if not is_compiled or not architectures.has_sparse_attention(vllm_config.model_config):
        return
    if compilation.splitting_ops is None:
        # as set_splitting_ops_for_v1 adds
        updates = "vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update"
        compilation.splitting_ops = [*compilation._attention_ops, *updates]
    if compilation.splitting_ops and INDEXER_OP not in compilation.splitting_ops:
        compilation.splitting_ops.append(INDEXER_OP)


def captures_encoder(vllm_config: "VllmConfig") -> bool:
    """Whether a vision encoder is to be captured in graphs, by ``cudagraph_mm_encoder``."""
    model = vllm_config.model_config
    is_eager = model is None or model.enforce_eager or not model.is_multimodal_model
    return vllm_config.compilation_config.cudagraph_mm_encoder and not is_eager


def has_graphs(vllm_config: "VllmConfig") -> bool:
    """Whether steps or a vision encoder are to be captured in graphs."""
    from vllm.config import CUDAGraphMode

    mode = vllm_config.compilation_config.cudagraph_mode
    return mode != CUDAGraphMode.NONE or captures_encoder(vllm_config)


def check(vllm_config: "VllmConfig") -> None:
    """Refuse Inductor, and graphs with adapters and settings of torch_npu that do not go with them.

    Raises:
        RefusedError: the modes that are supported, in one line.
    """
    from vllm.config import CompilationMode

    compilation = vllm_config.compilation_config
    uses_inductor = compilation.backend == "inductor" or compilation.use_inductor_graph_partition
    if compilation.mode != CompilationMode.NONE and uses_inductor:
        raise RefusedError(
            'compilation by Inductor is not supported on Ascend NPUs; fix: remove "backend" and'
            ' "use_inductor_graph_partition" from --compilation-config'
        )
    mode = compilation.cudagraph_mode
    is_blocking = os.environ.get("ASCEND_LAUNCH_BLOCKING") == "1"
    full = mode is not None and mode.has_full_cudagraphs() and f"cudagraph_mode {mode.name}"
    encoder = captures_encoder(vllm_config) and "cudagraph_mm_encoder"
    if (updated := full or encoder) and is_blocking:
        # A replay gets its sequence lengths after the launch, and the host would wait for it
        # before.
        raise RefusedError(
            f"{updated} is not supported with ASCEND_LAUNCH_BLOCKING=1, with which"
            " torch_npu waits for a graph before it gets its sequence lengths; fix: unset"
            " ASCEND_LAUNCH_BLOCKING, or --enforce-eager"
        )
    if vllm_config.lora_config and compilation.mode not in (None, CompilationMode.NONE):
        # torch.compile would record whether adapters were active when it traced the model.
        raise RefusedError(
            "LoRA is not supported with torch.compile, which PIECEWISE, FULL_AND_PIECEWISE and -O3"
            " need; supported: cudagraph_mode FULL_DECODE_ONLY, FULL and NONE; fix:"
            ' --compilation-config \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\''
        )
    if has_graphs(vllm_config) and os.environ.get("TASK_QUEUE_ENABLE") == "2":
        raise RefusedError(
            "torch_npu captures no graphs with TASK_QUEUE_ENABLE=2; fix: export"
            " TASK_QUEUE_ENABLE=1, or --enforce-eager"
        )
