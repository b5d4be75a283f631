# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Small models with random weights, one for each attention type and task, and their inputs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from harness.models import latent, openpangu
from harness.references import log_probabilities

SAMPLING_RATE = 16000
SECONDS = 2
VOCABULARY = 512
IMAGE_TOKEN = 511
SIDE, PATCH = 56, 14
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
WINDOW = 24
BOTH = ["sliding_attention", "full_attention"]
ENCODER = {
    name: value for name, value in COMMON.items() if name not in ("head_dim", "num_key_value_heads")
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, window": ("Mistral", {"sliding_window": WINDOW}),
    "gemma3, windows between": (
        "Gemma3",
        {
            "sliding_window": WINDOW,
            "layer_types": BOTH * 2,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 64,
        },
    ),
    "gemma2, soft caps": (
        "Gemma2",
        {"sliding_window": WINDOW, "layer_types": BOTH, "attn_logit_softcapping": 2.0},
    ),
    "granite, sinks and windows": (
        "GraniteSWA",
        {
            "sliding_window": WINDOW,
            "layer_types": BOTH * 2,
            "num_hidden_layers": 4,
            "attention_multiplier": 0.125,
        },
    ),
    "gpt-oss, experts with biases": (
        "GptOss",
        {"sliding_window": WINDOW, "layer_types": BOTH, "intermediate_size": 192}
        | {"num_local_experts": 4, "num_experts_per_tok": 3},
    ),
    "bloom, ALiBi": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "qwen3-next, gated delta net": (
        "Qwen3Next",
        {
            "num_hidden_layers": 4,
            "layer_types": [
                "linear_attention",
                "linear_attention",
                "linear_attention",
                "full_attention",
            ],
        }
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        }
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "falcon-h1, mamba 2": (
        "FalconH1",
        {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_expand": 2, "mamba_d_ssm": 256},
    ),
    **latent.MODELS,
    **{
        f"qwen3, heads of {size}": ("Qwen3", {"head_dim": size}) for size in (80, 96, 128, 192, 256)
    },
    **{
        f"qwen3, multi-head, heads of {size}": (
            "Qwen3",
            {"head_dim": size, "num_key_value_heads": 4},
        )
        for size in (64, 80, 96, 128, 192, 256)
    },
}
"""Families of Hugging Face's, and their configuration besides COMMON."""


def _settings(family: str, special: dict[str, Any]) -> dict[str, Any]:
    common = (
        COMMON
        if family != "Bloom"
        else {name: COMMON[name] for name in ("vocab_size", "hidden_size", "initializer_range")}
    )
    return common | special


def decoder(path: Path, name: str) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    family, special = DECODERS[name]
    if family == "PanguUltraMoE":
        openpangu.write(path, transformers.DeepseekV3Config(**_settings(family, special)))
        return
    kind = {"Gemma3": "Gemma3Text"}.get(family, family)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**_settings(family, special))
    )
    for key, weight in model.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(weight, mean=1.0)
        if key.endswith(("experts.gate_up_proj_bias", "experts.down_proj_bias")):
            torch.nn.init.normal_(weight, std=0.1)
        # Only the first layer has decays below -1.
        if key.endswith("A_log") and ".0." not in key:
            torch.nn.init.uniform_(weight, -4, -2)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.05)
    if family == "LongcatFlash":
        latent.write_longcat(model, path)
    else:
        model.save_pretrained(path)


def causal(path: Path, dtype: Any) -> Any:
    """Hugging Face's model of a decoder."""
    reference_path = path / latent.REFERENCE
    source = reference_path if reference_path.exists() else path
    written = (path / openpangu.CODE).exists()
    kind = openpangu.reference_class() if written else log_probabilities.class_of(source)
    return kind.from_pretrained(source, dtype=dtype, attn_implementation="eager").eval()


ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 embedding": ("Qwen3", COMMON),
    "bert embedding": ("Bert", ENCODER),
    "roberta embedding": ("Roberta", ENCODER | {"max_position_embeddings": 1026}),
    "modernbert embedding, windows between": (
        "ModernBert",
        ENCODER
        | {"local_attention": 32, "num_hidden_layers": 4, "cls_token_id": 0, "sep_token_id": 1},
    ),
}


def embedding(path: Path, name: str) -> None:
    import transformers

    family, settings = ENCODERS[name]
    getattr(transformers, f"{family}Model")(
        getattr(transformers, f"{family}Config")(**settings)
    ).save_pretrained(path)
    tokenizer().save_pretrained(path)


def classifier(path: Path, name: str) -> None:
    import transformers

    labels = 1 if name == "bert cross-encoder" else 3
    config = transformers.BertConfig(**{**ENCODER, "num_labels": labels})
    transformers.BertForSequenceClassification(config).save_pretrained(path)
    tokenizer().save_pretrained(path)


def tokenizer(extra: dict[str, str] | None = None, **more: Any) -> Any:
    """One token per character; the second text of a pair has token type 1. `extra` are special
    tokens by the name of the tokenizer's attribute."""
    import transformers
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
    )

    words = {
        text: number
        for number, text in enumerate(["<s>", "<eos>", "<unk>", *map(chr, range(32, 127))])
    }
    names = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    words |= {name: len(words) + number for number, name in enumerate(names)}
    words |= {text: len(words) + number for number, text in enumerate((extra or {}).values())}
    words |= {"\n" * count: len(words) + count - 1 for count in range(1, 5)}  # As Gemma's.
    words |= {f"<{number}>": number for number in range(len(words), VOCABULARY - 1)}
    words.setdefault("<image>", IMAGE_TOKEN)
    word_level = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n{1,4}|."), "isolated")
    word_level.decoder = decoders.Fuse()
    word_level.add_special_tokens(
        [AddedToken(word, special=True) for word in words if len(word.strip()) > 1]
    )
    marks = [("<s>", 0), ("<eos>", 1)]
    word_level.post_processor = processors.TemplateProcessing(
        "<s> $A <eos>", "<s> $A <eos> $B:1 <eos>:1", marks
    )
    special = {"bos_token": "<s>", "eos_token": "<eos>", "pad_token": "<eos>", "unk_token": "<unk>"}
    if extra:
        more["extra_special_tokens"] = extra
    return transformers.PreTrainedTokenizerFast(tokenizer_object=word_level, **special, **more)


def idefics3(path: Path, _: str) -> None:
    import torch
    import transformers

    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = transformers.LlamaConfig(**COMMON)
    config = transformers.Idefics3Config(
        vision_config=sizes | {"image_size": SIDE, "patch_size": PATCH},
        text_config=text.to_dict(),
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    model = transformers.Idefics3ForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and ("vision" in name or "connector" in name):
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(path)
    pictures = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": SIDE}, max_image_size={"longest_edge": SIDE}, do_image_splitting=False
    )
    processor = transformers.Idefics3Processor(
        pictures, tokenizer(), image_seq_len=(SIDE // PATCH // 2) ** 2
    )
    processor.save_pretrained(path)


def paddleocr(path: Path, _: str) -> None:
    """M-RoPE with the sections of Qwen2.5-VL."""
    import torch
    import transformers

    words = tokenizer(extra_special_tokens={"image_token": "<image>"})
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
    config = transformers.PaddleOCRVLConfig(
        vision_config={
            "hidden_size": 144,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        | {"image_size": SIDE, "patch_size": PATCH},
        text_config=COMMON
        | {"head_dim": 128, "rope_parameters": rope, "tie_word_embeddings": False},
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN - 1,
        vision_start_token_id=IMAGE_TOKEN - 2,
        vision_end_token_id=IMAGE_TOKEN - 3,
        tie_word_embeddings=False,
    )
    model = transformers.PaddleOCRVLForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and ("visual" in name or "projector" in name):
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(path)
    size = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (2 * SIDE) ** 2}
    pictures = transformers.PaddleOCRVLImageProcessorPil(size=size, patch_size=PATCH, merge_size=2)
    transformers.PaddleOCRVLProcessor(pictures, words).save_pretrained(path)


def whisper(path: Path, _: str) -> None:
    import transformers

    special = {"decoder_start_token_id": 3, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    parts = ("encoder", "decoder")
    sizes = {"layers": 2, "attention_heads": 2, "ffn_dim": 256}
    named: dict[str, Any] = {
        f"{part}_{name}": size for part in parts for name, size in sizes.items()
    } | special
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=128,
        max_source_positions=SECONDS * 50,
        max_target_positions=128,
        init_std=0.1,
        **named,
    )
    transformers.WhisperForConditionalGeneration(config).save_pretrained(path)
    extractor = transformers.WhisperFeatureExtractor(chunk_length=SECONDS)
    transformers.WhisperProcessor(extractor, tokenizer()).save_pretrained(path)


def pictures(prompt: str, number: int) -> list[Any]:
    """The images that the prompt refers to, each of a different size."""
    from PIL import Image

    draw = np.random.default_rng(number)
    shapes = [(SIDE - 14 * number, SIDE - 7 * i, 3) for i in range(prompt.count("<image>"))]
    return [Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8)) for shape in shapes]


def sound(number: int) -> Any:
    times = np.arange(SAMPLING_RATE * SECONDS) / SAMPLING_RATE
    noise = np.random.default_rng(number).normal(0, 0.1, len(times))
    return (np.sin(2 * np.pi * 220 * (number + 1) * times) * 0.5 + noise).astype(np.float32)


def prompts() -> tuple[list[list[int]], list[int]]:
    """Prompts of 1 to 400 tokens, long enough that blocks leave the sliding window, and the tokens
    to generate for each."""
    draw = random.Random(9)
    return [[draw.randrange(3, 500) for _ in range(n)] for n in (1, 400, 7, 33, 290, 5)], [
        6,
        12,
        8,
        3,
        5,
        7,
    ]


def batch() -> tuple[list[list[int]], list[int]]:
    """A batch of 32 prompts of 1 to 600 tokens, some of which begin as others do, and the tokens to
    generate for each."""
    draw = random.Random(10)
    common = [draw.randrange(3, 500) for _ in range(300)]
    lengths = [1, 600, 2, 599, 128, 129, 256, 300, *(draw.randrange(1, 600) for _ in range(24))]
    prompts_drawn = [[draw.randrange(3, 500) for _ in range(n)] for n in lengths]
    shared = [
        common[: min(n, 300)] + prompt[300:] if i % 3 == 0 else prompt
        for i, (n, prompt) in enumerate(zip(lengths, prompts_drawn, strict=True))
    ]
    return shared, [draw.randrange(1, 12) for _ in lengths]
