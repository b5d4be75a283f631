# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Embeddings and scores of vision-language models, and scores of decoders by the logits of two
tokens: models, requests and transformers' results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness.models import by_type, hybrid
from harness.references import multimodal

NO, YES = "n", "y"
"""Tokens by whose logits a decoder scores."""
TWO = {"classifier_from_token": [NO, YES]}
SIZE = 64
"""Size of a token's embedding."""
LABELS = 3


class Pooling(NamedTuple):
    """model_type: of transformers. task: of serve_model_types.py. architecture: of vLLM's
    registry. options: of the configuration. pooled: the result, from transformers' model, its last
    hidden states ``[tokens, hidden_size]`` and the weights that only vLLM's model has."""

    model_type: str
    task: str
    architecture: str
    options: dict[str, Any]
    pooled: Callable[[Any, Any, dict[str, Any]], Any]
    ranks: int = 1


def _last(_model: Any, hidden: Any, _weights: dict[str, Any]) -> Any:
    return hidden[-1] / hidden[-1].norm()


def _every(_model: Any, hidden: Any, weights: dict[str, Any]) -> Any:
    projected = hidden @ weights["custom_text_proj.weight"].T
    return (projected / projected.norm(dim=-1, keepdim=True)).flatten()


def _dense(_model: Any, hidden: Any, weights: dict[str, Any]) -> Any:
    inner = hidden[-1] @ weights["score.0.weight"].T + weights["score.0.bias"]
    score = inner.relu() @ weights["score.2.weight"].T + weights["score.2.bias"]
    return (score - 2.65).sigmoid()  # As published.


def _logits(model: Any, hidden: Any) -> Any:
    names = [NO, YES]
    return hidden[-1] @ model.lm_head.weight[by_type.tokenizer().convert_tokens_to_ids(names)].T


def _two(model: Any, hidden: Any, _weights: dict[str, Any]) -> Any:
    return _logits(model, hidden).softmax(-1)[1:]


def _one(model: Any, hidden: Any, _weights: dict[str, Any]) -> Any:
    return _logits(model, hidden)[1:].sigmoid()


def _labels(_model: Any, hidden: Any, weights: dict[str, Any]) -> Any:
    return hidden[-1] @ weights["score.weight"].T  # vLLM's default for this architecture


RERANKER = {"is_original_qwen3_reranker": True} | TWO
ONE = {"classifier_from_token": [YES], "method": "no_post_processing", "num_labels": 1}
CASES: dict[str, Pooling] = {
    "Qwen3-VL-Embedding": Pooling(
        "qwen3_vl", "embed", "Qwen3VLForConditionalGeneration", {}, _last, ranks=2
    ),
    "GME": Pooling("qwen2_vl", "embed", "Qwen2VLForConditionalGeneration", {}, _last),
    "ColQwen3": Pooling("qwen3_vl", "token_embed", "ColQwen3", {"embed_dim": SIZE}, _every),
    "Qwen3-VL-Reranker": Pooling(
        "qwen3_vl", "classify", "Qwen3VLForSequenceClassification", RERANKER, _two
    ),
    "jina-reranker-m0": Pooling(
        "qwen2_vl", "classify", "JinaVLForRanking", {"num_labels": 1}, _dense
    ),
    "Qwen3-Reranker": Pooling(
        "qwen3", "classify", "Qwen3ForSequenceClassification", RERANKER, _two
    ),
    "mxbai-rerank-v2": Pooling(
        "qwen2",
        "classify",
        "Qwen2ForSequenceClassification",
        TWO | {"method": "from_2_way_softmax"},
        _two,
    ),
    "bge-reranker-v2-gemma": Pooling(
        "gemma", "classify", "GemmaForSequenceClassification", ONE, _one
    ),
    "Jamba": Pooling(
        "jamba", "classify", "JambaForSequenceClassification", {"num_labels": LABELS}, _labels
    ),
}
"""By the name of a published model that is served like this."""
TEXTS = ["1+1=", "what is it?", "how many of them are there, and where?", "is it so"]


def has_media(name: str) -> bool:
    return CASES[name].model_type in multimodal.FAMILIES


def case(name: str, directory: Path) -> dict[str, Any]:
    """Arguments of serve_model_types.py for a model, which is written."""
    pooling, path = CASES[name], directory / name
    overrides = {"architectures": [pooling.architecture]} | pooling.options
    if has_media(name):
        # vLLM splits no prompt whose tokens it returns each.
        limits = {"max_num_batched_tokens": 512} if pooling.task == "token_embed" else {}
        engine_case = multimodal.case(
            name, pooling.model_type, path, pooling.ranks, "float32", limits
        )
        _add_weights(name, path)
        if pooling.architecture == "JinaVLForRanking":
            # vLLM reverses two images, as the document's comes before the query's.
            engine_case["prompts"] = engine_case["prompts"][:2]
    else:
        if name in hybrid.MODELS:
            hybrid.make(name, directory)
            _add_weights(name, path)
        else:
            _write(pooling.model_type, path)
        by_type.tokenizer().save_pretrained(path)
        prompts = [by_type.tokenizer()(text)["input_ids"] for text in TEXTS]
        engine_case = {"name": name, "model": str(path), "ranks": pooling.ranks, "dtype": "float32"}
        engine_case |= {"prompts": prompts, "media": ""}
        engine_case["engine"] = {
            "max_model_len": 512,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
        }
    engine_case["engine"] |= {"runner": "pooling", "hf_overrides": overrides}
    return engine_case | {"task": pooling.task}


def _write(kind: str, path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **by_type.COMMON | {"head_dim": 32})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)


def _own_weights(name: str) -> dict[str, Any]:
    """Weights that only vLLM's model has."""
    import torch

    torch.manual_seed(1)
    size = by_type.COMMON["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    if CASES[name].architecture == "ColQwen3":
        shapes = {"custom_text_proj.weight": (SIZE, size)}
    if CASES[name].architecture == "JinaVLForRanking":
        shapes = {"score.0.weight": (size, size), "score.0.bias": (size,)}
        shapes |= {"score.2.weight": (1, size), "score.2.bias": (1,)}
    if name in hybrid.MODELS:
        shapes = {"score.weight": (LABELS, hybrid.COMMON["hidden_size"])}
    return {key: torch.randn(shape) * 0.1 for key, shape in shapes.items()}


def _add_weights(name: str, path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    save_file(load_file(file) | _own_weights(name), file, {"format": "pt"})
    if not has_media(name):
        return
    stored = json.loads((path / "config.json").read_text())
    # vLLM reads them from this part, and transformers does not write them there.
    stored["text_config"] |= {"tie_word_embeddings": False}
    if CASES[name].architecture == "JinaVLForRanking":
        stored["text_config"] |= {"num_labels": 1}
    (path / "config.json").write_text(json.dumps(stored))


def reference(name: str, case: dict[str, Any]) -> list[list[float]]:
    """Transformers' results in float32."""
    import torch
    import transformers

    path, kind = Path(case["model"]), CASES[name].model_type
    if has_media(name):
        model = multimodal.load(kind, path)
        processor = transformers.AutoProcessor.from_pretrained(path)
        requests = [multimodal.inputs(kind, i, processor) for i in range(len(case["prompts"]))]
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        requests = [{"input_ids": torch.tensor([prompt])} for prompt in case["prompts"]]
    results = []
    with torch.no_grad():
        for request in requests:
            hidden = model.model(**request).last_hidden_state[0]
            results.append(CASES[name].pooled(model, hidden, _own_weights(name)).tolist())
    return results
