# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Two engines under load: `tools/bench kv`. A prefill and a decode instance on emulated NPUs, both with requests all the time.

    tools/bench kv                                  all ways: 32 requests each, 8 at a time, prompts of 500 to 4,000 tokens
    tools/bench kv --ways direct --requests 8       a quick look
    tools/bench kv --ways direct staged --dtype float32 --check --prefill '{"data_parallel_size": 2, "tensor_parallel_size": 2}'
                                                    another layout of an instance; tokens are compared with the decode instance's

The model is narrow (28 layers of width 128, bfloat16, 7 KiB of KV cache a token), its weights are random. Each request goes to
the prefill instance first, and with its `kv_transfer_params` to the decode instance, which generates 32 tokens:

direct, staged      over HCCL, which reads the KV cache itself, and with `"expose_cache": false`
tcp                 over Mooncake's tcp, which cannot access NPU memory: staged on both sides
recomputed          the decode instance does not get the parameters, and computes the prompt again
without             the decode instance only

Both engines step all the time, so that transfers meet the load that they cause. Times are this machine's, on which two engines,
their emulated NPUs and the transfers share the cores: compare rows, not with hardware. With 2 cores a row takes about 5 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 28,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
HCCL = {"transport": "hccl"}
PAIRS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "direct": (HCCL, ("direct",)),
    "staged": (HCCL | {"expose_cache": False}, ("staged",)),
    "tcp": ({"transport": "mooncake"}, ("tcp", "recomputed", "without")),
}
"""By name of a pair of instances: its options, and the ways that are measured with it."""

WAYS = tuple(way for _, ways in PAIRS.values() for way in ways)
OPTIONS: dict[str, Any] = {
    "host": "127.0.0.1",
    "insecure": True,
    "transfer_timeout": 600,
    "answer_timeout": 60,
    "lease": 60,
}
SHORTEST, LONGEST, OUTPUT = 500, 4000, 32
COUNTERS = (
    "transfer_bytes",
    "sent_bytes",
    "packed_bytes",
    "unpacked_bytes",
    "messages",
    "transfer_failures",
)


def instance(
    pipe: Connection, devices: str, role: str, options: dict[str, Any], engine: dict[str, Any]
) -> None:
    """Serve requests from the pipe as they come, "counters" and "stop"."""
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = devices
    asyncio.run(serve(pipe, role, options, engine))


async def serve(
    pipe: Connection, role: str, options: dict[str, Any], given: dict[str, Any]
) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.reader import get_metrics_snapshot

    extra_config = OPTIONS | options
    transfer: Any = {
        "kv_connector": "AscendP2PConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra_config,
    }
    arguments = AsyncEngineArgs(
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=LONGEST + OUTPUT + 1,
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.5,
        kv_transfer_config=transfer,
        disable_log_stats=False,
        **given,
    )
    engine = AsyncLLM.from_engine_args(arguments)
    sending = threading.Lock()

    def send(message: Any) -> None:
        with sending:
            pipe.send(message)

    async def run(name: str, prompt: list[int], length: int, params: dict[str, Any] | None) -> None:
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(
            temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, extra_args=extra
        )
        steps = [
            (time.monotonic(), each)
            async for each in engine.generate({"prompt_token_ids": prompt}, sampling, name)
        ]
        last, result = steps[-1]
        completion = result.outputs[0]
        send(
            (
                name,
                completion.finish_reason,
                steps[0][0],
                last,
                list(completion.token_ids),
                result.kv_transfer_params,
            )
        )

    send("ready")
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    while (asked := await loop.run_in_executor(None, pipe.recv)) != "stop":
        if asked == "counters":
            await asyncio.sleep(2.5)  # until they have been reported
            found: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
            for metric in get_metrics_snapshot():
                name = metric.name.removeprefix("vllm:ascend_kv_").removesuffix("_total")
                if name in found:
                    found[name] += getattr(metric, "value", 0.0)
            send(found)
        elif asked == "reset":  # Prompts of the previous case, once their leases have ended.
            until = time.monotonic() + 3 * OPTIONS["lease"]
            while not await engine.reset_prefix_cache() and time.monotonic() < until:
                await asyncio.sleep(0.5)
            send("reset")
        else:
            task = asyncio.create_task(run(*asked))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    engine.shutdown()


def npus(engine: dict[str, Any]) -> int:
    """Number of NPUs of an instance."""
    return math.prod(
        engine.get(f"{kind}_parallel_size", 1) for kind in ("data", "tensor", "pipeline")
    )


class Pair:
    """A prefill and a decode instance; replies are passed to the waiting request."""

    def __init__(
        self, options: dict[str, Any], prefill: dict[str, Any], decode: dict[str, Any]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        sides = (
            (prefill, "kv_producer", range(npus(prefill))),
            (decode, "kv_consumer", range(npus(decode))),
        )
        for engine, role, devices in sides:
            first = npus(prefill) if role == "kv_consumer" else 0
            names = ",".join(str(first + device) for device in devices)
            ours, theirs = context.Pipe()
            self.processes.append(
                context.Process(target=instance, args=(theirs, names, role, options, engine))
            )
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)
        for pipe in self.pipes:
            if not pipe.poll(900) or pipe.recv() != "ready":
                raise RuntimeError("an instance did not start in 15 minutes")

    def reset(self) -> None:
        """Forget all prompts, so that the next way has to compute or load them."""
        for pipe in self.pipes:
            pipe.send("reset")
        for pipe in self.pipes:
            pipe.recv()

    def counters(self) -> list[dict[str, float]]:
        for pipe in self.pipes:
            pipe.send("counters")
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send("stop")
        for process in self.processes:
            process.join(60)
            process.kill()


def measure(pair: Pair, way: str, requests: int, inflight: int, seed: int) -> dict[str, Any]:
    """Keep ``inflight`` requests under way until all have ended; times and counters."""
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(3, 1024) for _ in range(draw.randint(SHORTEST, LONGEST))]
        for _ in range(requests)
    ]
    pair.reset()
    before, waiting = pair.counters(), list(enumerate(prompts))
    arrived: dict[str, float] = {}
    at_decode: dict[str, float] = {}
    ended: list[dict[str, float]] = []
    answers: dict[str, list[int]] = {}
    began = time.monotonic()

    def decode(name: str, number: int, params: dict[str, Any] | None) -> None:
        at_decode[name] = time.monotonic()
        pair.pipes[1].send((name, prompts[number], OUTPUT, params))

    while len(ended) < requests:
        while waiting and len(arrived) - len(ended) < inflight:
            number, prompt = waiting.pop(0)
            name = f"{way}-{number}"
            arrived[name] = time.monotonic()
            if way == "without":
                decode(name, number, None)
            else:
                pair.pipes[0].send((name, prompt, 1, {"do_remote_decode": True}))
        ready: list[Any] = multiprocessing.connection.wait(pair.pipes, 900)
        for pipe in ready:
            name, reason, first, last, tokens, params = pipe.recv()
            if pipe is pair.pipes[0]:
                decode(name, int(name.rpartition("-")[2]), None if way == "recomputed" else params)
            else:
                if reason != "length" or len(tokens) != OUTPUT:
                    raise RuntimeError(f"{name} ended with {reason} after {len(tokens)} tokens")
                answers[name.rpartition("-")[2]] = tokens
                times = {"first": first - arrived[name], "first there": first - at_decode[name]}
                ended.append(times | {"token": (last - first) / (OUTPUT - 1)})
    seconds = time.monotonic() - began
    after = pair.counters()
    counts = [
        {key: new[key] - old[key] for key in new} for old, new in zip(before, after, strict=True)
    ]
    return {
        "way": way,
        "seconds": seconds,
        "requests": ended,
        "counters": counts,
        "answers": answers,
    }


def row(result: dict[str, Any]) -> str:
    def figures(key: str) -> str:
        values = [each[key] for each in result["requests"]]
        worst = quantiles(values, n=10)[-1] if len(values) > 1 else values[0]
        return f"{median(values):.3g} | {worst:.3g}"

    prefill, decode = result["counters"]
    size, count = decode["transfer_bytes"], len(result["requests"])
    copies = (
        f"{prefill['packed_bytes'] / size:.2f}, {decode['unpacked_bytes'] / size:.2f}"
        if size
        else ""
    )
    messages = f"{decode['messages'] / count:.1f}" if size else ""
    cells = [
        result["way"],
        figures("first"),
        figures("first there"),
        figures("token"),
        f"{count / result['seconds']:.2f}",
    ]
    return f"| {' | '.join(cells)} | {size / 2**20:.0f} | {copies} | {messages} |"


HEAD = "| | " + " | ".join(
    [
        "seconds to the first token: median",
        "p90",
        "of these on the decode instance: median",
        "p90",
        "seconds per token: median",
        "p90",
        "requests a second",
        "MiB loaded",
        "copies per byte: prefill, decode",
        "messages a request |",
    ]
)


def run(arguments: argparse.Namespace, show: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Measure on the NPUs of this process's machine."""
    results = []
    with tempfile.TemporaryDirectory(prefix="bench-kv-") as directory:
        Path(directory, "config.json").write_text(json.dumps(MODEL))
        for options, ways in PAIRS.values():
            if not (chosen := [way for way in ways if way in arguments.ways]):
                continue
            common = {"model": directory, "dtype": arguments.dtype}
            pair = Pair(options, common | arguments.prefill, common | arguments.decode)
            try:
                measure(pair, "warm-up", 2, 2, 1)
                right = (
                    measure(pair, "without", arguments.requests, arguments.inflight, 2)
                    if arguments.check
                    else None
                )
                for way in chosen:
                    results.append(measure(pair, way, arguments.requests, arguments.inflight, 2))
                    print(row(results[-1]), file=sys.stderr, flush=True)
                    if right:
                        other = sum(
                            right["answers"][name] != tokens
                            for name, tokens in results[-1]["answers"].items()
                        )
                        show(
                            f"{way}: {other} of {arguments.requests} requests have other tokens"
                            " than without a transfer"
                        )
            finally:
                pair.close()
    show("\n".join([HEAD, "|---" * 11 + "|", *map(row, results)]))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tools/bench kv",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="of each way (32)")
    parser.add_argument(
        "--inflight", type=int, default=8, metavar="N", help="requests at a time (8)"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="all without it"
    )
    parser.add_argument(
        "--prefill",
        type=json.loads,
        default={},
        metavar="JSON",
        help="of vLLM's engine arguments, by name",
    )
    parser.add_argument(
        "--decode",
        type=json.loads,
        default={},
        metavar="JSON",
        help="the same for the decode instance",
    )
    parser.add_argument("--dtype", default="bfloat16", help="of model and KV cache (bfloat16)")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare all tokens with the decode instance's own; with float32",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the result there, as Markdown or (.json) JSON",
    )
    arguments = parser.parse_args()
    if "ASCEND_EMULATOR_NPUS" not in os.environ:
        count = str(npus(arguments.prefill) + npus(arguments.decode))
        emulator = ["-m", "ascend_emulator.cli", "run", "--npus", count, "--memory", "3GiB", "--"]
        os.environ |= {"HCCL_BUFFSIZE": "16", "VLLM_HOST_IP": "127.0.0.1"}
        os.execv(
            sys.executable, [sys.executable, *emulator, sys.executable, __file__, *sys.argv[1:]]
        )

    def show(text: str) -> None:
        print(text)
        if arguments.output and arguments.output.suffix != ".json":
            arguments.output.write_text(text + "\n")

    results = run(arguments, show)
    if arguments.output and arguments.output.suffix == ".json":
        arguments.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
