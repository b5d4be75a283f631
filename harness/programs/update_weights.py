# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_weight_transfer.py: a trainer on one NPU sends weights to an engine on others.

    python harness/programs/update_weights.py CASE

CASE is as in serve_layout.py, and has `packed`. The engine begins with random weights, then has the
model's, then negated ones, then the model's again. Prints `RESULT {json}`: each prompt's answers at
each of these times.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import harness.engines.imports  # noqa: F401
import serve_layout
import torch
from harness.engines import launcher
from vllm import LLM

TRAINER, WORKERS = 0, 1


class Client:
    """The client that vLLM's trainers call (``VLLMWeightSyncClient``), executed by the process at
    the other end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Any:
            self.pipe.send((method, args))
            if not self.pipe.poll(120):
                raise TimeoutError(f"{method} was not answered within 120 s")
            return self.pipe.recv()

        return call


def serve(case: dict[str, Any], pipe: Connection) -> None:
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = ",".join(
        str(WORKERS + i) for i in range(case["engine"].get("tensor_parallel_size", 1))
    )
    options = (
        serve_layout.COMMON
        | case["engine"]
        | {"load_format": "dummy", "weight_transfer_config": {"backend": "hccl"}}
    )
    engine = LLM(case["model"], **options)

    def finish() -> None:
        engine.finish_weight_update()
        engine.reset_prefix_cache()

    calls: dict[str, Callable[..., Any]] = {
        "init_weight_transfer_engine": lambda info: engine.init_weight_transfer_engine(
            {"init_info": info}
        ),
        "start_weight_update": engine.start_weight_update,
        "update_weights": lambda info: engine.update_weights({"update_info": info}),
        "finish_weight_update": finish,
        "answers": lambda: [
            [each]
            for each in serve_layout.answers(engine, case, range(len(case["prompts"]))).values()
        ],
    }
    while (asked := pipe.recv()) is not None:
        method, args = asked
        pipe.send(calls[method](*args))


def train(case: dict[str, Any], pipe: Connection, port: int) -> list[Any]:
    from ascend_communicator.weight_transfer import (
        HCCLTrainerInitInfo,
        HCCLTrainerWeightTransferEngine,
    )
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer.base import ModuleSource

    torch.npu.set_device(TRAINER)
    loaded: Any = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.bfloat16)
    model = loaded.npu()
    client, world_size = Client(pipe), 1 + case["engine"].get("tensor_parallel_size", 1)
    collected = [client.answers()]
    where: dict[str, Any] = {
        "master_address": "127.0.0.1",
        "master_port": port,
        "world_size": world_size,
    }
    given = HCCLTrainerInitInfo(
        rank=0, packed=case["packed"], packed_buffer_size_bytes=100_000, **where
    )
    trainer = HCCLTrainerWeightTransferEngine.trainer_init(
        given, client=client, source=ModuleSource(model)
    )
    for factor in (1, -1, -1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        trainer.send_weights()
        collected.append(client.answers())
    pipe.send(None)
    trainer.shutdown()
    return collected


def main(case: dict[str, Any]) -> None:
    # looked at once, before the forks
    serve_layout.AsyncEngineArgs(case["model"], **serve_layout.COMMON).create_model_config()
    ends = multiprocessing.Pipe()
    if "tensor_parallel_size" not in case["engine"]:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    torch.set_num_threads(1)
    served, _ = launcher.run_ranks(
        case["name"],
        2,
        lambda rank, port: serve(case, ends[1]) if rank else train(case, ends[0], port),
    )
    print("RESULT", json.dumps(served), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
