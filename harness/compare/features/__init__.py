# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""LoRA, speculative decoding, sampling and structured output on emulated NPUs, compared with
references.

References: transformers and PEFT in float32 on the CPU, under the engine's own tokens; the
distribution that a token is sampled from, computed from their logits in float64.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.compare.features import adapters, grammars, sampling, serving, speculation
from harness.models import small as small_models
from harness.progress import progress
from harness.references import perturbed
from harness.references.log_probabilities import reference


def main() -> None:
    """See tools/check features."""
    parser = argparse.ArgumentParser(prog="tools/check features", description=__doc__)
    parser.add_argument(
        "what", nargs="*", metavar="PART", help=f"of {', '.join(TABLES)}; default: all"
    )
    parser.add_argument(
        "--ranks", type=int, action="append", help="NPUs, for tensor parallelism; default: 1 and 2"
    )
    parser.add_argument("--method", action="append", help="of speculation; default: all")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["bfloat16", "float16", "float32"],
        help="of speculation",
    )
    parser.add_argument(
        "--engine",
        type=json.loads,
        default={},
        help="of speculation: options of the engine, in JSON",
    )
    parser.add_argument("--answers", type=int, default=2000, help="for each sampling method")
    options = parser.parse_args()
    wrong = False
    with tempfile.TemporaryDirectory() as directory:
        for what in options.what or ["speculation", "lora", "sampling"]:
            for ranks in options.ranks or [1, 2]:
                rows = TABLES[what](Path(directory), ranks, options)
                for row, right in rows:
                    print(
                        f"| {ranks} | {' | '.join(map(str, row))} | {'yes' if right else 'NO'} |",
                        flush=True,
                    )
                    wrong |= not right
    sys.exit(wrong)


def _serve(cases: list[dict[str, Any]], timeout: float = 1500) -> dict[str, Any]:
    with progress("engines:", len(cases)) as steps:
        return serving.serve(cases, timeout, steps)


def _speculation_table(directory: Path, ranks: int, options: Any) -> list[tuple[list[Any], bool]]:
    names, rows = options.method or list(speculation.methods(directory)), []
    if not options.method and importlib.util.find_spec("arctic_inference") is None:
        names.remove("suffix")
        print(
            "suffix is left out: arctic-inference is not installed; docs/speculative-decoding.md"
            " says how",
            flush=True,
        )
    served, dtype = (
        _serve(speculation.speculation(directory, names, ranks, options.dtype, **options.engine)),
        options.dtype,
    )
    for name in names:
        asked = [serving.greedy(prompt) for prompt in serving.prompts()]
        model = reference(speculation.methods(directory)[name][0], None, dtype)
        tokens, mismatches, max_diff = serving.compare(model, asked, served[name]["steps"][0])
        drafts, drafted, num_accepted = speculation.accepted(served[name])
        limit, unexplained = 1e-3, (mismatches, max_diff)
        if dtype != "float32":
            limit, unexplained = (
                0.03,
                perturbed.unexplained(model, asked, served[name]["steps"][0], dtype),
            )
        right = (
            not unexplained[0]
            and unexplained[1] < limit
            and (num_accepted > 0) == ("wrong" not in name)
        )
        right &= num_accepted == drafted or name != "draft model, the same"
        rows.append(
            ([name, tokens, mismatches, f"{max_diff:.1e}", drafts, drafted, num_accepted], right)
        )
    return rows


def _lora_table(directory: Path, ranks: int, options: Any) -> list[tuple[list[Any], bool]]:
    variants: dict[str, dict[str, Any]] = {
        "4 in a batch": {},
        "2 slots for 4": {"slots": 2},
        "bfloat16": {"dtype": "bfloat16"},
    }
    if ranks > 1:
        variants["fully sharded"] = {"fully_sharded_loras": True}
    served = _serve(
        [adapters.lora(name, directory, ranks, **variant) for name, variant in variants.items()]
    )
    rows = []
    for name, variant in variants.items():
        dtype = variant.get("dtype", "float32")
        tokens, mismatches, max_diff = adapters.compare_lora(directory, served[name], dtype)
        right = (
            not mismatches and max_diff < 1e-3 if dtype == "float32" else max_diff < 0.2
        ) and served[name]["steps"][:-2] in (
            adapters.LORA_STATES,
            [],
        )
        rows.append(([name, tokens, mismatches, f"{max_diff:.1e}"], right))
    return rows


def _latent_lora_table(directory: Path, ranks: int, options: Any) -> list[tuple[list[Any], bool]]:
    served = _serve(
        [adapters.lora_on_family("latent attention", directory, "DeepseekV3", ranks, options.dtype)]
    )["latent attention"]
    tokens, mismatches, max_diff = adapters.compare_lora_on_family(
        directory, "DeepseekV3", served["steps"][0], options.dtype
    )
    right = max_diff < (1e-3 if options.dtype == "float32" else 0.2) and "kv_b_proj, which" in str(
        served["steps"][1]
    )
    return [
        (["latent attention", tokens, mismatches, f"{max_diff:.1e}", served["steps"][1]], right)
    ]


def _sampling_table(directory: Path, ranks: int, options: Any) -> list[tuple[list[Any], bool]]:
    model, rows = small_models.target(directory), []
    draft = {
        "method": "draft_model",
        "model": str(small_models.target(directory, seed=9, size=0.3)),
        "num_speculative_tokens": 2,
    }
    grammar: dict[str, Any] = {
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}
    }
    variants: dict[str, dict[str, Any]] = {
        "": {},
        "with a draft model: ": {"speculative_config": draft},
    }
    asked = {
        name: sampling.sampled(options.answers, 5 if variant else 2, bool(variant))
        for name, variant in variants.items()
    }
    steps = {
        name: [["generate", requests], ["generate", grammars.structured()]]
        for name, requests in asked.items()
    }
    served = _serve(
        [
            serving.case(name, model, ranks, steps[name], **grammar, **variant)
            for name, variant in variants.items()
        ],
        timeout=3000,
    )
    for prefix in variants:
        answers, with_grammar = served[prefix]["steps"]
        for name, (tokens, impossible, first, spread) in sampling.check_sampling(
            reference(model), asked[prefix], answers
        ).items():
            cells = [prefix + name, tokens, impossible, f"{first:.3f}", f"{spread:.3f}"]
            rows.append((cells, not impossible and min(first, spread) > sampling.FALSE_ALARM))
        given, matching = grammars.count_matches(with_grammar)
        rows.append(([prefix + "grammars", given, given - matching, "", ""], given == matching))
    return rows


TABLES = {
    "speculation": _speculation_table,
    "lora": _lora_table,
    "latent": _latent_lora_table,
    "sampling": _sampling_table,
}
