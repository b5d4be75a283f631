"""Parallel layouts on several NPUs: each gives the tokens that Hugging Face transformers gives on the CPU.

Here are those that cover the others, under vLLM's external launcher. `tools/layouts` runs all of them, also under the
multiprocessing executor, as `vllm serve` does.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import layout_check as layouts
import npus
import pytest

HERE = Path(__file__).parent
DENSE = ("TP2", "PP2")


def serve(count: int, cases: list[dict[str, Any]], **variables: str) -> subprocess.CompletedProcess[str]:
    return npus.run(
        count, sys.executable, str(HERE / "layout_cases.py"), json.dumps(cases), VLLM_PLUGINS="", OMP_NUM_THREADS="1", **variables
    )


@pytest.fixture(scope="module")
def dense() -> dict[str, Any]:
    done = serve(2, [layouts.case(name, layouts.ADDER, layouts.LAYOUTS[name]) for name in DENSE])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return layouts.results(done.stdout)


@pytest.mark.parametrize("name", DENSE)
def test_dense_model_gives_the_same_greedy_tokens(dense: dict[str, Any], name: str) -> None:
    assert dense[name]["kinds"] == ["FusedAttentionImpl"]
    count, others, most, mean = layouts.compare(layouts.ADDER, "bfloat16", dense[name]["results"])
    assert (count, others) == (33, 0)
    assert most < 0.2
    assert mean < 0.01
