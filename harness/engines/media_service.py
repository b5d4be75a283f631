# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Requests with images and videos as a server gets them: in a large batch, through the chat API,
with adapters on the language model and the encoder, with grammars, and with unusual images."""

from __future__ import annotations

import base64
import functools
import io
import re
from pathlib import Path
from typing import Any

from harness.models.sound_families import FAMILIES
from harness.references import multimodal

BATCH = 32
CHOICES = ["yes", "no"]
TEMPLATE = """<s>{%- for message in messages -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{ part['text'] }}{%- else -%}
{{ placeholders[part['type']] }}{%- endif -%}{%- endfor -%}{%- endfor -%}<eos>"""
"""The tokenizer of the tests begins and ends a text with these tokens."""
MODULES = r".*(language_model.*(q_proj|down_proj)|visual\.blocks.*attn\.(qkv|proj))"


def adapter(model: Path, path: Path) -> None:
    """Write an adapter on the language model and the encoder, with random weights."""
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(1)
    peft_model = peft.get_peft_model(
        base, peft.LoraConfig(r=8, lora_alpha=16, target_modules=MODULES)
    )
    for name, weight in peft_model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    peft_model.save_pretrained(str(path))


def _url(image: Any, media: str = "image/png") -> str:
    return f"data:{media};base64,{_encoded(image, media.rpartition('/')[2])}"


def _encoded(image: Any, form: str) -> str:
    file = io.BytesIO()
    image.save(file, form)
    return base64.b64encode(file.getvalue()).decode()


def _chat(kind: str, number: int) -> list[Any]:
    """A prompt of ``multimodal`` as messages of the chat API."""
    family, images = FAMILIES[kind], iter(multimodal.images(kind, number))
    content: list[dict[str, Any]] = []
    media = f"({re.escape(family.image)}|{re.escape(family.video)})"
    for part in re.split(media, multimodal.prompts(kind)[number]):
        if part == family.image:
            content.append({"type": "image_url", "image_url": {"url": _url(next(images))}})
        elif part == family.video:
            files = multimodal.video_files(kind, number)
            frames = ",".join(base64.b64encode(file).decode() for file in files)
            url = {"url": f"data:video/jpeg;base64,{frames}"}
            content.append({"type": "video_url", "video_url": url})
        elif part:
            content.append({"type": "text", "text": part})
    return [{"role": "user", "content": content}]


@functools.cache
def unusual() -> dict[str, str]:
    """Images, and what is no image, as URLs."""
    from PIL import Image

    plain = Image.linear_gradient("L").resize((60, 40))
    png = base64.b64decode(_encoded(plain, "png"))
    urls = {mode: _url(plain.convert(mode)) for mode in ("L", "LA", "P", "1", "RGBA")}
    urls |= {
        f"{width} x {height}": _url(plain.convert("RGB").resize((width, height)))
        for width, height in ((1, 1), (3000, 2000), (199, 1), (1, 300))
    }
    broken = {"empty": b"", "text": b"no image", "cut": png[:60]}
    return urls | {
        name: f"data:image/png;base64,{base64.b64encode(data).decode()}"
        for name, data in broken.items()
    }


BROKEN = ("empty", "text", "cut", "1 x 300")
"""Refused: these have no pixels, or sides of which one is more than 200 times the other."""


def answers(engine: Any, kind: str, adapter_path: str) -> dict[str, Any]:
    """Answers of an engine, by part of the test."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    def sampling(length: int, **more: Any) -> Any:
        return SamplingParams(
            temperature=0, max_tokens=length, **{"logprobs": 0, "ignore_eos": True} | more
        )

    def answer(output: Any) -> dict[str, Any]:
        completion = output.outputs[0]
        chosen = zip(completion.token_ids, completion.logprobs, strict=True)
        return {
            "tokens": list(completion.token_ids),
            "logprobs": [each[token].logprob for token, each in chosen],
        }

    count = len(multimodal.LENGTHS)
    family = FAMILIES[kind]
    quiet: dict[str, Any] = {"use_tqdm": False}
    template: dict[str, Any] = quiet | {
        "chat_template": TEMPLATE,
        "chat_template_content_format": "openai",
        "chat_template_kwargs": {
            "placeholders": {"image": family.image, "video": family.video},
        },
        "add_generation_prompt": False,
    }
    lengths = [sampling(length) for length in multimodal.LENGTHS]
    numbers = [i % count for i in range(BATCH)]
    requests: list[Any] = [multimodal.request(kind, i) for i in range(count)]
    adapted = LoRARequest("both", 1, adapter_path)
    # Requests with the adapter and without in one batch.
    mixed = engine.generate(
        [requests[i] for i in numbers] + requests,
        [lengths[i] for i in numbers] + lengths,
        lora_request=[None] * BATCH + [adapted] * count,
        **quiet,
    )
    results: dict[str, Any] = {
        "mixed": [answer(output) for output in mixed[:BATCH]],
        "adapter": [answer(output) for output in mixed[BATCH:]],
    }
    chats = [_chat(kind, i) for i in range(count)]
    results["chat"] = [answer(output) for output in engine.chat(chats, lengths, **template)]
    grammar = StructuredOutputsParams(choice=CHOICES)
    chosen = sampling(4, structured_outputs=grammar, ignore_eos=False, logprobs=None)
    results["grammar"] = [
        output.outputs[0].text for output in engine.generate(requests, chosen, **quiet)
    ]
    results["unusual"] = {}
    for name, url in unusual().items():
        content = [{"type": "image_url", "image_url": {"url": url}}]
        try:
            (output,) = engine.chat(
                [[{"role": "user", "content": content}]], sampling(4), **template
            )
            results["unusual"][name] = answer(output)
        except Exception as error:
            results["unusual"][name] = type(error).__name__
    (last,) = engine.generate(requests[:1], lengths[:1], **quiet)
    return results | {"last": answer(last)}
