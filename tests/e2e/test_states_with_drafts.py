# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models with states: prompts as long as a decode step, beside requests that decode in graphs."""

import json
import sys
from pathlib import Path

import torch
from harness import checkout
from harness.compare import layouts
from harness.engines import npus
from harness.models import hybrid

DRAFTS = 2
SIZES = [20, 1, 3, 1, 1, 3, 20, 1, 1, 3, 1, 3, 1, 1, 3, 1]
"""3 is a step of a request with two draft tokens."""
PROMPTS = [[3 + 5 * i + 7 * j for j in range(size)] for i, size in enumerate(SIZES)]
LENGTHS = [4 + 3 * (i % 5) for i in range(len(SIZES))]
"""They differ, so some requests decode while others begin."""
BOUND = 1
"""Of a log-probability. In bfloat16 a right one is off by 0.3 at most; with another request's
states, by 3 to 6."""


def test_one_token_prompts_begin_without_stale_states(tmp_path: Path) -> None:
    """vLLM takes them for decodes by their size. With draft tokens its scheduler also gives a
    prompt of one token draft slots, and the layers treat it as a decode."""
    model = hybrid.make("Qwen3.5", tmp_path, drafts=True)
    case = {"model": str(model), "prompts": PROMPTS, "lengths": LENGTHS, "drafts": [0, DRAFTS]}
    program = str(checkout.PROGRAMS / "serve_one_token_prompts.py")
    done = npus.run(1, sys.executable, program, json.dumps(case))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    exact, differences = layouts.reference(model, "bfloat16"), {}
    for drafts, served in zip(case["drafts"], npus.results(done.stdout), strict=True):
        assert served["mode"] == "FULL_DECODE_ONLY"
        for turn, answers in enumerate(served["rounds"]):
            for i, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
                tokens = torch.tensor(answer["tokens"])
                assert len(tokens) == LENGTHS[i]
                with torch.no_grad():
                    scores = exact(torch.tensor([prompt + answer["tokens"]])).logits[0]
                expected = scores[len(prompt) - 1 : -1].log_softmax(-1)
                error = torch.tensor(answer["logprobs"]) - expected.gather(1, tokens[:, None])[:, 0]
                differences[drafts, turn, i] = float(error.abs().max())
    print(f"at most {max(differences.values())}")
    assert {key: error for key, error in differences.items() if error > BOUND} == {}
