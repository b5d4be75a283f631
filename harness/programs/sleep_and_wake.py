# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_sleep.py: put an engine to sleep and wake it, at each level, and measure the memory
it frees.

    python harness/programs/sleep_and_wake.py MODEL OTHER_WEIGHTS CYCLES ENGINE

OTHER_WEIGHTS is a model of the same shapes, whose weights are given to the engine after level 2, as
frameworks of reinforcement learning do. ENGINE has further options of the engine as JSON. Prints
`RESULT {json}`; bytes are the device's own account (`mem_get_info`), not the allocator's.
"""

import faulthandler
import json
import os
import sys
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
# A function for the workers of tensor parallelism.
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

import harness.engines.imports  # noqa: F401
import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.compilation.cuda_graph import CUDAGraphWrapper

PROMPTS = [
    TokensPrompt(prompt_token_ids=[3 + (7 * i + j) % 500 for j in range(5 + 20 * i)])
    for i in range(4)
]


def measure(worker: Any) -> dict:
    """Bytes used on the worker's NPU, and those of the segments of weights and KV cache; their
    addresses, and the graphs."""
    torch.npu.synchronize()
    free, total = torch.npu.mem_get_info()
    runner = worker.model_runner
    tensors = [
        *runner.get_model().parameters(),
        *(part for cache in runner.kv_caches for part in cache),
    ]
    entries = [
        entry
        for each in CUDAGraphWrapper._all_instances
        for entry in each.concrete_cudagraph_entries.values()
    ]
    segments = worker.sleep_mode_backend._memory._segments.values()
    bytes_of = {
        tag: sum(each.size for each in segments if each.tag == tag and each.handle)
        for tag in ("weights", "kv_cache")
    }
    of_v2 = getattr(getattr(runner, "cudagraph_manager", None), "graphs", {})  # its full graphs
    graphs = sorted(map(id, [*(entry.cudagraph for entry in entries), *of_v2.values()]))
    return {
        "used": total - free,
        "addresses": [tensor.data_ptr() for tensor in tensors],
        "graphs": graphs,
    } | bytes_of


def load(worker: Any, directory: str) -> None:
    """Give a checkpoint's weights to the model."""
    worker.model_runner.get_model().load_weights(
        load_file(f"{directory}/model.safetensors").items()
    )


def main(directory: str, other: str, cycles: int, options: dict[str, Any]) -> None:
    engine = LLM(
        directory,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=512,
        compilation_config={"cudagraph_capture_sizes": [1, 4]},
        enable_sleep_mode=True,
        seed=0,
        **{"gpu_memory_utilization": 0.2} | options,
    )
    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)

    def tokens() -> list:
        return [
            list(one.outputs[0].token_ids)
            for one in engine.generate(PROMPTS, sampling, use_tqdm=False)
        ]

    def account() -> dict:
        return engine.collective_rpc(measure)[-1]

    result = {"tokens": tokens(), "awake": account()}
    engine.sleep(level=1)
    result["asleep"] = account()
    engine.wake_up(tags=["weights"])
    result["weights awake"] = account()
    engine.wake_up(tags=["kv_cache"])
    result["tokens after level 1"], result["awake again"] = tokens(), account()
    engine.sleep(level=2)
    result["asleep at level 2"] = account()
    engine.wake_up(tags=["weights"])
    engine.collective_rpc("reload_weights")
    engine.wake_up(tags=["kv_cache"])
    result["tokens after level 2"] = tokens()
    for name, path in (("other weights", other), ("first weights again", directory)):
        engine.sleep(level=2)
        engine.wake_up(tags=["weights"])
        engine.collective_rpc(load, args=(path,))
        engine.wake_up(tags=["kv_cache"])
        result[f"tokens of {name}"] = tokens()
    result["prompts"] = [each["prompt_token_ids"] for each in PROMPTS]
    for _ in range(cycles):
        engine.sleep(level=1)
        engine.wake_up()
    result["tokens after cycles"], result["after cycles"] = tokens(), account()
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    # Prints where it hangs; the test waits 600 s.
    faulthandler.dump_traceback_later(590, exit=True)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
