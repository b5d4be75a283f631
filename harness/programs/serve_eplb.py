# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_eplb.py: two data-parallel ranks serve the same prompts in several rounds while
experts are rearranged.

    python harness/programs/serve_eplb.py '[{"name": ..., "model": DIR, "prompts": [[1, 2]],
    "lengths": [3], "rounds": 4, …}]'

The ranks are forks, as in serve_layout.py. Prints a line `RESULT {json}` a case: for each round
each prompt's answers, as serve_layout.py has them, and the map of physical to logical experts of
each layer afterwards.
"""

import json
import os
import sys
import time
from typing import Any

import harness.engines.imports  # noqa: F401
import serve_layout


def serve(case: dict[str, Any]) -> list[dict[str, Any]]:
    engine = serve_layout.engine_of_external_launcher(case)
    (state,) = (
        engine.llm_engine.model_executor.driver_worker.worker.model_runner.eplb_state.model_states.values()
    )
    mine = range(int(os.environ["RANK"]), len(case["prompts"]), 2)
    rounds = []
    for _ in range(case["rounds"]):
        answers = serve_layout.answers(engine, case, mine)
        rounds.append({"answers": answers, "experts": state.physical_to_logical_map.tolist()})
        time.sleep(1)  # For the thread that moves weights, if there is one.
    return rounds


def outcome(case: dict[str, Any]) -> list[dict[str, Any]]:
    answers_of_rounds = []
    for ranks in zip(*serve_layout.play(case, 2, lambda: serve(case)), strict=True):
        results = serve_layout.by_prompt([rank["answers"] for rank in ranks], case)
        answers_of_rounds.append(
            {"results": results, "experts": [rank["experts"] for rank in ranks]}
        )
    return answers_of_rounds


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        print("RESULT", json.dumps({"name": each["name"], "rounds": outcome(each)}), flush=True)
