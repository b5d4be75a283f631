# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Names of vLLM that every engine replaces or uses."""

from ascend_platform.overrides.table import Override, torch_view

_ROUTER = "vllm.model_executor.layers.fused_moe.router."
_HOOK = "vLLM has a platform hook for it"

OVERRIDES: tuple[Override, ...] = (
    torch_view(
        "vllm.distributed.parallel_state",
        "graph_capture and the groups take torch.cuda's streams",
        "7420a0e96b51",
    ),
    torch_view(
        "vllm.compilation.cuda_graph",
        "CUDAGraphWrapper captures by torch.cuda.graph",
        "934f7fb345ba",
    ),
    Override(
        "vllm.distributed.parallel_state:graph_capture",
        "replaced",
        "it prepares the communicators of CUDA and XPU; HCCL's collectives are captured without",
        _HOOK,
        {"0.31": "91b3eceb44f5", "0.33": "4312d0671379"},
        replaced_in=(
            "vllm.distributed.parallel_state",
            "vllm.distributed",
            "vllm.v1.worker.gpu_model_runner",
            "vllm.v1.worker.gpu.cudagraph_utils",
        ),
        kept_in=("vllm.v1.worker.gpu", "vllm.benchmarks"),
    ),
    Override(
        "vllm.v1.attention.backends.mla.prefill.selector:get_mla_prefill_backend",
        "replaced",
        "0.31's own choice needs vLLM's FlashAttention; nothing is replaced from 0.32 on, which"
        " asks the platform",
        "vLLM 0.31 is no longer supported",
        {"0.31": "6f85060308a7", "0.32": "9fb90850b67e"},
        replaced_in=("vllm.model_executor.layers.attention.mla_attention",),
        kept_in=("vllm.v1.attention.backends.mla", "vllm.models"),
    ),
    Override(
        "vllm.distributed.eplb.eplb_state:EplbState.__init__",
        "replaced",
        "it sets the device of the thread that moves experts' weights only on CUDA and XPU",
        "EplbState sets device_index for every device",
        {"0.31": "54ba80813d3b"},
    ),
    Override(
        "vllm.utils.torch_utils:weak_ref_tensor",
        "replaced",
        "it calls an operator of vLLM's CUDA extension",
        _HOOK,
        {"0.31": "8af0c074cd0c"},
        replaced_in=("vllm.utils.torch_utils", "vllm.compilation.breakable_cudagraph"),
    ),
    Override(
        "vllm.compilation.cuda_graph:CUDAGraphWrapper._all_instances",
        "used",
        "vLLM clears, and moves to another memory pool, the graphs of all engines of the process",
        "vLLM's profile_cudagraph_memory clears only the graphs of its runner",
        {"0.31": "a9c2e5f493e3"},
        compared="vllm.compilation.cuda_graph:CUDAGraphWrapper.__init__",
    ),
    Override(
        "vllm.compilation.compiler_interface:EagerAdaptor",
        "replaced",
        "vLLM's eager compiler runs no passes, and there is no Inductor",
        "the eager compiler runs the platform's pass manager",
        {"0.31": "92739aeba699"},
        compared="vllm.compilation.compiler_interface:EagerAdaptor.compile",
        replaced_in=("vllm.compilation.backends",),
    ),
    Override(
        "vllm.lora.utils:_all_lora_classes",
        "replaced",
        "vLLM's LoRA on experts needs a modular kernel of Triton",
        "vLLM lets a platform register classes of LoRA layers",
        {"0.31": "b9854c4e7282"},
        compared="vllm.lora.layers.fused_moe:FusedMoEWithLoRA.__init__",
    ),
    Override(
        "vllm.model_executor.layers.vocab_parallel_embedding:get_masked_input_and_mask",
        "replaced",
        "torch.compile fuses its thirteen operators only on CUDA, and the layer has no hook",
        "the layer asks the platform for it",
        {"0.31": "6b69b33dab0e"},
    ),
    Override(
        "vllm.model_executor.layers.fused_moe.runner.shared_experts:SharedExperts",
        "replaced",
        "it uses a second stream only on CUDA",
        "aux_stream and the class's order ask the platform",
        {"0.31": "ae6b09963e9e", "0.33": "9c08c18729cd"},
        replaced_in=("vllm.model_executor.layers.fused_moe.runner.moe_runner",),
        kept_in=("vllm.model_executor", "vllm.models", "vllm.lora"),  # In annotations.
    ),
    Override(
        "vllm.model_executor.models.deepseek_v2:DeepseekV2DecoderLayer.forward",
        "replaced",
        "with TP, DP and EP all TP ranks but rank 0 compute padding in a step of one token",
        "vLLM tracks whether hidden states are sharded, as in its pull request 50691",
        {"0.31": "67623f49e863"},
    ),
    Override(
        f"{_ROUTER}grouped_topk_router:grouped_topk",
        "replaced",
        "npu_moe_gating_top_k does it in one operator, and the router has no hook",
        "the router asks the platform for it",
        {"0.31": "84e56a4c3d15"},
    ),
    Override(
        f"{_ROUTER}base_router:eplb_map_to_physical_and_record",
        "replaced",
        "for other devices than CUDA, ROCm and XPU vLLM returns the logical ids unmapped, and"
        " counts nothing",
        "vLLM's fallback maps the ids",
        {"0.31": "b0dacc84bbf9"},
        replaced_in=(
            f"{_ROUTER}base_router",
            "vllm.model_executor.layers.fused_moe.deep_gemm_mega_moe",
            "vllm.models.deepseek_v4.nvidia.model",
            "vllm.models.kimi_k3.nvidia.model",
        ),
    ),
    Override(
        f"{_ROUTER}zero_expert_router:ZeroExpertRouter._compute_routing",
        "replaced",
        "it launches a Triton kernel that is not in vLLM's registry of kernels, and tensor[mask] ="
        " 0 waits for the device",
        "vLLM computes the share of experts without weights in PyTorch",
        {"0.31": "6fb87209ee4a"},
    ),
    *(
        Override(
            f"{_ROUTER}{module}:vllm_topk_{scores}",
            "replaced",
            f"it calls torch.ops._moe_C.topk_{scores} of vLLM's CUDA extension; the NPU's operators"
            " return new tensors",
            "the router asks the platform for it",
            {"0.31": fingerprinted},
        )
        for module, scores, fingerprinted in (
            ("fused_topk_router", "softmax", "ab8a6e501fc2"),
            ("fused_topk_router", "sigmoid", "344ea2f4a103"),
            ("fused_topk_bias_router", "softmax", "c674f96edd00"),
            ("fused_topk_bias_router", "sigmoid", "75fcefd3c2e7"),
        )
    ),
    *(
        Override(
            f"vllm.profiler.wrapper:{table}",
            "entries added",
            "vLLM looks up by device type what its profiler can record",
            _HOOK,
            {"0.31": "7858fd04a880"},
            compared="vllm.profiler.wrapper:validate_worker_profiler_config",
        )
        for table in (
            "_SUPPORTED_PROFILER_KINDS",
            "_DEFAULT_TORCH_PROFILER_ACTIVITIES",
            "_SUPPORTED_TORCH_PROFILER_ACTIVITIES",
        )
    ),
    Override(
        "vllm.model_executor.layers.rotary_embedding:_ROPE_DICT",
        "used",
        "engines of a process share the rotary tables of equal models, and sleep mode frees those"
        " of its engine",
        "vLLM keeps the tables per engine",
        {"0.31": "24362a6e9494"},
    ),
    Override(
        "vllm.v1.executor.ray_utils:WORKER_SPECIFIC_ENV_VARS",
        "entries added",
        "Ray workers on other nodes must not get the driver's visible NPUs and address, nor Ray's"
        " state the secrets",
        "vLLM takes the platform's device_control_env_var for it",
        {"0.31": "c65f283590fa"},
    ),
    Override(
        "vllm.envs:environment_variables",
        "entries added",
        "vLLM warns of environment variables that it does not know",
        "vLLM lets plugins register environment variables",
        {"0.31": "bd04f7d404be"},
        compared="vllm.platforms.interface:Platform.validate_environ",
    ),
)
