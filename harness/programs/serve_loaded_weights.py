# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by `tools/check loading`: one engine loads its checkpoint and serves its weights, and another
loads from it.

    python harness/programs/serve_loaded_weights.py CASE RANKS

CASE is as in harness/programs/serve_layout.py. Prints `RESULT {json}` for each engine: its answers to
each prompt.
"""

import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from harness.engines.ports import free_port


def engine(case: dict[str, Any], devices: range, extra: dict[str, Any], pipe: Connection) -> None:
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    os.environ["VLLM_ASCEND_WEIGHTS_SECRET"] = "a secret of two engines"
    import serve_layout
    from vllm import LLM

    options = (
        serve_layout.COMMON
        | case["engine"]
        | {"load_format": "ascend_peer", "model_loader_extra_config": extra}
    )
    llm = LLM(case["model"], **options)
    pipe.send(
        [[each] for each in serve_layout.answers(llm, case, range(len(case["prompts"]))).values()]
    )
    pipe.recv()
    # Otherwise Python waits for the engine's process at exit.
    llm.llm_engine.engine_core.shutdown()


def main(case: dict[str, Any], ranks: int) -> None:
    port = free_port()
    serving, taking = (
        {"serve_weights": True, "port": port},
        {"peers": [f"127.0.0.1:{port}"], "strategies": ["peer"]},
    )
    pipes = []
    for number, extra in enumerate((serving, taking)):
        ours, theirs = multiprocessing.Pipe()
        devices = range(number * ranks, (number + 1) * ranks)
        multiprocessing.get_context("spawn").Process(
            target=engine, args=[case, devices, extra, theirs]
        ).start()
        pipes.append(ours)
        theirs.close()
        if not ours.poll(400):
            raise TimeoutError("an engine has not answered within 400 s")
        print("RESULT", json.dumps(ours.recv()), flush=True)
    for pipe in pipes:
        pipe.send(None)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
