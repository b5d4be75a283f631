# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Small models with predictable tokens, draft models for them, and LoRA adapters.

A token is a character. After each comes, with a margin, the one that a fixed permutation of the
vocabulary says, as far as the layers, whose weights are random and small, do not change it. A
drafter that has the permutation is right nearly always, and one that has another is wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from harness.models import latent
from safetensors.torch import load_file, save_file

CHARACTERS = ["<pad>", "<eos>", *map(chr, range(32, 127))]
VOCABULARY, HIDDEN = 128, 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
"""``config.json`` of a model that is never made."""
EXPERTS = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": False,
}
QWEN_EXPERTS = {
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
QWEN_EXPERTS |= {"shared_expert_intermediate_size": 64, "head_dim": 32}
LATENT: dict[str, Any] = (
    latent.WIDTHS
    | latent.BIASED
    | {
        "q_lora_rank": 96,
        "num_key_value_heads": 4,
        "partial_rotary_factor": 1.0,
    }
)
SPARSE = latent.INDEXER | {
    "index_topk": 16,
    "indexer_rope_interleave": True,
    "index_share_for_mtp_iteration": True,
}
WITH_MTP = "Glm4Moe", "Glm4MoeLite", "DeepseekV3", "GlmMoeDsa"
"""Families whose small models have a layer for MTP."""
MARGIN = 0.06  # Times HIDDEN, this is the logit of the next token.


def embedding() -> torch.Tensor:
    return torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))


def following(steps: int = 1) -> torch.Tensor:
    """For each token, the token `steps` positions later."""
    once = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))
    out = torch.arange(VOCABULARY)
    for _ in range(steps):
        out = once[out]
    return out


def head(steps: int = 1) -> torch.Tensor:
    """Weight of an output layer that maps a token's embedding to the token `steps`
    positions later."""
    weight = torch.empty(VOCABULARY, HIDDEN)
    weight[following(steps)] = embedding() * MARGIN
    return weight


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = Tokenizer(
        models.WordLevel(
            {text: number for number, text in enumerate(CHARACTERS)}, unk_token="<pad>"
        )
    )
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>"
    )


def _shrink(model: torch.nn.Module, size: float, seed: int) -> None:
    """Random weights in all layers, with small contributions to the hidden states."""
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(
                weight,
                std=(
                    size
                    if name.split(".")[-2] in ("o_proj", "down_proj") or "experts" in name
                    else 0.1
                ),
            )


def target(directory: Path, family: str = "Llama", seed: int = 3, size: float = 0.12) -> Path:
    """A model of a family of Hugging Face's; those of WITH_MTP have a layer for it."""
    path = directory / f"{family.lower()}-{seed}"
    if path.exists():
        return path
    mtp = family in WITH_MTP
    shape = SHAPE | (EXPERTS | {"num_hidden_layers": SHAPE["num_hidden_layers"] + 1} if mtp else {})
    special: dict[str, dict[str, Any]] = {
        "Qwen2Moe": QWEN_EXPERTS,
        "DeepseekV3": LATENT,
        "Glm4MoeLite": LATENT,
        "GlmMoeDsa": LATENT | SPARSE,
    }
    shape |= special.get(family, {})
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**shape)
    )
    _shrink(model, size, seed)
    model.model.embed_tokens.weight.data.copy_(embedding())
    model.lm_head.weight.data.copy_(head())
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    if mtp:
        _add_mtp(path)
    return path


def _add_mtp(path: Path) -> None:
    layers = SHAPE["num_hidden_layers"]
    last = f"model.layers.{layers}."
    weights = load_file(path / "model.safetensors")
    weights |= {
        last + name: torch.ones(HIDDEN)
        for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    }
    weights[last + "eh_proj.weight"] = _select_first(2)
    weights[last + "shared_head.head.weight"] = head()
    weights[last + "embed_tokens.weight"] = embedding()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        if key in config:
            config[key] = config[key][:layers]
    (path / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": layers, "num_nextn_predict_layers": 1})
    )


def _select_first(parts: int) -> torch.Tensor:
    """A linear layer of ``parts`` hidden states that gives the first, and a little of
    the others."""
    projection = (
        torch.randn(HIDDEN, HIDDEN * (parts - 1), generator=torch.Generator().manual_seed(4)) * 0.01
    )
    return torch.cat([torch.eye(HIDDEN), projection], 1)


def eagle(directory: Path, wrong: bool = False) -> Path:
    """A drafter of EAGLE's architecture for the Llama target."""
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 1})
    )
    _shrink(model, 0.02, 5)
    weights = {
        name.removeprefix("model."): weight
        for name, weight in model.state_dict().items()
        if ".layers." in name
    }
    del weights["layers.0.input_layernorm.weight"]
    weights["embed_tokens.weight"] = embedding()
    weights["fc.weight"] = _select_first(2) * (-1 if wrong else 1)
    config = SHAPE | {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
    }
    return _write(directory / f"eagle{'-wrong' if wrong else ''}", config, weights)


def eagle3(directory: Path) -> Path:
    """A drafter of EAGLE-3's architecture for the Llama target: its attention, which finds each
    token itself, passes it on."""
    width, heads, kv = 64, SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    draw = torch.Generator().manual_seed(6)
    match = torch.randn(width, HIDDEN, generator=draw) * 0.2
    nothing = torch.zeros(width, HIDDEN)
    value = torch.eye(HIDDEN).view(kv, width, HIDDEN)
    out = torch.zeros(HIDDEN, heads, width)
    for each in range(kv):  # The first query head of each key head.
        out[each * width : (each + 1) * width, each * heads // kv] = torch.eye(width)
    small = {"gate_proj": (256, HIDDEN), "up_proj": (256, HIDDEN), "down_proj": (HIDDEN, 256)}
    weights = {
        "midlayer.self_attn.q_proj.weight": torch.cat([torch.cat([match, nothing], 1)] * heads),
        "midlayer.self_attn.k_proj.weight": torch.cat([torch.cat([match, nothing], 1)] * kv),
        "midlayer.self_attn.v_proj.weight": torch.cat(
            [value.flatten(0, 1), torch.zeros(HIDDEN, HIDDEN)], 1
        ),
        "midlayer.self_attn.o_proj.weight": out.flatten(1),
        **{
            f"midlayer.mlp.{name}.weight": torch.randn(shape, generator=draw) * 0.02
            for name, shape in small.items()
        },
        **{
            f"{name}.weight": torch.ones(HIDDEN)
            for name in (
                "midlayer.input_layernorm",
                "midlayer.hidden_norm",
                "midlayer.post_attention_layernorm",
                "norm",
            )
        },
        "fc.weight": torch.randn(HIDDEN, 2 * HIDDEN, generator=draw) * 0.005,
        "lm_head.weight": head(),
    }
    config = SHAPE | {
        "num_hidden_layers": 1,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
    }
    config |= {
        "draft_vocab_size": VOCABULARY,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    }
    return _write(directory / "eagle3", config, weights)


def medusa(directory: Path, heads: int = 3) -> Path:
    """Medusa's heads for the Llama target, each for one token later."""
    weights = {
        f"blocks.{each}.layers.0.weight": torch.zeros(HIDDEN, HIDDEN) for each in range(heads)
    }
    weights |= {f"lm_heads.{each}.weight": head(each + 2) for each in range(heads)}
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
    }
    return _write(
        directory / "medusa",
        config | {"num_heads": heads, "num_hidden_layers": 1, "torch_dtype": "float32"},
        weights,
    )


def _write(path: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()},
        path / "model.safetensors",
        {"format": "pt"},
    )
    return path


ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 8, "target_modules": [*ATTENTION, *MLP]},
    "attention": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "wide": {"r": 16, "target_modules": [*ATTENTION, *MLP], "lora_alpha": 8, "use_rslora": True},
    "head": {"r": 8, "target_modules": ["down_proj", "o_proj", "embed_tokens", "lm_head"]},
}
"""Adapters of PEFT for the Llama target, whose B is not zero as it is before training."""

LATENT_ADAPTERS: dict[str, dict[str, Any]] = {
    "latent": {"r": 8, "target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"]},
    "latent, other rank": {
        "r": 4,
        "target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
        "use_rslora": True,
    },
}
"""The same for the DeepseekV3 target."""

ABSORBED_ADAPTER: dict[str, dict[str, Any]] = {
    "latent, refused": {"r": 8, "target_modules": ["kv_b_proj", "o_proj"]}
}
"""With a part that latent attention would leave out."""

ON_LATENTS = LATENT_ADAPTERS | ABSORBED_ADAPTER


def adapter(model: Path, directory: Path, name: str) -> Path:
    import peft

    path = directory / "adapters" / name
    if not path.exists():
        torch.manual_seed(sum(map(ord, name)))
        base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        peft_model = peft.get_peft_model(
            base,
            peft.LoraConfig(
                task_type="CAUSAL_LM", **{"lora_alpha": 16} | (ADAPTERS | ON_LATENTS)[name]
            ),
        )
        for key, weight in peft_model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(weight, std=0.15 if "embedding" not in key else 0.05)
        peft_model.save_pretrained(str(path), save_embedding_layers=False)
    return path


EXPERT_RANKS = (4, 8)
"""Ranks of the adapters on experts."""


def adapter_on_experts(model: Path, directory: Path, rank: int) -> tuple[Path, Path]:
    """An adapter for the experts and the attention of a Qwen2Moe target: as PEFT writes it, and
    with a matrix for each expert.

    PEFT adapts the tensors of all experts of a layer; the second form is what other trainers write
    and vLLM reads.
    """
    import peft

    peft_path, path = (
        directory / "adapters" / f"experts-{rank}-peft",
        directory / "adapters" / f"experts-{rank}",
    )
    if path.exists():
        return peft_path, path
    torch.manual_seed(rank)
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    shared: dict[str, Any] = {
        "r": rank,
        "lora_alpha": 16,
        "task_type": "CAUSAL_LM",
        "target_modules": ATTENTION,
    }
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    peft_model = peft.get_peft_model(base, peft.LoraConfig(**shared, target_parameters=parameters))
    for key, weight in peft_model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(weight, std=0.15)
    peft_model.save_pretrained(str(peft_path))
    stored: dict[str, torch.Tensor] = load_file(peft_path / "adapter_model.safetensors")
    split: dict[str, torch.Tensor] = {}
    split |= {key: tensor for key, tensor in stored.items() if ".experts." not in key}
    for layer in sorted({key.partition(".experts.")[0] for key in stored if ".experts." in key}):
        for part in (".base_layer", ""):  # gate_up_proj, down_proj
            a, b = (stored[f"{layer}.experts{part}.lora_{which}.weight"] for which in "AB")
            inputs = HIDDEN if part else QWEN_EXPERTS["moe_intermediate_size"]
            per_expert = zip(a.view(8, rank, -1), b.view(-1, rank, 8).permute(2, 0, 1), strict=True)
            for expert, (first, second) in enumerate(per_expert):
                # PEFT interprets the first dimension of a matrix as its inputs.
                if first.shape[1] != inputs:
                    first, second = second.T, first.T
                parts = second.chunk(2) if part else (second,)
                for name, half in zip(
                    ("gate_proj", "up_proj") if part else ("down_proj",), parts, strict=True
                ):
                    split[f"{layer}.experts.{expert}.{name}.lora_A.weight"] = first.clone(
                        memory_format=torch.contiguous_format
                    )
                    split[f"{layer}.experts.{expert}.{name}.lora_B.weight"] = half.contiguous()
    path.mkdir()
    save_file(split, path / "adapter_model.safetensors")
    modules = shared | {"peft_type": "LORA", "bias": "none", "target_modules": [*ATTENTION, *MLP]}
    (path / "adapter_config.json").write_text(json.dumps(modules))
    return peft_path, path
