# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Quantized models on emulated NPUs, compared with transformers: `tools/check quantized` and
e2e/test_quantization.py."""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.compare import layouts
from harness.engines import npus
from harness.models import hybrid, latent, quantize
from harness.models.quantize import Spec
from harness.progress import track
from harness.references.dequantized import Model, Reference

BOUND, FLOAT_BOUND = 0.025, 0.05
"""Of the average distance of log-probabilities from transformers' with dequantized weights: with
inputs, keys and values quantized there too, and not. What is broken in one scheme of a model must
go beyond the first (`tools/check quantized --break`)."""

LAYOUTS = ["TP1", "TP2"]
STATIC, DYNAMIC = Spec(8, "static"), Spec(8, "dynamic")
# Each layer of the model uses the next one.
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
    "awq": [Spec(4, group=128, symmetric=False)] * 2,
    "gptq": [
        Spec(4, group=128),
        Spec(4, group=64, symmetric=False),
        Spec(8, group=128, symmetric=False),
        Spec(4),
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
        Spec(8, "dynamic", whole=True),
        Spec(8),
        Spec(4, group=32, symmetric=False),
        Spec(4),
        Spec(4, "dynamic"),
        Spec(4, "dynamic", group=32),
    ],
    "awq": [Spec(4, group=32, symmetric=False)] * 2,
    "gptq": [Spec(4, group=64), Spec(4, group=32, symmetric=False)],
}


LATENT = {"ascend": [DYNAMIC, DYNAMIC]}
DELTA = {"ascend": [DYNAMIC] * 4}
MODELS = {
    "dense": DENSE,
    "experts": EXPERTS,
    "latent": LATENT,
    "latent, mla_prolog": LATENT,
    "delta": DELTA,
}
LEFT = ("gate", "kv_b_proj", "shared_expert_gate", "conv1d", "in_proj_ba")
"""Matrices that ModelSlim leaves as they are."""


def spec_of(specs: Sequence[Spec], experts: bool, only: int | None = None) -> Any:
    """The spec of a matrix by its name; ``only`` leaves all layers but one as they are.

    Linear layers beside experts have the experts' spec; static inputs, which no experts have, in a
    first layer with dynamic ones.
    """

    def find(name: str) -> Spec | None:
        parts = name.split(".")
        if "layers" not in parts or parts[-1] in LEFT:
            return None
        layer = int(parts[parts.index("layers") + 1])
        if only not in (None, layer):
            return None
        static = experts and layer == 0 and "experts" not in parts and specs[0] == DYNAMIC
        return STATIC if static else specs[layer]

    return find


@functools.cache
def float_model(kind: str, layers: int, directory: Path, inner: int = 512) -> Path:
    """A model with random weights: dense with biases and ``inner`` columns (Qwen2), of experts
    (Qwen3-MoE), with latent attention (DeepSeek-V3), or a gated delta net (Qwen3-Next), in which
    every token goes to every expert."""
    import torch
    import transformers

    torch.manual_seed(0)
    path = directory / f"{kind}-{layers}-{inner}"
    if kind == "dense":
        config: Any = transformers.Qwen2Config(
            **quantize.COMMON, intermediate_size=inner, num_hidden_layers=layers
        )
        model: Any = transformers.Qwen2ForCausalLM(config)
        for layer in model.model.layers:
            for part in "qkv":
                torch.nn.init.normal_(getattr(layer.self_attn, f"{part}_proj").bias, std=0.5)
    elif kind in ("latent", "latent, mla_prolog"):
        changes = (
            latent.ALL
            | latent.GROUPS
            | {
                "q_lora_rank": 96,
                "intermediate_size": 512,
                "moe_intermediate_size": 128,
            }
        )
        if kind != "latent":
            changes |= latent.MODELS["deepseek-v3, mla_prolog"][1]
            changes |= {"intermediate_size": 512, "initializer_range": 0.008}
        config = transformers.DeepseekV3Config(
            **quantize.COMMON | changes | {"num_hidden_layers": layers}
        )
        model = transformers.DeepseekV3ForCausalLM(config)
        for layer in model.model.layers[config.first_k_dense_replace :]:
            torch.nn.init.normal_(layer.mlp.gate.e_score_correction_bias, std=0.05)
    elif kind == "delta":
        changes = hybrid.DELTA | {
            "shared_expert_intermediate_size": 128,
            "layer_types": hybrid.LINEAR,
            "num_hidden_layers": layers,
        }
        changes |= {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
        config = transformers.Qwen3NextConfig(**quantize.COMMON | changes)
        model = transformers.Qwen3NextForCausalLM(config)
    else:
        config = transformers.Qwen3MoeConfig(
            **quantize.COMMON,
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


@functools.cache
def calibrated(path: Path) -> tuple[dict[str, quantize.Range], dict[str, quantize.Range]]:
    """Calibration: ranges of the linear layers' inputs and of the channels of keys and values, over
    this module's texts."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    inputs: dict[str, quantize.Range] = {}
    cache: dict[str, quantize.Range] = {}

    def widen(
        into: dict[str, quantize.Range], name: str, least: torch.Tensor, factor: torch.Tensor
    ) -> None:
        before = into.get(name, (least, factor))
        into[name] = torch.minimum(before[0], least), torch.maximum(before[1], factor)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, given, name=name: widen(inputs, name, given[0].min(), given[0].max())
            )
    with torch.no_grad():
        for prompt in layouts.prompts(quantize.COMMON["vocab_size"])[0]:
            kv_cache = model(torch.tensor([prompt]), use_cache=True).past_key_values
            for index, layer in enumerate(kv_cache.layers):
                if not hasattr(layer, "keys"):  # of linear attention
                    continue
                for part, values in (("k", layer.keys), ("v", layer.values)):
                    rows = values[0].transpose(0, 1).flatten(1)  # [tokens, kv_heads * head_size]
                    widen(
                        cache,
                        f"model.layers.{index}.self_attn.{part}_proj",
                        rows.amin(0),
                        rows.amax(0),
                    )
    return inputs, cache


def make(
    kind: str,
    form: str,
    dtype: str,
    directory: Path,
    *,
    cache: bool = False,
    only: int | None = None,
    layers: int = 0,
    inner: int = 512,
    specs: tuple[Spec, ...] = (),
) -> Model:
    """One of the models, whose layers have the schemes in turn, or ``specs``: all, the first
    ``layers``, or only that one (-1: none). A dense one has ``inner`` columns between its
    matrices."""
    import torch

    specs = specs or tuple(MODELS[kind][form][: layers or None])
    source = float_model(kind, len(specs), directory, inner)
    inputs, ranges = calibrated(source)
    target = directory / f"{kind}-{form}-{dtype}{'-c8' * cache}{'' if only is None else f'-{only}'}"
    weights = quantize.quantize(
        source,
        target,
        form,
        spec_of(specs, kind == "experts", only),
        dtype=getattr(torch, dtype),
        inputs=inputs,
        cache=ranges if cache else None,
        shifted=kind == "dense" and form == "ascend",
    )
    return Model(kind, source, target, dtype, weights)


def main() -> None:
    """See tools/check quantized."""
    parser = argparse.ArgumentParser(prog="tools/check quantized", description=__doc__)
    parser.add_argument(
        "layouts",
        nargs="*",
        metavar="LAYOUT",
        help=f"as in tools/check layouts (default: {', '.join(LAYOUTS)})",
    )
    parser.add_argument("--model", choices=[*MODELS], action="append", help="default: all")
    parser.add_argument(
        "--format", choices=[*DENSE], action="append", help="default: all that the model has"
    )
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16"], action="append", help="default: both"
    )
    parser.add_argument(
        "--break",
        dest="broken",
        action="store_true",
        help="also break each scheme once, and print how far it is then",
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one engine")
    options = parser.parse_args()
    columns = [
        "model",
        "format",
        "dtype",
        "layout",
        "tokens",
        "average",
        "most",
        "average",
        "most",
        "seconds",
    ]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    wrong, broken = 0, []
    chosen = [
        (kind, form, dtype)
        for kind in options.model or MODELS
        for form in MODELS[kind]
        if form in (options.format or MODELS[kind])
        for dtype in options.dtype or ["bfloat16", "float16"]
    ]
    with tempfile.TemporaryDirectory() as directory:
        for kind, form, dtype in track("models:", chosen):
            cache = kind == "dense" and form == "ascend"
            model = make(kind, form, dtype, Path(directory), cache=cache)
            for layout in options.layouts or LAYOUTS:
                label = f"| {kind} | {form}{', int8 KV cache' * cache} | {dtype} | {layout} |"
                engine = (layouts.OF_EXPERTS | layouts.OF_PREFILLS)[layout]
                served = serve(model, engine, options.timeout)
                if isinstance(served, str):
                    print(f"{label} failed: {served} | | | | | |", flush=True)
                    wrong += 1
                    continue
                exact, alike = (
                    Reference(model, quantized=False),
                    Reference(model, quantized=True),
                )
                count, max_diff, mean = exact.compare(served["results"])
                _, most_alike, mean_alike = alike.compare(served["results"])
                figures = " | ".join(
                    f"{value:.4f}" for value in (mean_alike, most_alike, mean, max_diff)
                )
                print(f"{label} {count} | {figures} | {served['seconds']:.0f} |", flush=True)
                wrong += not (mean_alike < BOUND and mean < FLOAT_BOUND)
                if options.broken:
                    errors_found = alike.broken(served["results"])
                    broken += [
                        f"{label} {' | '.join(key)} | {value:.4f} |"
                        for key, value in errors_found.items()
                    ]
                    wrong += any(value < BOUND for value in errors_found.values())
    if broken:
        print(
            "\n| model | format | dtype | layout | scheme | broken by | average"
            " |\n|---|---|---|---|---|---|---|",
            *broken,
            sep="\n",
        )
    sys.exit(1 if wrong else 0)


def case(name: str, model: Model, engine: dict[str, Any]) -> dict[str, Any]:
    return layouts.case(name, model.path, engine, dtype=model.dtype)


def serve(model: Model, engine: dict[str, Any], timeout: float) -> dict[str, Any] | str:
    """The engine's answers under the external launcher, or the end of its log."""
    command = [sys.executable, str(layouts.PROGRAM), json.dumps([case("one", model, engine)])]
    try:
        done = npus.run(layouts.ranks(engine), *command, timeout=timeout, OMP_NUM_THREADS="1")
    except subprocess.TimeoutExpired:
        return f"no answer after {timeout:g} s"
    return next(iter(npus.results(done.stdout)), None) or (done.stdout + done.stderr)[-2000:]
