# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_local_argmax.py: the best tokens of logits on several ranks, each with an NPU.

    python argmax_ranks.py RANKS VOCABULARY ROWS

Prints one line `RESULT {json}` with each rank's tokens, and, with a trace, the modelled
microseconds of both ways, with the bytes that each rank sends and the launches. The ranks are forks.
"""

import json
import os
import sys
from functools import partial
from typing import Any

import torch
from harness.engines import launcher
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.plugins import load_general_plugins

HIDDEN, LAUNCHES = 16, ("operator", "collective")


def weights(vocabulary: int) -> torch.Tensor:
    """Rows of which each is there twice, in parts of other ranks, and whose logits are negative, less
    than those of padding."""
    draw = torch.Generator().manual_seed(0)
    half = -1 - torch.rand(-(-vocabulary // 2), HIDDEN, generator=draw)
    return torch.cat((half, half))[:vocabulary]


def hidden(rows: int) -> torch.Tensor:
    return torch.rand(rows, HIDDEN, generator=torch.Generator().manual_seed(1)) + 0.1


def play(ranks: int, vocabulary: int, rows: int, rank: int, port: int) -> dict[str, Any]:
    os.environ.update(launcher.torchrun_variables(rank, ranks, port))
    torch.set_num_threads(1)
    torch.npu.set_device(rank)
    load_general_plugins()
    config = VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=ranks))
    with set_current_vllm_config(config), torch.inference_mode():
        parallel_state.init_distributed_environment(ranks, rank, "env://", rank, "hccl")
        parallel_state.initialize_model_parallel(ranks, backend="hccl")
        with torch.device("npu"):
            head = ParallelLMHead(vocabulary, HIDDEN, params_dtype=torch.bfloat16)
        parameter: Any = head.weight
        parameter.weight_loader(parameter, weights(vocabulary).bfloat16())
        return both(LogitsProcessor(vocabulary), head, hidden(rows).bfloat16().npu())


def both(processor: LogitsProcessor, head: ParallelLMHead, rows: torch.Tensor) -> dict[str, Any]:
    """Tokens from all logits, and from each rank's part."""
    from ascend_platform.sampling.local_argmax import LocalArgmax

    results = LocalArgmax([processor])

    def run(is_local: bool) -> torch.Tensor:
        with results.step(lambda: is_local):
            return results.argmax(processor(head, rows).float())

    result: dict[str, Any] = {}
    for name, is_local in (("all", False), ("local", True)):
        result[name] = run(is_local).tolist()  # HCCL creates its communicator in the first.
        if "ASCEND_EMULATOR_TRACE" in os.environ:
            result[f"{name} modelled"] = modelled(partial(run, is_local))
    return result


def modelled(run: Any) -> list[Any]:
    from harness.engines import trace

    before = len(trace.events())
    run().cpu()
    step = [each["args"] for each in trace.events()[before:] if each["cat"] in LAUNCHES]
    sent = sum(each.get("link", 0) for each in step)
    return [round(sum(each["modelled_us"] for each in step), 1), sent, len(step)]


if __name__ == "__main__":
    ranks, *sizes = map(int, sys.argv[1:])
    results = launcher.run_ranks("argmax_ranks.py", ranks, partial(play, ranks, *sizes))
    print("RESULT", json.dumps({"name": "argmax", "ranks": results}))
