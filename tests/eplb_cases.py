"""Run by test_eplb.py: two data-parallel ranks serve the same prompts again and again while experts are rearranged.

    python tests/eplb_cases.py '{"model": DIR, "prompts": [[1, 2]], "lengths": [3], "rounds": 4, "engine": {}}'

The ranks are forks, as in layout_cases.py. Prints `RESULT {json}`: for each round each prompt's answers, as layout_cases.py has
them, and which logical expert each physical expert of each layer is afterwards.
"""

import json
import os
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import layout_cases
import torch
from vllm import LLM


def serve(case: dict[str, Any], rank: int, port: int) -> list[dict[str, Any]]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    engine = LLM(case["model"], distributed_executor_backend="external_launcher", **layout_cases.COMMON, **case["engine"])
    (state,) = engine.llm_engine.model_executor.driver_worker.worker.model_runner.eplb_state.model_states.values()
    mine = range(rank, len(case["prompts"]), 2)
    rounds = []
    for _ in range(case["rounds"]):
        served = engine.generate(
            [{"prompt_token_ids": case["prompts"][i]} for i in mine],
            [layout_cases.sampling(case["lengths"][i]) for i in mine],
            use_tqdm=False,
        )
        answers = {i: layout_cases.answer(output.outputs[0]) for i, output in zip(mine, served, strict=True)}
        rounds.append({"answers": answers, "experts": state.physical_to_logical_map.tolist()})
        time.sleep(1)  # for the thread that moves weights, where there is one
    return rounds


def main(case: dict[str, Any]) -> None:
    layout_cases.AsyncEngineArgs(case["model"], **layout_cases.COMMON).create_model_config()  # looked at once, before the forks
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(2):
            if not (child := os.fork()):
                status = 1
                try:
                    Path(directory, str(rank)).write_text(json.dumps(serve(case, rank, port)))
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        failed = [os.waitpid(child, 0)[1] for child in children]
        if any(failed):
            sys.exit(f"the ranks ended with {failed}")
        ranks = [json.loads(Path(directory, str(rank)).read_text()) for rank in range(2)]
    found = []
    for first, second in zip(*ranks, strict=True):
        answers = first["answers"] | second["answers"]
        results = [[answers[str(number)]] for number in range(len(case["prompts"]))]
        found.append({"results": results, "experts": [first["experts"], second["experts"]]})
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
