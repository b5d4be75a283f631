# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_states_with_drafts.py: prompts of one token, separately and in one batch, by a model
with states and an MTP layer.

    python harness/programs/serve_one_token_prompts.py MODEL

Prints `RESULT {json}`: the tokens of each prompt served separately, and of each when all were
served at once, twice.
"""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import harness.engine_imports  # noqa: F401
from harness import model_classes
from vllm import LLM, SamplingParams, TokensPrompt

PROMPTS = [[3 + 5 * i + 7 * j for j in range(1 if i % 4 else 20)] for i in range(12)]
SAMPLING = [  # Prompts differ in size, so some requests decode while others begin.
    SamplingParams(temperature=0, max_tokens=4 + 3 * (i % 5), detokenize=False, ignore_eos=True)
    for i in range(12)
]


def main(model: str) -> None:
    model_classes.load(json.loads((Path(model) / "config.json").read_text())["architectures"])
    engine = LLM(
        model,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        enforce_eager=True,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
    )

    def tokens(chosen: slice) -> list[list[int]]:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS[chosen]]
        return [
            list(one.outputs[0].token_ids)
            for one in engine.generate(prompts, SAMPLING[chosen], use_tqdm=False)
        ]

    alone = [tokens(slice(i, i + 1))[0] for i in range(len(PROMPTS))]
    print(
        "RESULT "
        + json.dumps({"alone": alone, "together": [tokens(slice(None)) for _ in range(2)]}),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1])
