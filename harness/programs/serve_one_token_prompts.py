# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_states_with_drafts.py: prompts as long as a decode step beside requests that decode, by a
model with states and an MTP layer, in decode graphs.

    python harness/programs/serve_one_token_prompts.py '{"model": DIR, "prompts": [[1]], "lengths":
    [3], "drafts": [0, 2]}'

Prints one line `RESULT {json}` for each number of draft tokens: the graph mode, and the answers to
all prompts at once, twice.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import harness.engines.imports  # noqa: F401
import serve_layout
import torch
from harness.engines import model_classes
from vllm import LLM


def serve(case: dict[str, Any], drafts: int) -> dict[str, Any]:
    speculative = {"method": "mtp", "num_speculative_tokens": drafts}
    engine = LLM(
        case["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        speculative_config=speculative if drafts else None,
    )
    everything = range(len(case["prompts"]))
    return {
        "mode": engine.llm_engine.vllm_config.compilation_config.cudagraph_mode.name,
        "rounds": [list(serve_layout.answers(engine, case, everything).values()) for _ in range(2)],
    }


if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    config = json.loads((Path(case["model"]) / "config.json").read_text())
    model_classes.load(config["architectures"])
    for number in case["drafts"]:
        print("RESULT", json.dumps(serve(case, number)), flush=True)
