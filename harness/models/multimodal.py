# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Tiny random models with images, videos and sounds, and their processors."""

from __future__ import annotations

from pathlib import Path

from harness.models import by_type, hybrid, registry
from harness.models.sound_families import FAMILIES


def write(kind: str, path: Path, *, drafts: bool = False) -> None:
    """Write a model of a type with random weights, and its processor; with `drafts` (Qwen3.5) a
    copy of its last layer as MTP layer."""
    import torch
    import transformers

    family = FAMILIES[kind]
    words = by_type.tokenizer(family.names)
    ids = {name: words.convert_tokens_to_ids(text) for name, text in family.names.items()}
    text = by_type.COMMON | family.text
    more = {option: ids[name] for option, name in family.tokens.items()} | family.more
    options = {"text_config": text, "tie_word_embeddings": False} | more
    if family.part:
        options = {f"{family.part}_config": options, "enable_audio_output": False}
    config = transformers.AutoConfig.for_model(kind, **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if not weight.is_floating_point():
            continue
        if name.endswith(("bias", "class_embedding")) or (
            weight.dim() > 1 and "language_model" not in name
        ):
            torch.nn.init.normal_(weight, std=0.1)
    with torch.no_grad():  # No answer has a placeholder.
        answering = getattr(model, family.part, model)
        answering.get_output_embeddings().weight[list(ids.values())] = 0
    model.save_pretrained(path)
    if kind == "qwen2_5_omni":
        torch.save({}, path / "spk_dict.pt")  # Voices, which transformers looks for.
    if kind == "qwen3_vl_moe":
        _transpose_experts(path / "model.safetensors")
    for old, new in family.published.items():
        registry._rename(path / "model.safetensors", {old: new})
    family.processor(words).save_pretrained(path)
    if drafts:
        hybrid.add_drafts(path, "model.language_model.layers.3.")


def _transpose_experts(file: Path) -> None:
    """Write the experts' weights as published checkpoints have them, inputs first."""
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    for name, weight in weights.items():
        if ".experts." in name:
            weights[name] = weight.transpose(1, 2).contiguous()
    save_file(weights, file, {"format": "pt"})
