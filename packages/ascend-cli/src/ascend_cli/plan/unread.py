# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Contents of a configuration that the planner does not read: an estimate would be wrong by more
than its range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FAMILIES = {
    "deepseek_v4": "compressed KV caches and hyper-connections",
    "dots3": "attention of its own",
    "glm5_next": "compressed indexers",
    "hy_v4": "hyper-connections",
    "inkling": "convolutions in attention",
    "kimi_k3": "attention residuals",
    "kimi_linear": "KDA layers",
    "minimax_m3": "attention over selected blocks",
    "nemotron_h": "Mamba layers",
    "qwen4_exp": "sparse attention (QSA)",
}
"""By the beginning of the model type."""
PATTERNS = (
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_types",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_state",
    "ssm_cfg",
)
"""Fields of configurations that give some layers other attention, or states."""
READ = (
    "index_topk_pattern",
    "indexer_types",
    "layer_types",
    "mlp_layer_types",
    "mlp_only_layers",
)
HARMLESS = ("activation_sparsity_pattern", "no_rope_layers", "rope_layers")
"""Lists with an entry for each layer: those that the sizes follow, and those that change none."""


def reason(text: Mapping[str, Any]) -> str:
    """The part of a decoder's configuration that is not read, or ""."""
    family = str(text.get("model_type", ""))
    for start, layers in FAMILIES.items():
        if family.startswith(start):
            return layers
    if field := next((name for name in PATTERNS if text.get(name)), ""):
        return f"the layers that {field} describes"
    count = text.get("num_hidden_layers") or text.get("n_layer")
    for name, value in text.items():
        if (
            isinstance(value, list | tuple)
            and len(value) == count
            and name not in (*READ, *HARMLESS)
            and any(each != value[0] for each in value)
        ):
            return f"{name}, which differs between layers"
    return ""


def longest(text: Mapping[str, Any]) -> int:
    """The most tokens of a request, or 0 where the configuration does not say it."""
    length = text.get("max_position_embeddings") or text.get("n_positions") or 0
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor = scaling.get("factor")
    if isinstance(factor, int | float) and factor > 1:
        original = scaling.get("original_max_position_embeddings")
        length = max(length, int((original or length) * factor))
    return int(length) if isinstance(length, int | float) else 0


def scheme(config: Mapping[str, Any]) -> str:
    """The scheme of ``--quantization`` that a checkpoint has by its ``quantization_config``, or
    "none".

    Formats of eight and four bits in floating point are "none": they are converted to 16 bits,
    unless ``ascend.platform.fp8`` says otherwise.
    """
    settings = config.get("quantization_config") or {}
    method = str(settings.get("quant_method", ""))
    if method in ("gptq", "awq"):
        bits = int(settings.get("bits") or settings.get("w_bit") or 16)
        return {4: "w4a16", 8: "w8a16"}.get(bits, "none")
    if method != "compressed-tensors":
        return "none"
    groups = [*(settings.get("config_groups") or {}).values()]
    weights = [group.get("weights") or {} for group in groups]
    if not weights or any(each.get("type") == "float" for each in weights):
        return "none"
    inputs = [(group.get("input_activations") or {}).get("num_bits", 16) for group in groups]
    name = f"w{max(each.get('num_bits', 16) for each in weights)}a{max(inputs)}"
    return name if name in ("w8a8", "w8a16", "w4a16", "w4a8") else "none"
