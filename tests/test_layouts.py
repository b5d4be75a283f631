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


# name: (model, dtype, layout, what it is served by). float32 tells any error of routing; MC2 takes half types alone.
EXPERTS = {
    "shared experts, groups, TP2": ("glm4-moe", "float32", "TP2", "NPUFusedMoEMethod"),
    "DP2 EP2 by alltoall": ("qwen3-moe", "float32", "DP2 EP2 alltoall", "alltoall"),
    "DP2 EP2 by mc2": ("mixtral", "bfloat16", "DP2 EP2", "mc2"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def experts(models: Path) -> dict[str, Any]:
    cases = [
        layouts.case(name, layouts.make(model, models), layouts.OF_EXPERTS[layout], dtype=dtype)
        for name, (model, dtype, layout, _) in EXPERTS.items()
    ]
    done = serve(2, cases)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return layouts.results(done.stdout)


@pytest.mark.parametrize("name", EXPERTS)
def test_mixture_of_experts_has_the_same_log_probabilities(experts: dict[str, Any], models: Path, name: str) -> None:
    model, dtype, _, served_by = EXPERTS[name]
    assert served_by in experts[name]["kinds"]
    count, others, most, mean = layouts.compare(models / model, dtype, experts[name]["results"])
    assert count == 33
    if dtype == "float32":
        assert others == 0
        assert most < 1e-4
    else:  # rounding can turn a near tie, of tokens or of experts
        assert others <= 3
        assert mean < 0.1
