# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""KV cache of something that has changed: ten things, one at a time, in each medium that keeps or
hands over KV cache, on engines; see docs/kv-transfer-design.md#weights-and-adapters-that-change."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import checkout
from harness.engines import npus
from harness.models import quantize
from harness.models.decoders import qwen3
from harness.models.quantize import Spec
from harness.progress import track

MEDIA = {
    "disk": "pool on disk",
    "mooncake": "pool in Mooncake",
    "host": "host memory",
    "pair": "prefill to decode",
}
CHANGES = {
    "nothing": "nothing",
    "weights in place": "weights, in the running engine",
    "checkpoint": "checkpoint under its path",
    "adapter's contents": "contents of an adapter under its name and path",
    "adapter's name": "name of an adapter",
    "salt": "`cache_salt`",
    "quantization": "quantization",
    "cache dtype": "dtype of the KV cache",
    "block size": "block size",
    "TP": "tensor parallelism",
    "model": "model",
}
WEIGHTS = "model.safetensors"

AT_RUNTIME = ("nothing", "weights in place", "adapter's contents", "adapter's name", "salt")
"""Changes that a running engine can make; the others need another one."""

SHARED = {("nothing", medium) for medium in MEDIA} | {
    ("block size", "pair"),
    ("TP", "pair"),
}
"""Changes that leave the KV cache as it is, so that it is loaded."""


def adapter(model: str, path: Path, seed: int) -> None:
    """An adapter of the attention's projections, whose effect is large."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    draw, weights = torch.Generator().manual_seed(seed), {}
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    for layer in range(config.num_hidden_layers):
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(8, config.hidden_size, generator=draw) / 2
            weights[f"{key}.lora_B.weight"] = torch.randn(rows, 8, generator=draw) / 2
    path.mkdir()
    save_file(weights, path / "adapter_model.safetensors")
    known = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "task_type": "CAUSAL_LM", "bias": "none"}
    known["target_modules"] = ["q_proj", "k_proj", "v_proj"]
    (path / "adapter_config.json").write_text(json.dumps(known))


def configurations(directory: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The base and the other engines, by what is changed."""
    import torch

    model = qwen3(directory / "model")
    weights = {name: directory / name / WEIGHTS for name in ("first", "second")}
    for path in weights.values():
        path.parent.mkdir()
    shutil.copy(Path(model, WEIGHTS), weights["first"])
    _perturb(Path(model, WEIGHTS), weights["second"])
    for seed in (1, 2):
        adapter(model, directory / f"sql-{seed}", seed)
    shutil.copytree(directory / "sql-1", directory / "sql")
    lora = {"enable_lora": True, "max_lora_rank": 8}
    base = {"model": model, "engine": lora, "adapter": ["sql", 1, str(directory / "sql")]}
    base["weights"] = str(weights["first"])

    def other(engine: dict[str, Any], **more: Any) -> dict[str, Any]:
        return base | {"engine": lora | engine} | more

    quantized = directory / "quantized"
    quantize.quantize(
        Path(model), quantized, "compressed-tensors", _dynamic, dtype=torch.float16, inputs={}
    )
    changed = {
        "checkpoint": other({}, weights=str(weights["second"])),
        "cache dtype": other({"dtype": "float16"}),
        "quantization": other({"dtype": "float16"}, model=str(quantized), beside="cache dtype"),
        "block size": other({"block_size": 256}),
        "TP": other({"tensor_parallel_size": 2}),
        "model": other({"hf_overrides": {"rope_theta": 7.0}}),
    }
    return base, changed


def _perturb(source: Path, target: Path) -> None:
    """Write other weights of the same names and shapes."""
    from safetensors.torch import load_file, save_file

    tensors = {
        name: each.neg() if "proj" in name else each for name, each in load_file(source).items()
    }
    save_file(tensors, target, {"format": "pt"})


def _dynamic(name: str) -> Spec | None:
    return Spec(8, "dynamic") if "layers" in name else None


def check(chosen: list[str]) -> list[str]:
    """Run the media that are chosen, or all, and print the table; returns what is wrong."""
    wrong: list[str] = []
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as directory:
        base, changed = configurations(Path(directory))
        case = {"base": base, "others": changed}
        right = _run(case | {"medium": "alone"}, wrong)
        for medium in track("media:", chosen or [*MEDIA]) if right else ():
            results[medium] = _run(case | {"medium": medium, "right": right}, wrong)
            print(medium, json.dumps(results[medium]), flush=True)
    print("\n" + table(results))
    for medium, changes in results.items():
        for change, outcomes in changes.items():
            for when, outcome in outcomes.items():
                is_shared = (change, medium) in SHARED
                if outcome["outcome"] == "WRONG" or (outcome["loaded"] > 0) != is_shared:
                    wrong.append(f"{medium}, {change}, {when}: {outcome}")
    return wrong


def table(results: dict[str, dict[str, Any]]) -> str:
    """A row for each change, and for each medium what happens without and with a restart."""
    lines = ["| changed | " + " | ".join(MEDIA[medium] for medium in results) + " |"]
    lines.append("|---" * (len(results) + 1) + "|")
    for change, name in CHANGES.items():
        cells = [
            _cell(change, medium, changes.get(change, {})) for medium, changes in results.items()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(change: str, medium: str, outcomes: dict[str, Any]) -> str:
    if medium == "host" and change not in AT_RUNTIME:
        return "gone with its engine"
    words = {
        when: "refused"
        if outcome["outcome"] == "refused"
        else "loaded"
        if outcome["loaded"]
        else "computed"
        for when, outcome in outcomes.items()
    }
    if medium == "host":
        return f"{words.get('running', '')}; gone with its engine"
    return "; ".join(dict.fromkeys(words.values()))


def _run(case: dict[str, Any], wrong: list[str]) -> dict[str, Any]:
    program = [sys.executable, str(checkout.PROGRAMS / "change_one_thing.py"), json.dumps(case)]
    shared: dict[str, Any] = {"VLLM_HOST_IP": "127.0.0.1", "VLLM_PLUGINS": ""}
    done = npus.run(3, *program, memory="4GiB", timeout=3000, **shared)
    if not (results := npus.results(done.stdout)):
        print(done.stdout[-3000:], done.stderr[-6000:])
        wrong.append(f"{case['medium']}: no result")
        return {}
    return dict(results[0])
