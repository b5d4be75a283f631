# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Functions of vLLM's linear attention and state-space layers that launch Triton kernels; replaced,
and compared, where an engine has such a model."""

from collections.abc import Mapping

from ascend_platform.overrides.table import Override

SINCE = "0.32"
"""The first minor version of vLLM whose layers with states are supported."""

_LAYERS = "vllm.model_executor.layers.mamba."
_OPS = f"{_LAYERS}ops."
_GDN = f"{_LAYERS}gdn."
_FLA = "vllm.third_party.flash_linear_attention.ops"
_GDN_LAYERS = (
    f"{_GDN}qwen_gdn_linear_attn",
    f"{_GDN}olmo_gdn_linear_attn",
    f"{_GDN}kimi_gdn_linear_attn",
)
_LAYERS_WITH_CONVOLUTION = (
    f"{_LAYERS}mamba_mixer",
    f"{_LAYERS}mamba_mixer2",
    f"{_LAYERS}short_conv",
    *_GDN_LAYERS,
)
_REFUSED = ("vllm.models", "vllm.model_executor.models.bailing_moe_v3")
"""Models that are refused."""


def _function(
    module: str,
    name: str,
    why: str,
    fingerprint: str,
    *importers: str,
    later: Mapping[str, str] | None = None,
) -> Override:
    """A function, with its fingerprint in SINCE and those of later sources by version."""
    remove_when = "Triton runs on the NPU, or vLLM has a PyTorch form of the function"
    fingerprints, named = {SINCE: fingerprint, **(later or {})}, (module, *importers)
    return Override(
        f"{module}:{name}",
        "replaced",
        why,
        remove_when,
        fingerprints,
        replaced_in=named,
        kept_in=_REFUSED,
    )


OVERRIDES: tuple[Override, ...] = (
    *(
        _function(
            f"{_OPS}causal_conv1d",
            name,
            why,
            fingerprint,
            *_LAYERS_WITH_CONVOLUTION,
            later={"0.33": later},
        )
        for name, why, fingerprint, later in (
            ("causal_conv1d_fn", "convolution of a prefill", "669e4b2faa90", "e3c4969dcf20"),
            ("causal_conv1d_update", "convolution of a decode", "eb5fd29588eb", "c2db71c01fd2"),
        )
    ),
    _function(
        f"{_FLA}.fused_gdn_prefill_post_conv",
        "fused_post_conv_prep",
        "gates of a prefill",
        "7b68e1f21c99",
        _FLA,
        *_GDN_LAYERS,
    ),
    _function(
        f"{_FLA}.chunk",
        "chunk_gated_delta_rule",
        "gated delta rule of a prefill",
        "cce090c99e33",
        _FLA,
        *_GDN_LAYERS,
    ),
    *(
        _function(
            f"{_FLA}.{module}",
            name,
            "gated delta rule of a decode",
            fingerprint,
            _FLA,
            *_GDN_LAYERS,
            later=later,
        )
        for module, name, fingerprint, later in (
            ("fused_recurrent", "fused_recurrent_gated_delta_rule", "68870d7098f6", {}),
            (
                "fused_recurrent",
                "fused_recurrent_gated_delta_rule_packed_decode",
                "3a1b709eb8c8",
                {"0.33": "83bf0b2fe397"},
            ),
            ("fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update", "b1b09df76281", {}),
        )
    ),
    _function(
        f"{_OPS}ssd_combined",
        "mamba_chunk_scan_combined_varlen",
        "scan of a prefill",
        "f827176ce553",
        f"{_LAYERS}mamba_mixer2",
        later={"0.33": "43f2271198f2"},
    ),
    _function(
        f"{_OPS}mamba_ssm",
        "selective_scan_fn",
        "scan of a prefill",
        "77024ade9239",
        f"{_LAYERS}mamba_mixer",
    ),
    _function(f"{_OPS}mamba_ssm", "selective_state_update", "step of a decode", "b44b6b89e491"),
    _function(
        "vllm.v1.worker.mamba_utils",
        "collect_mamba_copy_meta",
        "states at the ends of cached prefixes",
        "883f8e3a9218",
    ),
    Override(
        "vllm.triton_utils.allocation:set_triton_allocator",
        "replaced",
        "OLMo-hybrid's layer calls it while it is made",
        "Triton runs on the NPU, or the layer does without",
        {SINCE: "dc2a5b54a990"},
        replaced_in=("vllm.triton_utils.allocation", f"{_GDN}olmo_gdn_linear_attn"),
        kept_in=(
            "vllm.lora",
            "vllm.model_executor.layers.quantization",
            "vllm.model_executor.layers.fused_moe",
        ),
    ),
    _function(
        f"{_GDN}olmo_gdn_linear_attn",
        "fused_olmo_hybrid_gdn_gating",
        "gates of OLMo-hybrid",
        "48c94a6683d5",
    ),
)
