"""Run by test_kv_connector.py on emulated NPUs: one instance computes prompts, another reads their KV cache and goes on.

    python tests/kv_cases.py '{"model": DIR, "producer": {…}, "consumer": {…}, "requests": 200, …}'

Each instance is an engine in processes of its own. Prints a line `RESULT {json}`: how many requests ended in which way, and
the tokens that differ from what the second instance computes alone.
"""

import json
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

VOCABULARY = 512
READ = {"do_remote_decode": True}


def instance(pipe: Connection, model: str, devices: str, role: str, options: dict[str, Any], engine: dict[str, Any]) -> None:
    """Serve batches that come by the pipe until it says stop: prompts, lengths and kv_transfer_params for each."""
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = devices
    from vllm import LLM, SamplingParams

    transfer = {"kv_connector": "AscendP2PConnector", "kv_role": role, **options}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        max_model_len=1024,
        seed=0,
        gpu_memory_utilization=0.3,
        kv_transfer_config=transfer,
        **engine,
    )
    pipe.send("ready")
    while True:
        batch = pipe.recv()
        if batch == "stop":
            llm.llm_engine.engine_core.shutdown()
            return
        if batch == "reset":
            pipe.send(llm.reset_prefix_cache())
            continue
        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=length,
                detokenize=False,
                ignore_eos=True,
                extra_args={"kv_transfer_params": params} if params else None,
            )
            for _, length, params in batch
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _, _ in batch], sampling, use_tqdm=False)
        pipe.send([(list(each.outputs[0].token_ids), each.outputs[0].finish_reason, each.kv_transfer_params) for each in outputs])


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to 600 tokens; every third begins as others do."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, VOCABULARY) for _ in range(600)]
    out = []
    for number in range(count):
        length = draw.choice([1, 2, 7, 33, 127, 128, 129, 257, 400, 600])
        own = [draw.randrange(3, VOCABULARY) for _ in range(length)]
        out.append((shared[: length // 2] + own)[:length] if number % 3 == 2 else own)
    return out


def run(case: dict[str, Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for name, role in (("producer", "kv_producer"), ("consumer", "kv_consumer")):
        ours, theirs = context.Pipe()
        shape = case[name]
        arguments = (theirs, case["model"], shape["devices"], role, case.get("options", {}), shape.get("engine", {}))
        processes.append(context.Process(target=instance, args=arguments))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        for pipe in pipes:
            assert pipe.poll(240)
            assert pipe.recv() == "ready"
        producer, consumer = pipes

        def ask(pipe: Connection, batch: Any) -> Any:
            pipe.send(batch)
            assert pipe.poll(240), "no answer in 240 s"
            return pipe.recv()

        given = prompts(case["requests"], case.get("seed", 0))
        draw = random.Random(1)
        lengths = [draw.choice([1, 3, 12]) for _ in given]
        alone = ask(consumer, [(prompt, length, None) for prompt, length in zip(given, lengths, strict=True)])
        assert ask(consumer, "reset")
        began = time.monotonic()
        first = ask(producer, [(prompt, 1, READ) for prompt in given])
        second = ask(
            consumer, [(prompt, length, params) for prompt, length, (_, _, params) in zip(given, lengths, first, strict=True)]
        )
        ended: dict[str, int] = {}
        for _, reason, _ in second:
            ended[str(reason)] = ended.get(str(reason), 0) + 1
        wrong = [
            n for n, (one, other) in enumerate(zip(alone, second, strict=True)) if other[1] != "error" and one[0] != other[0]
        ]
        freed = ask(producer, "reset")
        until = time.monotonic() + 10
        while not freed and time.monotonic() < until:
            time.sleep(0.2)
            freed = ask(producer, "reset")
        return {
            "ended": ended,
            "different": wrong,
            "first differs": [n for n, (one, other) in enumerate(zip(first, alone, strict=True)) if one[0][0] != other[0][0]],
            "producer's blocks are free": freed,
            "consumer's blocks are free": ask(consumer, "reset"),
            "seconds": round(time.monotonic() - began, 2),
        }
    finally:
        for pipe in pipes:
            pipe.send("stop")
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()


if __name__ == "__main__":
    print("RESULT", json.dumps(run(json.loads(sys.argv[1]))), flush=True)
