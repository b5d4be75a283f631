# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tiny random DeepSeek-V4: the published config.json in width and depth, and the published names of
tensors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "compress_ratios": [0, 4, 128, 4, 0],  # and that of the MTP layer
    "compress_rope_theta": 160000.0,
    "expert_dtype": "bf16",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,  # The published 20 converge, so that 19 would give the same.
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 128,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 16,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 3,  # With two pipeline stages some are in the second.
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 1.0,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "vocab_size": 256,
}

ALONE = {"compress_ratios": [0], "num_hidden_layers": 1, "num_hash_layers": 0}
"""Keys of the configuration of a model of one layer that is the MTP layer."""
JOINS = ("enorm.weight", "hnorm.weight", "e_proj.weight", "h_proj.weight")
AFTER = ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale")
SHARED = ("embed.weight", "head.weight")
"""Tensors of an MTP layer that join its inputs, those after its decoder layer, and the model's that
it has no copy of."""

PUBLISHED = (
    (r"^model\.", ""),
    (r"^lm_head\.", "head."),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.self_attn\.compressor\.indexer\.scorer\.weights_proj", ".attn.indexer.weights_proj"),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj", ".attn.indexer.wq_b"),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.self_attn\.", ".attn."),
    (r"(compressor)\.kv_norm", r"\1.norm"),
    (r"\.position_bias$", ".ape"),
    (r"\.q_a_norm", ".q_norm"),
    (r"\.q_a_proj", ".wq_a"),
    (r"\.q_b_proj", ".wq_b"),
    (r"\.(kv|gate)_proj\.weight$", r".w\1.weight"),
    (r"\.wgate(?=\.)(?<=shared_experts\.wgate)", ".w1"),
    (r"\.shared_experts\.down_proj", ".shared_experts.w2"),
    (r"\.shared_experts\.up_proj", ".shared_experts.w3"),
    (r"\.o_([ab])_proj", r".wo_\1"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm", ".attn_norm"),
    (r"\.post_attention_layernorm", ".ffn_norm"),
    (r"\.mlp\.", ".ffn."),
    (r"\.e_score_correction_bias$", ".bias"),
)
"""From transformers' names to those of the published checkpoints."""


def write_config(folder: Path, **changed: Any) -> None:
    """Write config.json; ``changed`` are other values of keys."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changed, indent=1))


def write(folder: Path, seed: int = 0, embedding: float = 1, **changed: Any) -> None:
    """Write config.json and weights, float32 numbers that bfloat16 has.

    ``folder / "mtp"`` is the MTP layer as a model of one layer.

    Args:
        embedding: size of the embeddings; with large ones the next token depends on the last most,
            so that drafts are right more often.
        changed: other values of keys of the configuration.
    """
    import torch
    from safetensors.torch import save_file

    write_config(folder, **changed)
    torch.manual_seed(seed)
    tensors = weights(folder)
    tensors["embed.weight"] *= embedding
    alone = folder / "mtp"
    write_config(alone, **(changed | ALONE))
    layer = {name.removeprefix("layers.0."): each for name, each in weights(alone).items()}
    drafter = {name: each for name, each in layer.items() if name not in SHARED} | joins(embedding)
    tensors |= {f"mtp.0.{name}": each for name, each in drafter.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_alone(alone, tensors)


def write_alone(folder: Path, tensors: dict[str, Any]) -> None:
    """Write the MTP layer of a model's tensors as the weights of a model of one layer, and those
    that join its inputs to ``joins.safetensors``."""
    from safetensors.torch import save_file

    mtp = {name: each for name, each in tensors.items() if name.startswith("mtp.0.")}
    named = {name.removeprefix("mtp.0."): each for name, each in mtp.items()}
    joined = {name: named.pop(name) for name in JOINS}
    layer = {name if name in AFTER else f"layers.0.{name}": each for name, each in named.items()}
    layer |= {name: tensors[name] for name in SHARED}
    save_file(layer, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(joined, folder / "joins.safetensors", metadata={"format": "pt"})


def joins(embedding: float) -> dict[str, Any]:
    """Weights by which an MTP layer joins streams and the embedding of the next token."""
    import torch

    size = CONFIG["hidden_size"]
    norms = {f"{name}.weight": 1 + 0.1 * torch.randn(size) for name in ("enorm", "hnorm")}
    streams = 0.3 * size**-0.5 * torch.randn(size, size)
    named = norms | {"e_proj.weight": embedding * torch.eye(size), "h_proj.weight": streams}
    return {name: named[name].bfloat16().float() for name in JOINS}


def weights(folder: Path) -> dict[str, Any]:
    """Random weights of a configuration, by their published names."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        tensors |= published(name, fill(name, tensor, config.n_routed_experts))
    return tensors


def fill(name: str, tensor: Any, experts: int) -> Any:
    """Random values under which each part of the model changes the answers."""
    import torch

    if name.endswith("tid2eid"):
        chosen = [torch.randperm(experts)[: tensor.shape[1]] for _ in range(len(tensor))]
        return torch.stack(chosen).int()
    random = torch.randn_like(tensor)
    if name.endswith("scale"):
        random = torch.ones_like(tensor)
    elif "norm" in name:
        random = 1 + 0.1 * random
    elif name.endswith("e_score_correction_bias"):
        random = 0.3 * random
    elif not name.endswith(("base", "sinks", "position_bias", "embed_tokens.weight")):
        random = 1.5 * tensor.shape[-1] ** -0.5 * random
    return random.bfloat16().float()


def published(name: str, value: Any) -> dict[str, Any]:
    """A tensor of transformers' model under its published names."""
    for pattern, replacement in PUBLISHED:
        name = re.sub(pattern, replacement, name)
    if name.endswith(".experts.gate_up_proj"):
        folder, tensors = name.removesuffix("gate_up_proj"), dict[str, Any]()
        for expert, both in enumerate(value):
            gate, up = both.chunk(2)
            tensors |= {f"{folder}{expert}.w1.weight": gate, f"{folder}{expert}.w3.weight": up}
        return {each: part.contiguous() for each, part in tensors.items()}
    if name.endswith(".experts.down_proj"):
        folder = name.removesuffix("down_proj")
        return {f"{folder}{i}.w2.weight": each.contiguous() for i, each in enumerate(value)}
    return {name: value.contiguous()}


FP8 = r"\.(wq_a|wq_b|wkv|wo_a|wo_b|e_proj|h_proj)\.weight$|\.shared_experts\.w[123]\.weight$"
MXFP4 = r"\.experts\.\d+\.w[123]\.weight$"
COMPRESSOR = r"\.compressor\."
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


def quantize(folder: Path, target: Path) -> None:
    """Write the published layout of a model's checkpoint to ``target``, FP8 by blocks of 128 x 128
    with scales in e8m0 and experts in MXFP4, and to ``target / "reference"`` the numbers that it
    has, in float32."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    stored, exact = dict[str, Any](), dict[str, Any]()
    for name, value in load_file(folder / "model.safetensors").items():
        form = None
        if re.search(MXFP4, name):
            form = mxfp4
        elif re.search(FP8, name) and not re.search(COMPRESSOR, name):
            form = fp8
        if form is None:
            stored[name] = exact[name] = value
            continue
        packed, scale, exact[name] = form(value)
        stored |= {name: packed, name.removesuffix("weight") + "scale": scale}
    (target / "reference").mkdir(parents=True, exist_ok=True)
    save_file(exact, target / "reference" / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    (target / "reference" / "config.json").write_text(json.dumps(config))
    alone = target / "reference" / "mtp"
    alone.mkdir(exist_ok=True)
    (alone / "config.json").write_text(json.dumps(config | ALONE))
    write_alone(alone, exact)
    config |= {"expert_dtype": "fp4", "quantization_config": QUANTIZATION}
    (target / "config.json").write_text(json.dumps(config))


def powers(largest_value: Any, largest: float) -> Any:
    """The least powers of two by which numbers up to ``largest_value`` are at most ``largest``."""
    return (largest_value.clamp_min(1e-20) / largest).log2().ceil().exp2()


def fp8(value: Any) -> tuple[Any, Any, Any]:
    """A matrix in e4m3, its scales in e8m0, and the numbers that both stand for."""
    import torch

    rows, columns = value.shape
    pads = (0, -columns % 128, 0, -rows % 128)
    blocks = torch.nn.functional.pad(value, pads).unfold(0, 128, 128).unfold(1, 128, 128)
    scale = powers(blocks.abs().amax((-1, -2)), 448.0)
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    packed = (value / wide).to(torch.float8_e4m3fn)
    return packed, scale.to(torch.float8_e8m0fnu), (packed.float() * wide).contiguous()


def mxfp4(value: Any) -> tuple[Any, Any, Any]:
    """A matrix in e2m1, two numbers a byte, its scales in e8m0 for 32 inputs, and the numbers."""
    import torch

    groups = value.unflatten(-1, (-1, 32))
    scale = powers(groups.abs().amax(-1), 6.0)
    scaled = groups / scale.unsqueeze(-1)
    magnitudes = torch.tensor(E2M1)
    nearest = (scaled.abs().unsqueeze(-1) - magnitudes).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).flatten(-2)
    packed = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8).view(torch.int8)
    numbers = magnitudes[nearest] * scaled.sign() * scale.unsqueeze(-1)
    return packed, scale.to(torch.float8_e8m0fnu), numbers.flatten(-2).contiguous()
