# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sizes and processors of tiny models with sounds, and all families by the model type of
transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.models import image_families
from harness.models import media_families as media
from harness.models.media_families import Family

AUDIO = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>"}
AUDIO |= {"audio_eos_token": "<|audio_eos|>"}
WHISPER = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 256}
WHISPER |= {"d_model": 128, "max_source_positions": 1500}

OMNI = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
OMNI |= {"audio_token": "<|audio_pad|>", "vision_bos_token": "<|vision_start|>"}
OMNI |= {"vision_eos_token": "<|vision_end|>", "audio_bos_token": "<|audio_start|>"}
OMNI |= {"audio_eos_token": "<|audio_end|>"}
OMNI_TOKENS = {f"{name}_token_id": f"{name}_token" for name in ("image", "video", "audio")}
OMNI_TOKENS |= {"vision_start_token_id": "vision_bos_token"}
OMNI_TOKENS |= {"vision_end_token_id": "vision_eos_token"}
OMNI_TOKENS |= {"audio_start_token_id": "audio_bos_token"}
OMNI_TOKENS |= {"audio_end_token_id": "audio_eos_token"}


def _sounds(name: str, features: str, **options: Any) -> Callable[[Any], Any]:
    """Makes a processor of this class, with this extractor of a sound's features."""

    def make(words: Any) -> Any:
        import transformers

        extractor = getattr(transformers, features)(**options)
        return getattr(transformers, name)(feature_extractor=extractor, tokenizer=words)

    return make


def _omni(
    processor: str, pixels: dict[str, Any], text: dict[str, Any], vision: dict[str, Any]
) -> Family:
    """A model that takes all media; the part that speaks is left out."""

    def make(words: Any) -> Any:
        import transformers

        return getattr(transformers, processor)(
            image_processor=transformers.Qwen2VLImageProcessor(**pixels),
            video_processor=transformers.Qwen2VLVideoProcessor(**pixels, do_sample_frames=False),
            feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128),
            tokenizer=words,
        )

    return Family(
        OMNI,
        OMNI_TOKENS,
        make,
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
        sound="<|audio_start|><|audio_pad|><|audio_end|>",
        part="thinker",
        text={"tie_word_embeddings": False} | text,
        more={"audio_config": WHISPER | {"output_dim": 128}, "vision_config": vision},
    )


FAMILIES: dict[str, Family] = (
    media.IMAGES
    | image_families.FAMILIES
    | {
        "qwen2_audio": Family(
            AUDIO,
            {"audio_token_index": "audio_token"},
            _sounds("Qwen2AudioProcessor", "WhisperFeatureExtractor", feature_size=80),
            image="",
            video="",
            sound="<|audio_bos|><|AUDIO|><|audio_eos|>",
            text=media.QWEN2,
            more={"audio_config": WHISPER | {"num_mel_bins": 80}},
            published={"language_model.model.model.": "language_model.model."},
        ),
        "qwen3_asr": Family(
            AUDIO,
            {"audio_token_id": "audio_token"},
            _sounds("Qwen3ASRProcessor", "Qwen3ASRFeatureExtractor", feature_size=128),
            image="",
            video="",
            sound="<|audio_bos|><|AUDIO|><|audio_eos|>",
            text={"model_type": "qwen3", "tie_word_embeddings": True},
            more={
                "tie_word_embeddings": True,
                "audio_config": {"encoder_layers": 2, "encoder_attention_heads": 2, "d_model": 128}
                | {"encoder_ffn_dim": 256, "output_dim": 128, "downsample_hidden_size": 32}
                # NPUs' `gelu` is this one.
                | {"activation_function": "gelu_pytorch_tanh"},
            },
            max_images=1,
        ),
        "glmasr": Family(
            {"audio_token": "<|pad|>"},
            {"audio_token_id": "audio_token"},
            _sounds("GlmAsrProcessor", "WhisperFeatureExtractor", feature_size=128),
            image="",
            video="",
            sound="<|pad|>",
            text={"model_type": "llama"},
            more={
                "audio_config": {
                    "hidden_size": 128,
                    "intermediate_size": 512,
                    "num_hidden_layers": 2,
                }
                | {"num_attention_heads": 2, "hidden_act": "gelu_pytorch_tanh"},
                "projector_hidden_act": "gelu_pytorch_tanh",
            },
            published={"language_model.model.model.": "language_model.model."},
            max_images=1,
        ),
        "qwen2_5_omni": _omni(
            "Qwen2_5OmniProcessor",
            media.PIXELS,
            media.QWEN2_ROPE,
            media.QWEN_VISION | {"window_size": 28, "fullatt_block_indexes": [1]},
        ),
        "qwen3_omni_moe": _omni(
            "Qwen3OmniMoeProcessor",
            media.PIXELS16,
            media.MOE | {"rope_parameters": media.ROPE | {"mrope_interleaved": True}},
            # vLLM takes the number of position embeddings from the size, as the published ones have it.
            media.QWEN3_VISION
            | {
                "deepstack_visual_indexes": [0, 1],
                "apply_vit_abs_pos_embed": True,
                "image_size": 128,
            },
        ),
    }
)
"""By the model type of transformers."""
