"""Quantized models on emulated NPUs against transformers: for tools/quantized and tests/test_quantization.py."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import layout_check as layouts
import quantize
from quantize import Matrix, Spec

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "sliding_window": None,
}
STATIC, DYNAMIC = Spec(8, "static"), Spec(8, "dynamic")
# each layer of the model has the next of them
DENSE = {
    "ascend": [
        STATIC,
        DYNAMIC,
        Spec(8, symmetric=False),
        Spec(8, group=64, symmetric=False),
        Spec(4, group=64, symmetric=False),
        Spec(4, symmetric=False),
        Spec(4, group=64, packed=True),
        Spec(4, "dynamic"),
        Spec(4, "dynamic", group=64),
    ],
    "compressed-tensors": [
        STATIC,
        DYNAMIC,
        Spec(8),
        Spec(8, group=64, symmetric=False),
        Spec(4, group=64, symmetric=False),
        Spec(4),
        Spec(4, "dynamic"),
        Spec(4, "dynamic", group=64),
        Spec(4, "dynamic", group=64, packed=True),
    ],
}
EXPERTS = {
    "ascend": [
        DYNAMIC,
        Spec(8, symmetric=False),
        Spec(4, group=32, symmetric=False),
        Spec(4, group=32, packed=True),
        Spec(4, "dynamic"),
        Spec(4, "dynamic", group=32),
    ],
    "compressed-tensors": [
        DYNAMIC,
        Spec(8),
        Spec(4, group=32, symmetric=False),
        Spec(4),
        Spec(4, "dynamic"),
        Spec(4, "dynamic", group=32),
    ],
}


def spec_of(specs: list[Spec], experts: bool, only: int | None = None) -> Any:
    """The spec of a matrix by its name; ``only`` leaves all layers but one as they are."""

    def find(name: str) -> Spec | None:
        parts = name.split(".")
        if "layers" not in parts or parts[-1] == "gate":
            return None
        layer = int(parts[parts.index("layers") + 1])
        if only not in (None, layer) or (experts and "experts" not in parts):
            return None
        return specs[layer]

    return find


@functools.cache
def float_model(kind: str, layers: int, directory: Path) -> Path:
    """A model with random weights: dense with biases (Qwen2), or of experts (Qwen3-MoE)."""
    import torch
    import transformers

    torch.manual_seed(0)
    path = directory / f"{kind}-{layers}"
    if kind == "dense":
        config = transformers.Qwen2Config(**COMMON, intermediate_size=512, num_hidden_layers=layers)
        model: Any = transformers.Qwen2ForCausalLM(config)
        for layer in model.model.layers:
            for part in "qkv":
                torch.nn.init.normal_(getattr(layer.self_attn, f"{part}_proj").bias, std=0.5)
    else:
        config = transformers.Qwen3MoeConfig(
            **COMMON,
            intermediate_size=512,
            moe_intermediate_size=128,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            num_hidden_layers=layers,
        )
        model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(path)
    return path


def calibrated(path: Path) -> tuple[dict[str, quantize.Range], dict[str, quantize.Range]]:
    """The ranges of linear layers' inputs, and of the channels of keys and values, over this module's own texts."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    inputs: dict[str, quantize.Range] = {}
    cache: dict[str, quantize.Range] = {}

    def widen(into: dict[str, quantize.Range], name: str, least: torch.Tensor, most: torch.Tensor) -> None:
        before = into.get(name, (least, most))
        into[name] = torch.minimum(before[0], least), torch.maximum(before[1], most)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given, name=name: widen(inputs, name, given[0].min(), given[0].max()))
    with torch.no_grad():
        for prompt in layouts.prompts(COMMON["vocab_size"])[0]:
            found = model(torch.tensor([prompt]), use_cache=True).past_key_values
            for index, layer in enumerate(found.layers):
                for part, values in (("k", layer.keys), ("v", layer.values)):
                    rows = values[0].transpose(0, 1).flatten(1)  # [tokens, kv_heads * head_size]
                    widen(cache, f"model.layers.{index}.self_attn.{part}_proj", rows.amin(0), rows.amax(0))
    for name in inputs:  # one input of matrices that are kept as one
        inputs[name] = inputs[name]
    return inputs, cache


def make(
    kind: str,
    form: str,
    dtype: str,
    directory: Path,
    *,
    specs: list[Spec] | None = None,
    cache: bool = False,
    only: int | None = None,
    change: Any = None,
    name: str = "",
) -> tuple[Path, Path]:
    """A quantized model, and the dequantized one for transformers."""
    import torch

    specs = specs or (DENSE if kind == "dense" else EXPERTS)[form]
    source = float_model(kind, len(specs), directory)
    inputs, ranges = calibrated(source)
    target = directory / (name or f"{kind}-{form}-{dtype}{'-c8' * cache}")
    reference = quantize.quantize(
        source,
        target,
        form,
        spec_of(specs, kind == "experts", only),
        dtype=getattr(torch, dtype),
        inputs=inputs,
        cache=ranges if cache else None,
        **({"change": change} if change else {}),
    )
    return target, reference


# What a bound has to tell from a right answer: changes of one layer's matrices.


def wrong_scale(own: Matrix) -> Matrix:
    """The scales of the second half of the rows are those of the first half."""
    half = len(own.scale) // 2
    scale = own.scale.clone()
    scale[half : 2 * half] = own.scale[:half] * 1.25
    return Matrix(own.spec, own.values, scale, own.zero)


def swapped_nibbles(own: Matrix) -> Matrix:
    values = own.values.clone()
    values[:, ::2], values[:, 1::2] = own.values[:, 1::2], own.values[:, ::2]
    return Matrix(own.spec, values, own.scale, own.zero)


def no_offset(own: Matrix) -> Matrix:
    return Matrix(own.spec, own.values, own.scale, own.zero * 0)
