# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sizes and processors of tiny models in which an image's tokens attend to each other in both
directions."""

from __future__ import annotations

from typing import Any

from harness.models import by_type
from harness.models import media_families as media
from harness.models.media_families import CLIP, LLAVA, SQUARE, TOWER, Family

GEMMA = {"image_token": "<image_soft_token>"}
GEMMA |= {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
GEMMA_TOKENS = {"image_token_index": "image_token"}
GEMMA_TOKENS |= {"boi_token_index": "boi_token", "eoi_token_index": "eoi_token"}
GEMMA4 = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
GEMMA4 |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
GEMMA4 |= {"video_token": "<|video|>"}
GEMMA4_TOKENS = {f"{name}_id": name for name in GEMMA4}


def _gemma4(name: str, text: dict[str, Any], more: dict[str, Any]) -> Family:
    def make(words: Any) -> Any:
        import transformers

        return getattr(transformers, f"{name}Processor")(
            feature_extractor=getattr(transformers, f"{name}AudioFeatureExtractor")(),
            image_processor=getattr(transformers, f"{name}ImageProcessor")(max_soft_tokens=70),
            video_processor=getattr(transformers, f"{name}VideoProcessor")(max_soft_tokens=70),
            tokenizer=words,
            image_seq_length=70,
        )

    # An image has more tokens than the window.
    text = {"sliding_window": by_type.WINDOW, "layer_types": by_type.BOTH} | text
    text |= {"use_bidirectional_attention": "vision", "global_head_dim": 64}
    # As published. It has the per-layer embeddings of images, for which vLLM takes those of 0.
    text |= {"num_kv_shared_layers": 0, "pad_token_id": 0}
    return Family(GEMMA4, GEMMA4_TOKENS, make, "<|image|>", "", text, more | {"audio_config": None})


FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        GEMMA,
        GEMMA_TOKENS,
        media.processor(
            "Gemma3Processor",
            "Gemma3ImageProcessor",
            {"size": SQUARE, "image_seq_length": 4},
            image_seq_length=4,
        ),
        "<start_of_image>",
        "",
        {"sliding_window": by_type.WINDOW, "layer_types": by_type.BOTH}
        | {"query_pre_attn_scalar": 64},
        {"vision_config": CLIP | {"vision_use_head": False}, "mm_tokens_per_image": 4},
        published=TOWER,
    ),
    "paligemma": Family(
        LLAVA,
        {"image_token_index": "image_token"},
        media.processor(
            "PaliGemmaProcessor", "SiglipImageProcessor", {"size": SQUARE, "image_seq_length": 16}
        ),
        "<image>",
        "",
        {"model_type": "gemma"},
        {"vision_config": CLIP | {"projection_dim": 128, "vision_use_head": False}}
        | {"projection_dim": 128, "hidden_size": 128},
        published=TOWER,
        max_images=1,
    ),
    "gemma4": _gemma4(
        "Gemma4",
        {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": by_type.VOCABULARY},
        {
            "vision_config": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
            | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
            | {"position_embedding_size": 1024, "default_output_length": 70}
        },
    ),
    "gemma4_unified": _gemma4(
        "Gemma4Unified",
        {},
        {
            "vision_config": {
                "mm_embed_dim": 128,
                "mm_posemb_size": 70,
                "output_proj_dims": 128,
                "num_soft_tokens": 70,
            }
        },
    ),
}
"""By the model type of transformers."""
