"""What one step of small models launches and moves, on one rank: run by tools/launches on emulated NPUs, with a trace.

    python launch_count.py '[{"name": ..., "config": {...}, "ranks": 1, "engine": {...}, "requests": 16, "prompt": 63}]'

Each case runs twice, with one more layer the second time: the difference is a layer's. Prints a line `RESULT {json}` a case.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import forks
import torch
from ascend_emulator import tracing
from transformers import AutoConfig
from vllm import LLM, SamplingParams
from vllm.v1.worker import gpu_worker  # noqa: F401  (before the forks, each of which would import it again)

TRACE = Path(os.environ["ASCEND_EMULATOR_TRACE"])
COMMON = {"skip_tokenizer_init": True, "load_format": "dummy", "dtype": "bfloat16", "seed": 0, "max_model_len": 1024}
COMMON |= {"gpu_memory_utilization": 0.3, "max_num_seqs": 32, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
COMMON |= {"disable_log_stats": True, "async_scheduling": False, "distributed_executor_backend": "external_launcher"}
COMMON |= {"enforce_eager": True}  # which counts what a graph would hold
HOST_COPIES = {"aclrtMemcpy", "aclrtMemcpyBatch"}


def events() -> list[dict]:
    torch.npu.synchronize()
    tracing.flush()
    return [event for event in tracing.events(TRACE) if event["pid"] == os.getpid()]


def summary(step: list[dict]) -> dict[str, Any]:
    """Of one step: launches by name, the bytes that they move in memory and between NPUs, and how often the host waited."""
    launched = [
        event for event in step if event["cat"] in ("operator", "copy", "collective") and event["name"] not in HOST_COPIES
    ]
    launched.sort(key=lambda event: event["ts"])
    first = next(event["ts"] for event in launched if event["cat"] == "operator")
    last = launched[-1]["ts"]  # the sampled tokens' way to the host
    waits = [event["ts"] + event["dur"] for event in step if event["cat"] == "synchronize" or event["name"] in HOST_COPIES]
    sent = [event["args"].get("link", 0) for event in launched if event["cat"] == "collective"]
    moved = [event["args"]["bytes"] for event in launched if event["cat"] == "operator"]
    names = Counter(event["name"] for event in launched)
    return {"names": names, "bytes": sum(moved), "sent": sum(sent), "waits": sum(first < end < last for end in waits)}


def steps(case: dict[str, Any], directory: Path) -> dict[str, Any]:
    config = AutoConfig.for_model(**case["config"] | {"num_hidden_layers": case["layers"]})
    config.save_pretrained(directory)
    engine = LLM(str(directory), **COMMON, **case["engine"]).llm_engine
    torch.manual_seed(0)
    for request in range(case["requests"]):
        prompt = torch.randint(3, config.vocab_size, (case["prompt"],)).tolist()
        sampling = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)
        engine.add_request(str(request), {"prompt_token_ids": prompt}, sampling)
    found, before = {}, len(events())
    for name in ("prefill", "first decode", "decode"):
        engine.step()
        found[name], before = events()[before:], len(events())
    return {name: summary(found[name]) for name in ("prefill", "decode")}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """The summaries of rank 0 with `case["layers"]` layers."""

    def one(rank: int, port: int) -> dict[str, Any]:
        os.environ.update(forks.as_torchrun_sets(rank, case["ranks"], port))
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as directory:
            return steps(case, Path(directory))

    return forks.play(case["name"], case["ranks"], one)[0]


if __name__ == "__main__":
    for each in json.loads(sys.argv[1]):
        fewer, more = (run(each | {"layers": layers}) for layers in (2, 3))
        print("RESULT", json.dumps({"name": each["name"], "fewer": fewer, "more": more}), flush=True)
