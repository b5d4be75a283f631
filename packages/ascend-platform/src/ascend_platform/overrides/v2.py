# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Names of vLLM that the V2 model runner replaces; compared where V2 is chosen."""

from ascend_platform.overrides.launch_sites import SINCE, sources
from ascend_platform.overrides.table import Override, kernel, torch_view

_GPU = "vllm.v1.worker.gpu"
_WATERMARKING = "vllm.v1.watermarking"
_TRITON = "Triton runs on the NPU, or vLLM has a PyTorch form of the kernel"


def _listed(target: str) -> dict[str, str]:
    """The fingerprint that launch_sites.csv has."""
    return {SINCE: sources()[target]}


def _function(
    module: str, name: str, why: str, *importers: str, kept_in: tuple[str, ...] = ()
) -> Override:
    """A function around a Triton kernel whose own arguments do not contain what the host knows of a
    step."""
    target = f"{_GPU}.{module}:{name}"
    return Override(
        target,
        "replaced",
        why,
        _TRITON,
        _listed(target),
        replaced_in=(f"{_GPU}.{module}", *(f"{_GPU}.{importer}" for importer in importers)),
        kept_in=(f"{_GPU}.spec_decode.dflash", *kept_in),
    )


def _kernel(module: str, name: str, why: str) -> Override:
    return kernel(f"{module}:{name}", why, _listed(f"{module}:{name}"))


_OF_RANKS = ("model_runner", "cudagraph_utils", "ubatch_utils", "spec_decode.speculator")

OVERRIDES: tuple[Override, ...] = (
    Override(
        "vllm.triton_utils.importing:HAS_TRITON",
        "replaced",
        "the worker refuses the V2 runner without Triton, and so does its n-gram drafter",
        "vLLM asks the platform whether it serves the V2 runner without Triton",
        {SINCE: "7410e97a826d"},
        compared="vllm.v1.worker.gpu_worker:Worker.__init__",
        replaced_in=("vllm.v1.worker.gpu_worker", f"{_GPU}.spec_decode.ngram.speculator"),
        kept_in=("vllm",),
    ),
    torch_view(
        f"{_GPU}.model_runner",
        "the V2 runner makes its copy stream by torch.cuda",
        "94cd679ae1c6",
        SINCE,
    ),
    torch_view(
        f"{_GPU}.async_utils",
        "it copies sampled tokens on a torch.cuda stream",
        "edf7c6d7179e",
        SINCE,
    ),
    torch_view(
        f"{_GPU}.structured_outputs",
        "it copies grammar masks on a torch.cuda stream",
        "7420a0e96b51",
        SINCE,
    ),
    torch_view(
        f"{_GPU}.spec_decode.utils",
        "every V2 runner makes a torch.cuda stream for draft tokens",
        "0285abb6afad",
        SINCE,
    ),
    torch_view(
        f"{_GPU}.pp_utils",
        "stages broadcast sampled tokens on a torch.cuda stream",
        "0285abb6afad",
        SINCE,
    ),
    torch_view(
        f"{_GPU}.cudagraph_utils", "full graphs are torch.cuda.CUDAGraph", "d5ff749fd829", SINCE
    ),
    Override(
        f"{_GPU}.cudagraph_utils:ModelCudaGraphManager",
        "replaced",
        "full graphs are replayed outside of a forward context, and graphs take streams, which NPUs"
        " have few of",
        "vLLM asks the platform for its graph manager",
        {SINCE: "5a894a5df517"},
        replaced_in=(f"{_GPU}.model_runner",),
        kept_in=(f"{_GPU}.cudagraph_utils", "vllm.models"),
    ),
    Override(
        "vllm.utils.platform_utils:is_uva_available",
        "replaced",
        "NPUs have pinned memory, but kernels cannot read it",
        "vLLM asks the platform for a view of host memory",
        {SINCE: "4dddfaf1c8f1"},
        replaced_in=(f"{_GPU}.buffer_utils",),
        kept_in=("vllm.utils.platform_utils", "vllm.model_executor", "vllm.models"),
    ),
    Override(
        f"{_GPU}.buffer_utils:UvaBufferPool",
        "replaced",
        "without such views it copies from pageable memory, for which the host waits",
        "NonUvaBuffer copies from pinned memory",
        {SINCE: "a03db875667d"},
        kept_in=("vllm.models",),
    ),
    Override(
        f"{_GPU}.buffer_utils:UvaBackedTensor.copy_to_uva",
        "replaced",
        "each step calls it for some sixteen small tensors, most of which have not changed",
        "vLLM copies what has changed",
        {SINCE: "cddad6677af2"},
    ),
    Override(
        "vllm.utils.torch_utils:async_tensor_h2d",
        "replaced",
        "prepare_inputs copies the states and starts of requests in each step, most of which are"
        " those of the last one",
        "vLLM copies what has changed",
        {SINCE: "b7ec14317e52"},
        replaced_in=(f"{_GPU}.model_runner",),
        kept_in=(
            *(
                f"vllm.{package}"
                for package in ("distributed", "lora", "model_executor", "models", "third_party")
            ),
            *(
                f"vllm.v1.{package}"
                for package in (
                    "attention",
                    "hisparse",
                    "sample",
                    "spec_decode",
                    "structured_output",
                    "worker",
                )
            ),
        ),
    ),
    Override(
        f"{_GPU}.async_utils:async_copy_to_np",
        "replaced",
        "each step copies the number of sampled tokens to the host, which knows it without draft"
        " tokens",
        "vLLM copies it only in steps with draft tokens",
        {SINCE: "08ece0bf637a"},
        kept_in=(f"{_GPU}.spec_decode.utils",),
    ),
    Override(
        "vllm.utils.gc_utils:freeze_gc_for_cudagraph_capture",
        "replaced",
        "it ends what was frozen, so that later collections walk through all that is imported",
        "vLLM keeps frozen objects frozen after a capture",
        {SINCE: "09c97c8953b1"},
        replaced_in=(f"{_GPU}.model_runner",),
        kept_in=("vllm.v1.worker",),
    ),
    Override(
        f"{_GPU}.buffer_utils:StagedWriteTensor.apply_write",
        "replaced",
        "it launches a Triton kernel",
        _TRITON,
        _listed(f"{_GPU}.buffer_utils:StagedWriteTensor.apply_write"),
    ),
    Override(
        f"{_GPU}.states:RequestState",
        "replaced",
        "new requests' token counts and tokens are five tensors, each of which is copied and"
        " written separately",
        "vLLM keeps the token counts in one tensor",
        {SINCE: "d78c35d4f575"},
        replaced_in=(f"{_GPU}.model_runner",),
        kept_in=(_GPU, "vllm.model_executor", "vllm.models"),  # In annotations.
    ),
    Override(
        f"{_GPU}.block_table:BlockTables",
        "replaced",
        "its kernels take addresses, and give padding tokens slot -1, which npu_scatter_pa_kv_cache"
        " rejects",
        _TRITON,
        {SINCE: "e2fdeaa0ebe8"},
        replaced_in=(f"{_GPU}.model_runner",),
        kept_in=(_GPU, "vllm.v1.hisparse", "vllm.models"),  # In annotations.
    ),
    Override(
        f"{_GPU}.attn_utils:init_kv_cache",
        "replaced",
        "a layer's keys and values are one tensor there, and two for CANN's kernels",
        "vLLM lets a platform split the KV cache",
        {SINCE: "7eecdf7ebbd4"},
        replaced_in=(f"{_GPU}.model_runner",),
        kept_in=(f"{_GPU}.attn_utils",),
    ),
    _function(
        "input_batch",
        "prepare_prefill_inputs",
        "the tokens of prompts",
        "model_runner",
    ),
    _function(
        "input_batch",
        "prepare_pos_seq_lens",
        "positions and sequence lengths",
        "model_runner",
    ),
    _function(
        "input_batch",
        "combine_sampled_and_draft_tokens",
        "the last sampled tokens",
        "model_runner",
    ),
    _function(
        "input_batch",
        "get_num_sampled_and_rejected",
        "how many tokens each request has sampled",
        "sample.sampler",
        "spec_decode.rejection_sampler",
    ),
    _function(
        "input_batch",
        "expand_idx_mapping",
        "the request of each logit",
        "model_runner",
    ),
    _function("cp_utils", "prepare_dcp_local_seq_lens", "context parallelism", *_OF_RANKS),
    _kernel(
        f"{_GPU}.mm.rope",
        "_prepare_rope_positions_kernel",
        "positions of multimodal rotary tables",
    ),
    Override(
        f"{_GPU}.sample.sampler:Sampler",
        "replaced",
        "npu_top_k_top_p_sample masks and draws in one operator, and a greedy step needs no noise",
        _TRITON,
        {SINCE: "d5fd9940f82c"},
        compared=f"{_GPU}.sample.sampler:Sampler._sample_random",
        replaced_in=(f"{_GPU}.sample.sampler", f"{_GPU}.model_runner"),
        # In annotations, and as a base class.
        kept_in=(f"{_GPU}.spec_decode", _WATERMARKING, "vllm.models"),
    ),
    Override(
        f"{_GPU}.sample.gumbel:gumbel_sample",
        "replaced",
        "the tokens that a drafter samples, and those beside watermarked ones",
        _TRITON,
        _listed(f"{_GPU}.sample.gumbel:gumbel_sample"),
        replaced_in=(
            f"{_GPU}.sample.gumbel",
            f"{_GPU}.spec_decode.speculator",
            f"{_WATERMARKING}.watermarker",
        ),
        # Not reached.
        kept_in=(f"{_GPU}.sample.sampler", f"{_GPU}.spec_decode.dspark", "vllm.models"),
    ),
    Override(
        "vllm.triton_utils.importing:TritonPlaceholder",
        "entries added",
        "functions call triton.next_power_of_2 before they launch a kernel",
        "vLLM's placeholder of Triton has next_power_of_2",
        {SINCE: "4fe7a8716712"},
    ),
    _function("sample.gumbel", "apply_temperature", "temperature", "sample.states"),
    _function("sample.min_p", "apply_min_p", "min-p", "sample.states"),
    _function(
        "sample.penalties",
        "apply_penalties",
        "penalties",
    ),
    _function(
        "sample.penalties",
        "bincount",
        "the tokens that penalties are for",
    ),
    _function(
        "metrics.logits",
        "get_num_nans",
        "VLLM_COMPUTE_NANS_IN_LOGITS",
        "sample.sampler",
        "spec_decode.rejection_sampler",
    ),
    _function(
        "sample.logit_bias",
        "apply_logit_bias",
        "logit bias, allowed tokens and min_tokens",
    ),
    _function(
        "sample.bad_words",
        "apply_bad_words",
        "bad words",
    ),
    Override(
        f"{_GPU}.structured_outputs:StructuredOutputsWorker.apply_grammar_bitmask",
        "replaced",
        "structured output: it launches a Triton kernel, after two copies where one does",
        _TRITON,
        _listed(f"{_GPU}.structured_outputs:StructuredOutputsWorker.apply_grammar_bitmask"),
    ),
    Override(
        f"{_WATERMARKING}.gpu_sampler:GPUWatermarkSampler",
        "replaced",
        "it inherits vLLM's sampler",
        _TRITON,
        {SINCE: "90474bb4f052"},
        replaced_in=(f"{_GPU}.model_runner",),
        kept_in=(_WATERMARKING, _GPU, "vllm.models"),  # In annotations, and to recognize a sampler.
    ),
    Override(
        f"{_WATERMARKING}.gumbel:GumbelWatermarker._sample_watermarked",
        "replaced",
        "without Triton it computes four random words for each token, and takes one",
        "vLLM computes a group of four tokens once",
        {SINCE: "52e86217adec"},
    ),
    Override(
        f"{_GPU}.sample.watermark:repeated_context_mask",
        "replaced",
        "whether a context has been watermarked before",
        _TRITON,
        _listed(f"{_GPU}.sample.watermark:repeated_context_mask"),
        replaced_in=(f"{_GPU}.sample.watermark", f"{_WATERMARKING}.gpu_sampler"),
    ),
    Override(
        f"{_GPU}.sample.watermark:draft_watermarking_mask",
        "replaced",
        "the same of a drafter's contexts",
        _TRITON,
        _listed(f"{_GPU}.sample.watermark:draft_watermarking_mask"),
        replaced_in=(f"{_GPU}.sample.watermark", f"{_WATERMARKING}.spec_decode"),
    ),
    _kernel(
        f"{_GPU}.sample.logprob",
        "_fill_logprob_token_ids_kernel",
        "logprob_token_ids",
    ),
    *(
        _kernel(
            f"{_GPU}.input_batch",
            name,
            why,
        )
        for name, why in (
            ("_post_update_kernel", "the requests' states after sampling"),
            (
                "_post_update_num_computed_tokens_kernel",
                "the requests' states of a rank that does not sample",
            ),
        )
    ),
    *(
        _function(
            "spec_decode.target_dependent_ar.speculator",
            name,
            "inputs of EAGLE's and MTP's drafters",
        )
        for name in ("prepare_prefill_inputs", "prepare_decode_inputs", "update_draft_inputs")
    ),
    _function(
        "spec_decode.standalone_ar.speculator",
        "prepare_prefill_inputs",
        "inputs of a draft model",
    ),
    _function(
        "spec_decode.rejection_sampler",
        "gather_draft_sampled",
        "the draft tokens to verify",
    ),
    _function(
        "spec_decode.rejection_sampler_utils",
        "rejection_sample",
        "which draft tokens are accepted",
        "spec_decode.rejection_sampler",
        kept_in=(_WATERMARKING,),
    ),
    _kernel(
        f"{_GPU}.spec_decode.rejection_sampler",
        "_flatten_sampled_kernel",
        "log-probabilities",
    ),
    _kernel(
        f"{_GPU}.spec_decode.ngram.speculator",
        "_ngram_scan_kernel",
        "n-gram drafter's matches",
    ),
    _kernel(
        f"{_GPU}.spec_decode.ngram.speculator",
        "_ngram_finalize_kernel",
        "n-gram drafter's tokens",
    ),
    _function(
        "sample.logprob",
        "compute_token_logprobs",
        "log-probabilities",
        "sample.prompt_logprob",
    ),
    _kernel(
        f"{_GPU}.sample.logprob",
        "_ranks_kernel",
        "the sampled tokens' ranks",
    ),
    _function(
        "sample.prompt_logprob",
        "get_prompt_logprobs_token_ids",
        "the tokens of prompts to score",
    ),
)
