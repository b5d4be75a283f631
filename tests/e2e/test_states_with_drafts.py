# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Models with states and draft tokens: a prompt of one token beside requests that decode."""

import sys
from pathlib import Path

from harness import checkout, npus
from harness.models import hybrid


def test_one_token_prompts_begin_without_stale_states(tmp_path: Path) -> None:
    """vLLM's scheduler gives such a prompt draft slots, and the layers treat it as a decode."""
    model = hybrid.make("Qwen3-Next", tmp_path, drafts=True)
    done = npus.run(
        1, sys.executable, str(checkout.PROGRAMS / "serve_one_token_prompts.py"), str(model)
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (result,) = npus.results(done.stdout)
    assert result["together"] == [result["alone"]] * 2
    assert len({tuple(tokens) for tokens in result["alone"]}) == len(result["alone"])
