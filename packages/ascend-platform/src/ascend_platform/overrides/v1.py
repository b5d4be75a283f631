# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Names of vLLM that the V1 model runner replaces; compared where V1 is chosen."""

from ascend_platform.overrides.table import Override, kernel, torch_view

OVERRIDES: tuple[Override, ...] = (
    torch_view(
        "vllm.v1.worker.gpu_model_runner",
        "the V1 runner makes streams and events by torch.cuda",
        "5a9f55bd7b2c",
    ),
    torch_view(
        "vllm.v1.spec_decode.ngram_proposer_gpu",
        "it copies the number of draft tokens on a torch.cuda stream",
        "0285abb6afad",
    ),
    Override(
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p",
        "replaced",
        "npu_top_k_top_p_sample does it in one operator, and the rejection sampler has no hook",
        "the rejection sampler uses the sampler's own method",
        {"0.31": "a1916ce18e6c", "0.33": "1d6c2688bdca"},
        replaced_in=("vllm.v1.sample.rejection_sampler",),
        kept_in=(
            "vllm.v1.sample.ops.topk_topp_sampler",
            "vllm.v1.worker.gpu",
            "vllm.v1.watermarking",
            "vllm.model_executor.models.diffusion_gemma",
        ),
    ),
    Override(
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.build_per_group_and_layer_attn_metadata",
        "replaced",
        "rejected tokens change seq_lens only on the device, and have slot -1, which"
        " npu_scatter_pa_kv_cache rejects",
        "drafters keep exact sequence lengths on the host and use slots of the null block",
        {"0.31": "1a23a12d0de6", "0.32": "c117a57e4063"},
    ),
    Override(
        "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._get_slot_mapping",
        "replaced",
        "padding tokens of a drafter have slot -1, which npu_scatter_pa_kv_cache rejects",
        "drafters use slots of the null block",
        {"0.31": "f9cd94f47416"},
    ),
    Override(
        "vllm.v1.spec_decode.utils:extend_all_queries_by_N",
        "replaced",
        "it extends seq_lens only on the device",
        "it extends seq_lens_cpu_upper_bound",
        {"0.31": "a4edf38c9dc1"},
        replaced_in=("vllm.v1.spec_decode.llm_base_proposer",),
    ),
    kernel(
        "vllm.v1.worker.block_table:ComputeSlotMappingKernel.kernel",
        "the slot of each token in the KV cache",
        {"0.31": "258a232bfdb8", "0.32": "5ebee7d19b24"},
    ),
    *(
        kernel(f"vllm.v1.sample.rejection_sampler:{name}", why, {"0.31": source})
        for name, why, source in (
            (
                "expand_kernel",
                "a request's sampling parameter for each of its draft tokens",
                "c78260607249",
            ),
            (
                "rejection_greedy_sample_kernel",
                "accepted draft tokens at temperature 0",
                "8954f37cd20f",
            ),
            ("rejection_random_sample_kernel", "accepted draft tokens", "82b20c180407"),
            (
                "sample_recovered_tokens_kernel",
                "the token that replaces the first rejected one",
                "4ec2a810d3d8",
            ),
        )
    ),
    *(
        kernel(f"vllm.v1.spec_decode.utils:{name}", why, {"0.31": source})
        for name, why, source in (
            (
                "eagle_step_slot_mapping_metadata_kernel",
                "positions and slots of the drafter's next step",
                "15bfc6d06e03",
            ),
            (
                "eagle_prepare_inputs_padded_kernel",
                "the drafter's inputs after rejection",
                "25a6038779a9",
            ),
            (
                "eagle_prepare_next_token_padded_kernel",
                "the last accepted token of each request",
                "dcb94ba9102c",
            ),
            (
                "copy_and_expand_eagle_inputs_kernel",
                "the inputs of parallel drafting",
                "bc6ff465c28d",
            ),
        )
    ),
)
