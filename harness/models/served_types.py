# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""How a small model of each type of attention and task is served: options of the engine, and the
attentions that serve it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness.models import by_type as models
from harness.models import latent

SMALL = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
}
# Latent attention: steps that are split, and steps with expanded keys.
LONGER = SMALL | {"max_num_batched_tokens": 192}
POOLING = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_model_len": 512,
    "runner": "pooling",
}
IMAGES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "max_model_len": 256,
    "limit_mm_per_prompt": {"image": 2},
}
SOUNDS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 100}
SOUNDS |= {"limit_mm_per_prompt": {"audio": 1}}


class Kind(NamedTuple):
    """A type of model, and how it is served."""

    task: str
    """As in serve_model_types.py."""
    write: Callable[[Path, str], None]
    """Writes the model of this name to a directory."""
    engine: dict[str, Any]
    served_by: tuple[list[str], list[str]]
    """Attentions with ascend-attention, and without."""
    media: str = ""
    max_npus: int = 2
    """NPUs that vLLM's model takes; ModernBERT's splits its joint projection as if one had all of
    it."""


FUSED, BUILT_IN = ["FusedAttentionImpl"], ["PagedAttentionImpl"]
LATENT, BUILT_IN_LATENT = ["FusedLatentAttentionImpl"], ["PagedLatentAttentionImpl"]
SPARSE = ["FusedSparseLatentAttentionImpl"], ["PagedSparseLatentAttentionImpl"]
SINKS, ENCODERS = ["SinkAttentionImpl"], (["FusedEncoderAttentionImpl"], ["EncoderAttentionImpl"])
IMAGE_ENCODERS = [*FUSED, "FusedMMEncoderAttention"], ["MMEncoderAttention", *BUILT_IN]
KINDS: dict[str, Kind] = {
    name: Kind("generate", models.decoder, SMALL, (FUSED, BUILT_IN)) for name in models.DECODERS
}
for _name in ("granite, sinks and windows", "gpt-oss, experts with biases"):
    KINDS[_name] = KINDS[_name]._replace(served_by=(SINKS, BUILT_IN))
for _name in latent.MODELS:
    KINDS[_name] = KINDS[_name]._replace(engine=LONGER, served_by=(LATENT, BUILT_IN_LATENT))
MLA_PROLOG = {"additional_config": {"ascend": {"platform": {"mla_prolog": True}}}}
KINDS["deepseek-v3, mla_prolog"] = KINDS["deepseek-v3, mla_prolog"]._replace(
    engine=LONGER | MLA_PROLOG, served_by=([*LATENT, "PrologAttention"], [])
)
PANGU = "openpangu, sandwich norms"
KINDS[PANGU] = KINDS[PANGU]._replace(engine=LONGER | {"trust_remote_code": True})
KINDS["deepseek-v3, other widths"] = KINDS["deepseek-v3, other widths"]._replace(
    served_by=(BUILT_IN_LATENT, BUILT_IN_LATENT)
)
for _name in ("deepseek-v3.2, selected tokens", "glm-5, shared selections"):
    KINDS[_name] = KINDS[_name]._replace(served_by=SPARSE)
KINDS["qwen3-next, gated delta net"] = KINDS["qwen3-next, gated delta net"]._replace(
    served_by=([*FUSED, "FusedGatedDeltaRule.prefill"], [*BUILT_IN, "chunk_rule"])
)
for _name in (
    "gemma2, soft caps",
    "bloom, ALiBi",
    *(f"qwen3, multi-head, heads of {size}" for size in (80, 96, 256)),
):
    KINDS[_name] = KINDS[_name]._replace(served_by=(BUILT_IN, BUILT_IN))
KINDS |= {
    "bert embedding": Kind("embed", models.embedding, POOLING, ENCODERS),
    "roberta embedding": Kind("embed", models.embedding, POOLING, ENCODERS),
    "modernbert embedding, windows between": Kind(
        "embed", models.embedding, POOLING, ENCODERS, max_npus=1
    ),
    "qwen3 embedding": Kind("embed", models.embedding, POOLING, (FUSED, BUILT_IN)),
    "bert classifier": Kind("classify", models.classifier, POOLING, ENCODERS),
    "bert cross-encoder": Kind("score", models.classifier, POOLING, ENCODERS),
    "idefics3, an image": Kind("generate", models.idefics3, IMAGES, IMAGE_ENCODERS, "image"),
    "paddleocr-vl, an image": Kind("generate", models.paddleocr, IMAGES, IMAGE_ENCODERS, "image"),
    "whisper, a sound": Kind(
        "generate",
        models.whisper,
        SOUNDS,
        (
            ["CrossAttentionImpl", "FusedAttentionImpl"],
            ["CrossAttentionImpl", "PagedAttentionImpl"],
        ),
        "audio",
    ),
}
