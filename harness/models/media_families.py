# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sizes and processors of tiny models with images and videos, by the model type of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

SIDE = 56
"""Pixels of an image's side."""
LARGE = 280
"""Pixels of a side of the image that has more tokens than a step."""


class Family(NamedTuple):
    """A model type of transformers.

    names: special tokens of the tokenizer. tokens: options of the configuration, or of a part of
    it, that are ids of these. image, video, sound: placeholders in a prompt; empty without that medium.
    processor: makes the processor, of a tokenizer. text, more: the configuration.
    part: the part of the configuration and of the model that answers, of a model that also speaks.
    published: parts of tensors' names in published checkpoints, as vLLM reads them, by those that
    transformers writes. max_images: images of a prompt.
    """

    names: dict[str, str]
    tokens: dict[str, str]
    processor: Callable[[Any], Any]
    image: str
    video: str
    text: dict[str, Any]
    more: dict[str, Any]
    sound: str = ""
    part: str = ""
    published: Mapping[str, str] = MappingProxyType({})
    max_images: int = 2


def processor(
    name: str,
    images: str,
    options: dict[str, Any],
    videos: str = "",
    options_of_videos: dict[str, Any] | None = None,
    **more: Any,
) -> Callable[[Any], Any]:
    """Makes a processor of this class, with processors of images and videos."""

    def make(words: Any) -> Any:
        import transformers

        parts = {"image_processor": getattr(transformers, images)(**options), "tokenizer": words}
        if videos:
            parts["video_processor"] = getattr(transformers, videos)(
                **(options_of_videos or options) | {"do_sample_frames": False}
            )
        return getattr(transformers, name)(**parts, **more)

    return make


QWEN_NAMES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
QWEN_TOKENS = {
    "image_token_id": "image_token",
    "video_token_id": "video_token",
    "vision_start_token_id": "vision_start",
    "vision_end_token_id": "vision_end",
}
PIXELS = {"size": {"shortest_edge": 28 * 28, "longest_edge": LARGE * LARGE}}
PIXELS16 = {"size": {"shortest_edge": 32 * 32, "longest_edge": 288 * 288}, "patch_size": 16}
# As published; vLLM normalizes videos as images.
PIXELS16 |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
QWEN2_ROPE = {"head_dim": 32, "rope_parameters": ROPE | {"mrope_section": [4, 6, 6]}}
QWEN_VISION = {"depth": 2, "num_heads": 2, "hidden_size": 128, "intermediate_size": 256}
QWEN_VISION |= {"out_hidden_size": 128}
QWEN3_VISION = QWEN_VISION | {"num_position_embeddings": 64}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MOE |= {"norm_topk_prob": True}
HYBRID = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
HYBRID |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
HYBRID |= {"rope_parameters": ROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0}}


def _qwen(name: str, text: dict[str, Any], vision: dict[str, Any]) -> Family:
    videos = "Qwen3VLVideoProcessor" if "Qwen3" in name else "Qwen2VLVideoProcessor"
    options = PIXELS16 if "Qwen3" in name else PIXELS
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    return Family(
        QWEN_NAMES,
        QWEN_TOKENS,
        processor(name, "Qwen2VLImageProcessor", options, videos),
        image,
        image.replace("image", "video"),
        {"rope_parameters": ROPE} | text,
        {"vision_config": vision},
    )


CLIP = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
CLIP |= {"num_attention_heads": 2, "image_size": SIDE, "patch_size": 14}
CLIP_TOWER: dict[str, Any] = {"vision_config": CLIP | {"model_type": "clip_vision_model"}}
CLIP_PATCHES: dict[str, Any] = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE]]
TOWER = {"vision_tower.": "vision_tower.vision_model."}
LLAVA = {"image_token": "<image>"}
SQUARE = {"height": SIDE, "width": SIDE}
# vLLM divides an image's size by the square of a patch's.
FRAME = {"size": {"shortest_edge": 4 * SIDE}, "crop_size": dict.fromkeys(SQUARE, 4 * SIDE)}
INTERN = {"start_image_token": "<img>", "end_image_token": "</img>"}
INTERN |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
QWEN2 = {"model_type": "qwen2", "head_dim": 32}
GLM = {"image_token": "<|image|>", "video_token": "<|video|>"}
GLM |= {"image_start": "<|begin_of_image|>", "image_end": "<|end_of_image|>"}
GLM |= {"video_start": "<|begin_of_video|>", "video_end": "<|end_of_video|>"}
GLM_TOKENS = {f"{name}_id" if name.endswith("token") else f"{name}_token_id": name for name in GLM}
GLM_ROPE = ROPE | {"mrope_section": [4, 6, 6], "partial_rotary_factor": 0.5}
GLM_VISION = QWEN_VISION | {"image_size": SIDE}
PIXTRAL = {"image_token": "[IMG]", "image_break": "[IMG_BREAK]", "image_end": "[IMG_END]"}


CLIP_NO_SIZE = {name: value for name, value in CLIP.items() if name != "image_size"}
LLAMA4 = {"image_token": "<|image|>", "patch": "<|patch|>", "start": "<|image_start|>"}
LLAMA4 |= {"end": "<|image_end|>", "tile_x": "<|tile_x_separator|>"}
LLAMA4 |= {"tile_y": "<|tile_y_separator|>"}

MINICPM = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
MINICPM |= {
    f"{part}_{end}_token": f"<{'/' * (end == 'end')}{part}>"
    for part in ("image", "slice", "image_id")
    for end in ("start", "end")
}
SLICES = {"scale_resolution": SIDE, "max_slice_nums": 2}


def _idefics(name: str) -> Family:
    edges = {"size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}}
    return Family(
        LLAVA,
        {"image_token_id": "image_token"},
        processor(
            f"{name}Processor",
            f"{name}ImageProcessor",
            edges | {"do_image_splitting": False},
            image_seq_len=4,
        ),
        "<image>",
        "",
        {"model_type": "llama"},
        {"vision_config": CLIP, "scale_factor": 2, "pad_token_id": 1},
    )


def _glm(text: dict[str, Any], vision: dict[str, Any]) -> Family:
    edges = {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": SIDE * SIDE * 2}}
    return Family(
        GLM,
        GLM_TOKENS,
        processor("Glm4vProcessor", "Glm4vImageProcessor", edges, "Glm4vVideoProcessor"),
        "<|begin_of_image|><|image|><|end_of_image|>",
        "",
        {"rope_parameters": GLM_ROPE} | text,
        {"vision_config": vision},
    )


PIXTRAL_TOWER = {"vision_config": CLIP | {"model_type": "pixtral", "head_dim": 64}}


def _pixtral(name: str) -> Callable[[Any], Any]:
    size = {"size": {"longest_edge": SIDE}, "patch_size": 14}
    return processor(name, "PixtralImageProcessor", size, patch_size=14, spatial_merge_size=2)


def _minicpm(version: str) -> Family:
    return Family(
        MINICPM,
        {"image_token_id": "image_token", "video_token_id": "video_token"},
        processor(
            f"MiniCPMV{version}Processor",
            "MiniCPMV4_6ImageProcessor",
            SLICES,
            "MiniCPMV4_6VideoProcessor",
        ),
        "<|image_pad|>",
        "",
        {"model_type": "qwen3_5_text"} | HYBRID,
        {"vision_config": CLIP, "insert_layer_id": 0, "image_size": SIDE},
    )


IMAGES: dict[str, Family] = {
    "qwen2_vl": _qwen(
        "Qwen2VLProcessor",
        QWEN2_ROPE,
        {"depth": 2, "num_heads": 2, "embed_dim": 128, "hidden_size": 128},
    ),
    "qwen2_5_vl": _qwen(
        "Qwen2_5_VLProcessor",
        QWEN2_ROPE,
        QWEN_VISION | {"window_size": 28, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": _qwen(
        "Qwen3VLProcessor",
        {"rope_parameters": ROPE | {"mrope_interleaved": True}},
        QWEN3_VISION | {"deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_vl_moe": _qwen(
        "Qwen3VLProcessor",
        # Widths that say which dimension is which.
        MOE
        | {"moe_intermediate_size": 96}
        | {"rope_parameters": ROPE | {"mrope_interleaved": True}},
        QWEN3_VISION | {"deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_5": _qwen("Qwen3VLProcessor", HYBRID, QWEN3_VISION),
    "qwen3_5_moe": _qwen(
        "Qwen3VLProcessor", HYBRID | MOE | {"shared_expert_intermediate_size": 64}, QWEN3_VISION
    ),
    "internvl": Family(
        INTERN,
        {"image_token_id": "context_image_token"},
        processor(
            "InternVLProcessor",
            "GotOcr2ImageProcessor",
            {"size": SQUARE, "crop_to_patches": False},
            "InternVLVideoProcessor",
            image_seq_length=4,
        ),
        "<IMG_CONTEXT>",
        "",
        QWEN2,
        {"vision_config": CLIP | {"image_size": [SIDE, SIDE], "patch_size": [14, 14]}}
        | {"image_seq_length": 4},
    ),
    "glm4v": _glm(
        {"rope_parameters": GLM_ROPE, "num_attention_heads": 2, "head_dim": 64}
        | {"attention_bias": True},
        GLM_VISION,
    ),
    "glm4v_moe": _glm(
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        | {"use_qk_norm": False},
        GLM_VISION,
    ),
    "llava": Family(
        LLAVA,
        {"image_token_index": "image_token"},
        processor(
            "LlavaProcessor",
            "CLIPImageProcessor",
            {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE},
            **CLIP_PATCHES,
        ),
        "<image>",
        "",
        {"model_type": "llama"},
        CLIP_TOWER,
        published=TOWER,
    ),
    "llava_next_video": Family(
        LLAVA | {"video_token": "<video>"},
        {"image_token_index": "image_token", "video_token_index": "video_token"},
        processor(
            "LlavaNextVideoProcessor",
            "LlavaNextImageProcessor",
            FRAME | {"image_grid_pinpoints": PINPOINTS},
            "LlavaNextVideoVideoProcessor",
            FRAME,
            **CLIP_PATCHES,
        ),
        "",
        "<video>",
        {"model_type": "llama"},
        {"vision_config": CLIP_TOWER["vision_config"] | {"image_size": 4 * SIDE}}
        | {"image_grid_pinpoints": PINPOINTS},
        published=TOWER,
        max_images=1,
    ),
    "llava_next": Family(
        LLAVA,
        {"image_token_index": "image_token"},
        processor(
            "LlavaNextProcessor",
            "LlavaNextImageProcessor",
            {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}
            | {"image_grid_pinpoints": PINPOINTS},
            **CLIP_PATCHES,
        ),
        "<image>",
        "",
        {"model_type": "llama"},
        CLIP_TOWER | {"image_grid_pinpoints": PINPOINTS},
        published=TOWER,
    ),
    "lighton_ocr": Family(
        {
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
        {"image_token_id": "image_token"},
        _pixtral("LightOnOcrProcessor"),
        "[IMG]",
        "",
        {"model_type": "qwen3"},
        PIXTRAL_TOWER,
    ),
    "mistral3": Family(
        PIXTRAL,
        {"image_token_index": "image_token"},
        _pixtral("PixtralProcessor"),
        "[IMG]",
        "",
        {"model_type": "mistral", "sliding_window": None},
        PIXTRAL_TOWER,
    ),
    "idefics3": _idefics("Idefics3"),
    "llava_onevision": Family(
        LLAVA | {"video_token": "<video>"},
        {"image_token_index": "image_token", "video_token_index": "video_token"},
        processor(
            "LlavaOnevisionProcessor",
            "LlavaOnevisionImageProcessor",
            {"size": SQUARE, "image_grid_pinpoints": PINPOINTS},
            "LlavaOnevisionVideoProcessor",
            {"size": SQUARE},
            num_image_tokens=16,
            vision_feature_select_strategy="full",
        ),
        "<image>",
        "<video>",
        QWEN2,
        {"vision_config": CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False}}
        | {"image_grid_pinpoints": PINPOINTS},
        published=TOWER,
    ),
    "lfm2_vl": Family(
        LLAVA
        | {"image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>"}
        | {"image_thumbnail_token": "<|img_thumbnail|>"},
        {"image_token_id": "image_token"},
        processor(
            "Lfm2VlProcessor",
            "Lfm2VlImageProcessor",
            {"encoder_patch_size": 14, "min_image_tokens": 1, "max_image_tokens": 4}
            | {"do_image_splitting": False, "tile_size": SIDE},
        ),
        "<image>",
        "",
        {"model_type": "lfm2", "head_dim": 32, "layer_types": ["conv", "full_attention"]}
        | {"block_dim": 128, "conv_dim": 128, "block_ff_dim": 256},
        {"vision_config": CLIP_NO_SIZE | {"num_patches": 16, "vision_use_head": False}},
        published=TOWER,
    ),
    "cohere2_vision": Family(
        LLAVA
        | {"boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>"}
        | {"img_line_break_token": "<|IMG_LINE_BREAK|>"},
        {"image_token_id": "image_token"},
        processor(
            "Cohere2VisionProcessor",
            "Cohere2VisionImageProcessor",
            # Of the tokens of a tile.
            {"size": SQUARE, "patch_size": 2, "max_patches": 2},
        ),
        "<image>",
        "",
        {"model_type": "cohere2", "layer_types": ["full_attention"] * 2, "logit_scale": 1.0},
        {"vision_config": CLIP | {"vision_use_head": False}, "alignment_intermediate_size": 256}
        | {"tie_word_embeddings": True},
        published=TOWER,
    ),
    "aria": Family(
        LLAVA,
        {"image_token_index": "image_token"},
        processor(
            "AriaProcessor",
            "AriaImageProcessor",
            {"max_image_size": 490},
            size_conversion={490: 4, 980: 4},
        ),
        "<image>",
        "",
        {
            "model_type": "aria_text",
            "moe_num_experts": 4,
            "moe_topk": 2,
            "moe_num_shared_experts": 1,
        },
        {"vision_config": CLIP | {"image_size": 490, "model_type": "idefics3_vision"}}
        | {"projector_patch_to_query_dict": {"1225": 4, "4900": 4}},
    ),
    "glm_ocr": _glm(
        {"rope_parameters": GLM_ROPE | {"mrope_section": [8, 12, 12], "partial_rotary_factor": 1.0}}
        # vLLM takes it for the vision merger's width, three times the encoder's output.
        | {"intermediate_size": 384},
        GLM_VISION,
    ),
    "exaone4_5": _qwen(
        "Exaone4_5_Processor",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
        | {"layer_types": ["full_attention"] * 2, "sliding_window": None},
        QWEN_VISION | {"window_size": 56, "fullatt_block_indexes": [1], "num_key_value_heads": 1},
    ),
    "qianfan_ocr": Family(
        INTERN,
        {"image_token_id": "context_image_token"},
        processor(
            "QianfanOCRProcessor",
            "GotOcr2ImageProcessor",
            {"size": SQUARE, "crop_to_patches": False},
            image_seq_length=4,
        ),
        "<image>",
        "",
        {"model_type": "qwen3"},
        {"vision_config": CLIP} | {"image_seq_length": 4},
    ),
    "llama4": Family(
        LLAMA4,
        {"image_token_index": "patch", "boi_token_index": "start", "eoi_token_index": "end"},
        processor(
            "Llama4Processor",
            "Llama4ImageProcessor",
            {"size": SQUARE, "max_patches": 2},
            patch_size=14,
        ),
        "<|image|>",
        "",
        {"num_local_experts": 4, "intermediate_size_mlp": 256, "attention_chunk_size": 128},
        {
            "vision_config": CLIP
            | {"vision_output_dim": 128, "projector_input_dim": 128}
            | {"projector_output_dim": 128, "intermediate_size": 512}
        },
    ),
    "paddleocr_vl": Family(
        QWEN_NAMES,
        QWEN_TOKENS,
        processor(
            "PaddleOCRVLProcessor",
            "PaddleOCRVLImageProcessor",
            PIXELS | {"patch_size": 14, "merge_size": 2},
        ),
        "<|vision_start|><|image_pad|><|vision_end|>",
        "",
        {"head_dim": 128, "rope_parameters": ROPE | {"mrope_section": [16, 24, 24]}},
        {"vision_config": CLIP},
    ),
    "minicpmv4_6": _minicpm("4_6"),
    "minicpmv4_7": _minicpm("4_7"),
}
"""By the model type of transformers."""
