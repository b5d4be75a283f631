# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_worker_api.py: call the methods of a worker that are not part of a step.

    python harness/programs/call_worker.py MODEL DIRECTORY

Prints `RESULT {json}`; DIRECTORY gets profiles and a sharded state.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process

import harness.engines.imports  # noqa: F401
import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams, TokensPrompt

SAMPLING = SamplingParams(temperature=0, max_tokens=6, detokenize=False, ignore_eos=True)


def main(model: str, directory: Path) -> None:
    profiles = directory / "profiles"
    engine = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=4,
        gpu_memory_utilization=0.3,
        seed=0,
        disable_log_stats=False,  # which get_metrics wants
        profiler_config={
            "profiler": "torch",
            "torch_profiler_dir": str(profiles),
            "torch_profiler_with_stack": False,
        },
    )

    def tokens() -> list:
        served = engine.generate(
            [TokensPrompt(prompt_token_ids=[3, 4, 5])], SAMPLING, use_tqdm=False
        )
        return [list(one.outputs[0].token_ids) for one in served]

    def ask(method: str, *args: object) -> Any:
        return engine.collective_rpc(method, args=args)[0]

    result: dict[str, Any] = {"tokens": tokens()}
    for session in ("first", "second"):
        engine.start_profile(session)
        tokens()
        engine.stop_profile()
    result["profiles"] = sorted(
        str(path.relative_to(profiles))
        for path in profiles.glob("*/ASCEND_PROFILER_OUTPUT/trace_view.json")
    )
    result["recorded"] = [
        sorted({event["name"] for event in json.loads((profiles / path).read_text())})
        for path in result["profiles"]
    ]
    # The worker's thread reports every five seconds, and once when it starts.
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and "metrics" not in result:
        metrics = [metric for metric in engine.get_metrics() if metric.name.startswith("vllm:npu_")]
        if metrics:
            result["metrics"] = {
                metric.name.removeprefix("vllm:npu_"): [metric.labels, metric.value]
                for metric in metrics
            }
    result["memory"] = torch.npu.mem_get_info(0)
    result["expandable"] = [segment["is_expandable"] for segment in torch.npu.memory_snapshot()]
    result["checksums"] = ask("compute_weight_checksums")
    ask("reset_weights")
    result["checksums reset"] = ask("compute_weight_checksums")
    result["tokens reset"] = tokens()
    ask("reload_weights")
    result["checksums reloaded"], result["tokens reloaded"] = (
        ask("compute_weight_checksums"),
        tokens(),
    )
    (directory / "sharded").mkdir()
    ask("save_sharded_state", str(directory / "sharded"))
    saved = {
        name: part
        for path in (directory / "sharded").glob("*.safetensors")
        for name, part in load_file(path).items()
    }
    held = ask("get_model").state_dict()
    result["saved"] = {name: bool((part == held[name].cpu()).all()) for name, part in saved.items()}
    result["answers"] = [
        ask(method)
        for method in (
            "check_health",
            "synchronize_device",
            "reset_mm_cache",
            "reset_encoder_cache",
        )
    ]
    result["tasks"], result["inspection"] = ask("get_supported_tasks"), ask("get_model_inspection")
    try:
        result["checkpoint"] = ask("checkpoint_prepare")
    except NotImplementedError as error:
        result["checkpoint"] = str(error)
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
