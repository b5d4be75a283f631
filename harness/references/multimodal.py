# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Prompts with images and videos, as requests to vLLM, and transformers' answers to them."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness.models import by_type
from harness.models import multimodal as models
from harness.models.media_families import LARGE, SIDE
from harness.models.sound_families import FAMILIES

LENGTHS = [5, 6, 5, 6]
"""Tokens to generate for each prompt."""
FRAMES = 4
RATE = 8.0
"""Frames per second. The temporal positions of Qwen2.5-VL differ, and stay below the size of a
frame; behind others transformers, unlike vLLM, begins the next text before the last of them."""


ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "trust_remote_code": False,  # With it vLLM expects PaddleOCR-VL's published processor.
    "max_model_len": 512,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "gpu_memory_utilization": 0.3,
}
"""Options of the engine, besides the most images and videos of a prompt."""
UNUSED = {"gpu_memory_utilization"}
"""Options that serve_model_types.py sets itself."""


def limits(kind: str) -> dict[str, Any]:
    """The option for the most images and videos of a prompt."""
    family = FAMILIES[kind]
    media = {"image": family.image, "video": family.video, "audio": family.sound}
    limit = {name: family.max_images for name, each in media.items() if each}
    if "audio_config" in family.more and not family.sound:  # A model of all media, without parts.
        limit |= {"audio": 0, "video": 0}
    return {"limit_mm_per_prompt": limit}


def prompts(kind: str) -> list[str]:
    """Text, an image or a sound, two of different sizes, and a video, if the type has any; beside
    the two images a sound. Where a prompt has one image at most, it begins with it."""
    family = FAMILIES[kind]
    first = family.image or family.sound or family.video
    sound = family.sound if family.image else ""
    last = f"is {family.video}" if family.video else first * 2
    if family.max_images == 1:
        return ["1+1=", f"{first}what?", f"{first}how many", f"{first}?"]
    return ["1+1=", f"what is {first}?", f"{first} or {first}: how many{sound}", last]


def images(kind: str, number: int) -> list[Any]:
    """The images of a prompt."""
    from PIL import Image

    if not (placeholder := FAMILIES[kind].image):
        return []
    draw, side = np.random.default_rng(number), SIDE
    count = prompts(kind)[number].count(placeholder)
    shapes = [(LARGE - 12, LARGE) if i else (side, side - 7 * number) for i in range(count)]
    return [Image.fromarray(draw.integers(0, 256, (*shape, 3), dtype=np.uint8)) for shape in shapes]


def video_files(kind: str, number: int) -> list[bytes]:
    """The frames of a prompt's video as JPEG files; empty without a video."""
    from PIL import Image

    placeholder = FAMILIES[kind].video
    if not placeholder or placeholder not in prompts(kind)[number]:
        return []
    draw = np.random.default_rng(number)
    files = [io.BytesIO() for _ in range(FRAMES)]
    frames = draw.integers(0, 256, (FRAMES, SIDE, SIDE, 3), dtype=np.uint8)
    for file, frame in zip(files, frames, strict=True):
        Image.fromarray(frame).save(file, "jpeg")
    return [file.getvalue() for file in files]


def video(kind: str, number: int) -> Any:
    """The frames of a prompt's video, uint8 ``[frames, height, width, 3]``, or None."""
    from PIL import Image

    files = video_files(kind, number)
    return np.stack([np.asarray(Image.open(io.BytesIO(file))) for file in files]) if files else None


def sounds(kind: str, number: int) -> list[Any]:
    """The sounds of a prompt, of different durations, float32 at the sampling rate."""
    placeholder = FAMILIES[kind].sound
    count = prompts(kind)[number].count(placeholder) if placeholder else 0
    return [by_type.sound(number)[: 16000 + 8000 * (i % 2)] for i in range(count)]


def metadata() -> dict[str, Any]:
    return {
        "fps": RATE,
        "duration": FRAMES / RATE,
        "total_num_frames": FRAMES,
        "frames_indices": list(range(FRAMES)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }


def request(kind: str, number: int) -> dict[str, Any]:
    """A prompt as vLLM's engine takes it."""
    media: dict[str, Any] = {}
    if pictures := images(kind, number):
        media["image"] = pictures
    if (frames := video(kind, number)) is not None:
        media["video"] = (frames, metadata())
    if heard := sounds(kind, number):
        media["audio"] = [(each, by_type.SAMPLING_RATE) for each in heard]
    prompt = prompts(kind)[number]
    if kind == "paligemma":  # Its images are before the prompt.
        prompt = prompt.removeprefix(FAMILIES[kind].image)
    return {"prompt": prompt} | ({"multi_modal_data": media} if media else {})


def load(kind: str, path: Path, dtype: str = "float32", adapter: Path | None = None) -> Any:
    """Transformers' model with the engine's weights and an adapter of PEFT's, in float32."""
    import torch
    import transformers

    model = transformers.AutoModelForMultimodalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    model = model.eval().float()
    if adapter:
        import peft

        model = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    return model


def inputs(kind: str, number: int, processor: Any) -> dict[str, Any]:
    """A prompt as transformers' model takes it."""
    prompt = prompts(kind)[number]
    more: dict[str, Any] = {}
    if pictures := images(kind, number):
        more["images"] = pictures
    if heard := sounds(kind, number):
        more |= {"audio": heard}
    if (frames := video(kind, number)) is not None:
        about = {name: value for name, value in metadata().items() if "sample" not in name}
        more |= {"videos": [list(frames)], "video_metadata": [about], "do_sample_frames": False}
    if not more:
        return {"input_ids": processor.tokenizer(prompt, return_tensors="pt")["input_ids"]}
    processed = processor(text=[prompt], return_tensors="pt", **more)
    return {
        name: value.float() if value.is_floating_point() else value
        for name, value in processed.items()
        if name not in ("attention_mask", "labels")
    }


def reference(
    kind: str, path: Path, dtype: str = "float32", adapter: Path | None = None
) -> Callable[[int, tuple[int, ...]], Any]:
    """Logits ``[tokens, vocabulary]`` of transformers for an answer's tokens, with the engine's
    weights and an adapter of PEFT's, in float32."""
    import torch
    import transformers

    model = load(kind, path, dtype, adapter)
    answering = getattr(model, FAMILIES[kind].part, model)
    processor = transformers.AutoProcessor.from_pretrained(path)

    @functools.cache
    def logits(number: int, tokens: tuple[int, ...]) -> Any:
        given = inputs(kind, number, processor)
        prompt = given["input_ids"]
        given["input_ids"] = torch.cat([prompt, torch.tensor([tokens])], 1)
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in given:
                # Of PaliGemma 0 is the prefix, whose tokens attend in both directions.
                suffix = int(kind == "paligemma")
                given[name] = torch.nn.functional.pad(given[name], (0, len(tokens)), value=suffix)
        if answering is not model:  # Its positions are computed only with a mask.
            given["attention_mask"] = torch.ones_like(given["input_ids"])
        if kind == "gemma4_unified":  # Without, its global layers attend to images as the others.
            given["attention_mask"] = model.create_masks_for_generate(
                model.config,
                torch.empty(*given["input_ids"].shape, 1),
                None,
                None,
                torch.arange(given["input_ids"].shape[1]).unsqueeze(0),
                given.get("mm_token_type_ids"),
            )
        with torch.no_grad():
            return answering(**given).logits[0, prompt.shape[1] - 1 : -1].float()

    return logits


def compare(
    logits: Callable[[int, tuple[int, ...]], Any], answers: list[dict[str, Any]]
) -> dict[str, Any]:
    """The engine's answers to all prompts, in any number of rounds, under its own tokens: largest
    and mean difference of log-probabilities, and tokens that are not transformers' choice."""
    import torch

    errors, mismatches = [], 0
    for number, answer in enumerate(answers):
        tokens = torch.tensor(answer["tokens"])
        exact = logits(number % len(LENGTHS), tuple(answer["tokens"])).log_softmax(-1)
        assert len(tokens) == LENGTHS[number % len(LENGTHS)]
        chosen = exact[torch.arange(len(tokens)), tokens]
        errors.append((torch.tensor(answer["logprobs"]) - chosen).abs())
        mismatches += int((exact.argmax(-1) != tokens).sum())
    every = torch.cat(errors)
    return {"most": float(every.max()), "mean": float(every.mean()), "others": mismatches}


def case(
    name: str, kind: str, path: Path, ranks: int, dtype: str, engine: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of serve_model_types.py for a model, which is written unless it exists."""
    if not path.exists():
        models.write(kind, path, drafts="speculative_config" in engine)
    engine_case = {
        "name": name,
        "model": str(path),
        "task": "generate",
        "ranks": ranks,
        "dtype": dtype,
    }
    engine_case |= {"prompts": prompts(kind), "lengths": LENGTHS, "media": kind}
    options = ENGINE | limits(kind) | {"max_num_batched_tokens": 64} | engine
    return engine_case | {"engine": {key: options[key] for key in options if key not in UNUSED}}
