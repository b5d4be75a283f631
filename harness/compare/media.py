# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Three published vision-language families in each way that they are served, against
transformers: `tools/check media`.

All with TP2, decode steps in graphs and steps of 64 tokens, which an image does not fit in:
prompts twice, the second time from the prefix cache; with drafts; and 32 requests at a time, with
and without images.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from harness.compare import model_types
from harness.engines import npus
from harness.references import multimodal

KINDS = "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5"
BOUNDS = {"float32": ("most", 1e-3), "bfloat16": ("mean", 0.03)}
"""The difference that is bounded, and its bound."""
BATCH = 32
WAYS: dict[str, dict[str, Any]] = {
    "chunks, prefix cache": {},
    "MTP": {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
        "enable_prefix_caching": False,
    },
    f"{BATCH} requests": {"max_num_seqs": BATCH, "max_num_batched_tokens": 256},
}


def cases(directory: Path, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """Arguments of serve_model_types.py by name; only Qwen3.5 has an MTP module."""
    selected = {}
    for kind in kinds:
        for dtype in BOUNDS:
            for way, engine in WAYS.items():
                if way == "MTP" and kind != "qwen3_5":
                    continue
                name, model = f"{kind} | {dtype} | {way}", directory / f"{kind}-{way == 'MTP'}"
                case = multimodal.case(name, kind, model, 2, dtype, engine)
                if engine.get("max_num_seqs") == BATCH:
                    for key in ("prompts", "lengths"):
                        case[key] = case[key] * (BATCH // len(multimodal.LENGTHS))
                selected[name] = case
    return selected


def main() -> None:
    """See tools/check media."""
    parser = argparse.ArgumentParser(prog="tools/check media", description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], default=[])
    kinds = parser.parse_args().kinds or list(KINDS)
    wrong = 0
    print("| model | dtype | way | tokens | largest difference | mean | other tokens |", flush=True)
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as directory:
        for name, case in cases(Path(directory), kinds).items():
            (result,) = npus.by_name(model_types.run([case])).values()
            logits = multimodal.reference(case["media"], Path(case["model"]), case["dtype"])
            comparison = multimodal.compare(logits, result["results"])
            what, bound = BOUNDS[case["dtype"]]
            assert not result["differs"], f"{name}: {result['differs']}"
            wrong += comparison[what] >= bound
            tokens = sum(len(answer["tokens"]) for answer in result["results"])
            print(
                f"| {name} | {tokens} | {comparison['most']:.1e} | {comparison['mean']:.1e} |"
                f" {comparison['others']} |",
                flush=True,
            )
    if wrong:
        raise SystemExit(f"media: {wrong} rows exceed their bounds")
