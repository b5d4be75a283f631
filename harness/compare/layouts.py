# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Small models in parallel layouts, compared with Hugging Face: `tools/check layouts` and
e2e/test_parallelism.py."""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import checkout
from harness.compare.model_types import EXACT
from harness.engines import npus
from harness.models import by_type, hybrid, latent
from harness.progress import Progress, progress

ADDER = checkout.ADDER
PROGRAM = checkout.PROGRAMS / "serve_layout.py"
SMALL = {"gpu_memory_utilization": 0.3, "max_num_seqs": 8, "max_num_batched_tokens": 64}
TP, PP, DP = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
EP = {"enable_expert_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP1": {},
    "TP2": {TP: 2},
    "PP2": {PP: 2},
    "TP2 PP2": {TP: 2, PP: 2},
    "DP2": {DP: 2},
}
OF_EXPERTS: dict[str, dict[str, Any]] = (
    LAYOUTS
    | {
        "TP2 EP2": {TP: 2} | EP,
        "DP2 EP2": {DP: 2} | EP,
        "TP2 DP2 EP4": {TP: 2, DP: 2} | EP,
    }
    | {
        f"DP2 EP2 {way}": (
            {
                DP: 2,
                "additional_config": {"ascend": {"communicator": {"all2all": way}}},
            }
            | EP
        )
        for way in ("allgather", "alltoall", "mc2")
    }
)
DCP = {"decode_context_parallel_size": 2}
OF_ONE_KEY_HEAD: dict[str, dict[str, Any]] = LAYOUTS | {
    "TP2 DCP2": {TP: 2} | DCP,
    "TP2 DCP2, 4 tokens in turn": {TP: 2, "cp_kv_cache_interleave_size": 4} | DCP,
    "TP2 DCP2 PP2": {TP: 2, PP: 2} | DCP,
}
PCP = "prefill_context_parallel_size"
OF_PREFILLS: dict[str, dict[str, Any]] = {
    "PCP2": {PCP: 2},
    "TP2 PCP2": {TP: 2, PCP: 2},
    "PP2 PCP2": {PP: 2, PCP: 2},
    "PCP2 EP2": {PCP: 2} | EP,
    "TP2 PCP2 EP4": {TP: 2, PCP: 2} | EP,
}
"""With vLLM's V2 model runner; run where they are named."""
OF_OPTIONS: dict[str, dict[str, Any]] = {
    f"{layout} {name}": (
        OF_EXPERTS[layout] | {"additional_config": {"ascend": {"platform": {name: True}}}} | more
    )
    for layout, name, more in (
        ("TP2", "shared_experts_stream", {}),
        ("PP2", "mla_prolog", {"gpu_memory_utilization": 0.5}),
        ("DP2 EP2", "mla_prolog", {"gpu_memory_utilization": 0.5}),
    )
}
OF_DRAFTS: dict[str, dict[str, Any]] = {
    "PP2 n-grams": {
        PP: 2,
        "enable_prefix_caching": False,
        "speculative_config": {
            "method": "ngram",
            "prompt_lookup_max": 2,
            "num_speculative_tokens": 3,
        },
    }
}
"""Draft tokens in pipelines, which vLLM's V2 model runner has; run where they are named."""
ATTENTION = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "hidden_size": 128,
}
COMMON = ATTENTION | {
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
OF_LATENTS = OF_EXPERTS | {
    name: layout for name, layout in OF_ONE_KEY_HEAD.items() if "DCP2" in name
}
OF_KINDS = {
    "deepseek-v2": "deepseek-v2, groups of experts",
    "deepseek-v2-lite": "deepseek-v2-lite, no latent query",
    "openpangu": "openpangu, sandwich norms",
    "longcat-flash": "longcat-flash, identities among experts",
    "gpt-oss": "gpt-oss, experts with biases",
}
"""Models of `tools/check model_types`, by their names here."""
LATENT = (
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "kimi-k2",
    "openpangu",
    "longcat-flash",
    "glm-4.7-flash",
)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "one-key-head": ("Qwen3", {"intermediate_size": 256, "num_key_value_heads": 1}),
    "mixtral": (
        "Mixtral",
        {
            "intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v3": latent.MODELS["deepseek-v3, yarn"],
    "deepseek-v3, mla_prolog": (
        "DeepseekV3",
        latent.MODELS["deepseek-v3, mla_prolog"][1]
        | {
            "intermediate_size": 256,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek-v3.2": latent.MODELS["deepseek-v3.2, selected tokens"],
    "glm-5": latent.MODELS["glm-5, shared selections"],
    "kimi-k2": latent.MODELS["kimi-k2, one group"],
    "glm-4.7-flash": latent.MODELS["glm-4.7-flash, 20 heads"],
    # The first of two stages has no attention.
    "qwen3-next": (
        "Qwen3Next",
        hybrid.DELTA | hybrid.EXPERTS | {"num_hidden_layers": 4, "layer_types": hybrid.LINEAR},
    ),
    # DeepSeek-V3's routing (sigmoids, groups, a selection bias, a shared expert, a dense first
    # layer) with dense attention.
    "glm4-moe": (
        "Glm4Moe",
        {
            # Each pipeline stage must have experts (vllm/model_executor/models/glm4_moe.py).
            "num_hidden_layers": 4,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
        },
    ),
}
"""Small models with random weights: the family in Hugging Face, and its configuration besides
COMMON."""


def make(name: str, directory: Path) -> Path:
    """Write one of MODELS or OF_KINDS to the directory, unless it exists."""
    import torch
    import transformers

    path = directory / name
    if path.exists():
        return path
    if name in OF_KINDS:
        by_type.decoder(path, OF_KINDS[name])
    else:
        family, special = MODELS[name]
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(
            getattr(transformers, f"{family}Config")(**(COMMON | special))
        )
        for buffer_name, buffer in model.named_buffers():
            if "e_score_correction_bias" in buffer_name:
                buffer.copy_(torch.randn_like(buffer) * 0.05)
        model.save_pretrained(path)
    return path


@functools.cache
def prompts(vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of 1 to 150 tokens, and the number of tokens to generate for each."""
    draw = random.Random(vocabulary)
    lengths = [1, 150, 7, 33, 64, 5]
    return [[draw.randrange(3, vocabulary) for _ in range(n)] for n in lengths], [6, 4, 8, 3, 5, 7]


def case(
    name: str, model: Path, engine: dict[str, Any], *, mp: bool = False, dtype: str = "bfloat16"
) -> dict[str, Any]:
    """Arguments of serve_layout.py: a layout under the external launcher, or under the
    multiprocessing executor."""
    asked, lengths = prompts(json.loads((model / "config.json").read_text())["vocab_size"])
    options: dict[str, Any] = {
        "name": name,
        "model": str(model),
        "prompts": asked,
        "lengths": lengths,
    }
    options["engine"] = SMALL | {"dtype": dtype} | engine
    return options if mp else options | {"ranks": ranks(engine)}


def ranks(engine: dict[str, Any]) -> int:
    return math.prod(engine.get(size, 1) for size in (TP, PP, DP, PCP))


@functools.cache
def reference(model: Path, dtype: str) -> Any:
    """Hugging Face's model with the engine's weights (rounded to dtype), computing in float32."""
    import torch

    return by_type.causal(model, getattr(torch, dtype)).eval().float()


def compare(
    model: Path, dtype: str, served: list[list[dict[str, Any]]]
) -> tuple[int, int, float, float]:
    """:func:`distances` from Hugging Face's model."""
    import torch

    exact = reference(model, dtype)

    def logprobs(tokens: list[int]) -> Any:
        with torch.no_grad():
            return exact(torch.tensor([tokens])).logits[0].float().log_softmax(-1)

    return distances(logprobs, exact.config.vocab_size, served)


def distances(
    logprobs: Callable[[list[int]], Any], vocabulary: int, served: list[list[dict[str, Any]]]
) -> tuple[int, int, float, float]:
    """The engine's answers under its own tokens: how many tokens, how many of them are not the
    reference's choice, and how far the log-probabilities are from the reference's, at most and on
    average. All ranks that answer a prompt answer alike.

    logprobs: the reference's for a sequence of tokens, float32 ``[tokens, vocabulary]``.
    """
    import torch

    asked, lengths = prompts(vocabulary)
    mismatches, errors = 0, []
    for prompt, length, answers in zip(asked, lengths, served, strict=True):
        assert answers, "a prompt was not answered"
        assert all(answer["tokens"] == answers[0]["tokens"] for answer in answers), (
            "ranks have other tokens"
        )
        tokens = answers[0]["tokens"]
        assert len(tokens) == length
        exact = logprobs(prompt + tokens)[len(prompt) - 1 : -1]
        chosen = exact[torch.arange(length), torch.tensor(tokens)]
        errors.append((torch.tensor(answers[0]["logprobs"]) - chosen).abs())
        mismatches += int((exact.argmax(-1) != torch.tensor(tokens)).sum())
    every = torch.cat(errors)
    return len(every), mismatches, float(every.max()), float(every.mean())


def main() -> None:
    """See tools/check layouts."""
    parser = argparse.ArgumentParser(prog="tools/check layouts", description=__doc__)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help="default: all of the model")
    parser.add_argument(
        "--model",
        choices=["adder", *MODELS, *OF_KINDS],
        action="append",
        help="default: adder, which is dense",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--launcher", choices=["mp", "external"], action="append", help="default: both"
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one engine")
    options = parser.parse_args()
    every = OF_EXPERTS | OF_ONE_KEY_HEAD | OF_OPTIONS | OF_PREFILLS
    if unknown := set(options.layouts) - set(every):
        parser.error(f"no layout {', '.join(sorted(unknown))}; there are {'; '.join(every)}")
    columns = [
        "model",
        "dtype",
        "layout",
        "launcher",
        "tokens",
        "not transformers' choice",
        "difference: max",
        "mean",
        "seconds",
        "by",
    ]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    wrong = 0
    with tempfile.TemporaryDirectory() as directory:
        for name in options.model or ["adder"]:
            model = ADDER if name == "adder" else make(name, Path(directory))
            known = {"adder": LAYOUTS, "one-key-head": OF_ONE_KEY_HEAD}.get(
                name, OF_LATENTS if name in LATENT else OF_EXPERTS
            )
            known = known | OF_OPTIONS
            half = options.dtype != "float32"  # all that mc2 takes
            left_out = {"mc2": not half, "mla_prolog": "mla_prolog" not in name}
            selected = [
                layout
                for layout in known
                if not any(left_out[option] for option in left_out if option in layout)
            ]
            chosen = {
                layout: (known | OF_PREFILLS)[layout] for layout in options.layouts or selected
            }
            launchers = options.launcher or ["mp", "external"]
            with progress(f"{name}:", len(launchers) * len(chosen)) as steps:
                for mp in (each == "mp" for each in launchers):
                    # One program forks all ranks of the external launcher.
                    for chosen_option in (
                        [{each: chosen[each]} for each in chosen] if mp else [chosen]
                    ):
                        wrong += _run(
                            model, options.dtype, chosen_option, mp, options.timeout, steps
                        )
    sys.exit(1 if wrong else 0)


def _run(
    model: Path,
    dtype: str,
    engines: dict[str, dict[str, Any]],
    mp: bool,
    timeout: float,
    progress: Progress,
) -> int:
    """Serve in these layouts one after the other, and print a row for each; returns how many are
    wrong."""
    cases = [case(name, model, engine, mp=mp, dtype=dtype) for name, engine in engines.items()]
    command = [sys.executable, str(PROGRAM), json.dumps(cases)]
    try:
        done = npus.run(
            max(map(ranks, engines.values())),
            *command,
            timeout=timeout * len(cases),
            progress=progress,
            OMP_NUM_THREADS="1",
        )
        printed = done.stdout + done.stderr
        # The first error is of a rank, before those of the processes that wait for it.
        cause = re.search(r"\w+Error: .*", printed)
        output, failure = done.stdout, f"failed: {cause[0] if cause else printed[-2000:]}"
    except subprocess.TimeoutExpired as error:
        output, failure = (error.stdout or b"").decode(), "no answer in time"
    by_case, wrong = {each["name"]: each for each in npus.results(output)}, 0
    for name in engines:
        label = f"| {model.name} | {dtype} | {name} | {'mp' if mp else 'external'} |"
        if name not in by_case:
            print(f"{label} {failure} | | | | | |", flush=True)
            wrong += 1
            continue
        count, mismatches, max_diff, mean = compare(model, dtype, by_case[name]["results"])
        by = ", ".join(by_case[name].get("kinds", []))
        print(
            f"{label} {count} | {mismatches} | {max_diff:.1e} | {mean:.1e} | {by_case[name]['seconds']:.0f} |"
            f" {by} |",
            flush=True,
        )
        wrong += (mismatches > 0 and (dtype == "float32" or model == ADDER)) or (
            dtype == "float32" and max_diff > EXACT
        )
    return wrong
