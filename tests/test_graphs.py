"""Graphs: tokens as transformers has them, one launch for a decode step, fewer sizes where there are no streams for all."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import npus
import pytest

PROGRAM = Path(__file__).parent / "graph_cases.py"
DRAW = random.Random(1)
PROMPTS = [[DRAW.randrange(3, 512) for _ in range(length)] for length in (5, 120, 127, 1, 250, 33, 600, 64, 17, 126, 2)]
LENGTHS = [20, 20, 12, 40, 5, 30, 9, 70, 3, 10, 25]  # of the answers: some cross the end of a block of 128 tokens


def serve(trace: Path | None = None, **case: Any) -> dict[str, Any]:
    asked = {"prompts": PROMPTS, "lengths": LENGTHS} | case
    variables = {"VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1", "ASCEND_EMULATOR_TRACE": str(trace or "")}
    done = npus.run(case["ranks"], sys.executable, str(PROGRAM), json.dumps(asked), memory="2GiB", **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (result,) = npus.results(done.stdout)
    return result | {"log": done.stdout + done.stderr}


def check(result: dict[str, Any]) -> None:
    """As close to float32 as transformers is in the engine's dtype, and each choice the best up to that."""
    errors = [error for request in result["requests"] for error in request["errors"]]
    own = [error for request in result["requests"] for error in request["own_errors"]]
    assert sum(errors) / len(errors) < 1.5 * sum(own) / len(own)
    assert max(errors) < 3 * max(own)
    assert max(regret for request in result["requests"] for regret in request["regrets"]) < 2 * max(errors)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return serve(tmp_path_factory.mktemp("trace") / "trace.json", mode="FULL_AND_PIECEWISE", ranks=2)


def test_tokens_with_tensor_parallelism(two: dict[str, Any]) -> None:
    """Collectives are in the graphs; prefills run piecewise, decodes as one graph, both padded to the sizes captured."""
    assert two["mode"] == "FULL_AND_PIECEWISE"
    assert two["captured"] == {"PIECEWISE": [1, 2, 4, 8, 16, 24, 32], "FULL": [1, 2, 4, 8, 16]}
    check(two)


def test_a_decode_step_is_one_launch(two: dict[str, Any]) -> None:
    prefill, *decodes, finished = two["launched"]
    assert prefill == 4  # three layers' attentions have four pieces around them
    assert decodes == [1] * 5
    assert finished == 0


def test_the_kv_cache_leaves_memory_for_graphs(two: dict[str, Any]) -> None:
    """At least a MiB for each graph but the first of its mode, which vLLM takes for the least."""
    assert two["left"] >= 10 << 20


def test_graphs_fit_into_the_streams_there_are() -> None:
    """Prefills and decodes in full graphs, with streams for fewer sizes than are asked for."""
    result = serve(mode="FULL", ranks=1, streams=40)
    assert result["captured"] == {"PIECEWISE": [], "FULL": [1, 8, 32]}
    assert "graphs of 3 of 7 sizes are captured (1, 8, 32 tokens): " in result["log"]
    check(result)
