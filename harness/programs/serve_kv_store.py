# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_kv_connector.py and `tools/check transfers`: one engine fills a pool and is killed,
another loads from it.

    python harness/programs/serve_kv_store.py '{"model": DIR, "backend": "mooncake", "requests": 20,
    …}'

Each instance is an engine in processes of its own. Prints a line `RESULT {json}`: by phase how many
requests ended in which way, those whose tokens differ from what was computed without a pool, and
those of whose prompts less was loaded than was stored.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kv_engine
import serve_kv_transfer
from harness.kv.store_faults import outcome_words

if __name__ == "__mp_main__":  # In an instance, and in its engine core.
    import harness.engines.imports  # noqa: F401

CHUNK = 128
"""Tokens of a block of the engine, and so of a chunk."""

OPTIONS = {"cpu_bytes_to_use": 200 << 20, "answer_timeout": 2, "transfer_timeout": 5, "rest": 3}


def instance(
    pipe: Connection,
    model: str,
    devices: str,
    transfer: dict[str, Any] | None,
    engine: dict[str, Any],
) -> None:
    """Serve batches from the pipe until "stop"."""
    answers = {"chunks": chunks, "reload": lambda llm: llm.collective_rpc("reload_weights")}
    kv_engine.serve(pipe, model, devices, transfer, {"disable_log_stats": False} | engine, answers)


def chunks(llm: Any) -> dict[str, int]:
    """Chunk counts of the metrics, by outcome and tier."""
    sizes = {}
    for metric in llm.get_metrics():
        if metric.name == "vllm:ascend_store_chunks":
            labels = metric.labels
            words = outcome_words(labels["op"], labels["outcome"], labels["code"])
            sizes[f"{words} ({labels['tier'].removeprefix('ascend_')})"] = int(metric.value)
    return sizes


class Instance:
    """An engine in processes of its own."""

    def __init__(self, case: dict[str, Any], devices: str, transfer: dict[str, Any] | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, case["model"], devices, transfer, case.get("engine", {}))
        self.process = context.Process(target=instance, args=arguments)
        self.process.start()
        theirs.close()

    def ready(self) -> "Instance":
        assert self.pipe.poll(480)
        assert self.pipe.recv() == "ready"
        return self

    def ask(self, what: Any, seconds: float = 240) -> Any:
        self.pipe.send(what)
        assert self.pipe.poll(seconds), f"no answer in {seconds} s"
        return self.pipe.recv()

    def free(self, seconds: float = 20.0) -> bool:
        """Whether all blocks are free, in time."""
        until = time.monotonic() + seconds
        while not (done := self.ask("reset")) and time.monotonic() < until:
            time.sleep(0.2)
        return done

    def stored(self, quiet: float, seconds: float = 60.0) -> None:
        """Wait until the blocks in host memory are in the pool: no chunk has been counted for
        ``quiet`` seconds."""
        until, counts, since = time.monotonic() + seconds, None, time.monotonic()
        while time.monotonic() - since < quiet:
            assert time.monotonic() < until, f"after {seconds} s chunks are still stored: {counts}"
            time.sleep(0.2)
            # Counts arrive with the outputs of a step. A prompt of one token has no chunk.
            self.ask([{"name": "count", "prompt": [1], "length": 2}])
            if (now := self.ask("chunks")) != counts:
                counts, since = now, time.monotonic()

    def kill(self) -> None:
        import psutil

        process = psutil.Process(self.process.pid)
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.join(20)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send("stop")
        self.process.join(30)
        if self.process.is_alive():
            self.kill()


def requests(phase: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Requests with prompts of 1 to 600 tokens, a third of which share a prefix."""
    prompts = serve_kv_transfer.prompts(count, seed)
    return [
        {"name": f"{phase}-{number}", "prompt": prompt, "length": 8}
        for number, prompt in enumerate(prompts)
    ]


def judge(
    items: list[dict[str, Any]], there: dict[str, Any], alone: dict[str, Any], began: float
) -> dict[str, Any]:
    ended: dict[str, int] = {}
    for _, reason, *_ in there.values():
        ended[str(reason)] = ended.get(str(reason), 0) + 1
    stored = {
        item["name"]: min(len(item["prompt"]) - 1, len(item["prompt"]) // CHUNK * CHUNK)
        for item in items
    }
    return {
        "ended": ended,
        "different": [
            f"{name}: {there.get(name, ('none',))[0]} and not {alone[name][0]}"
            for name in stored
            if name not in there or there[name][0] != alone[name][0]
        ],
        "not loaded": [
            f"{name}: {there[name][3]} of {difference}"
            for name, difference in stored.items()
            if there[name][3] < difference
        ],
        "tokens loaded": sum(each[3] for each in there.values()),
        "seconds": round(time.monotonic() - began, 2),
    }


def run(case: dict[str, Any], pool: Any, disk: str) -> dict[str, Any]:
    backends = [case["backend"]] if isinstance(case["backend"], str) else case["backend"]
    extra = OPTIONS | {"backend": backends, "disk_path": disk} | case.get("options", {})
    transfer = {"kv_connector": case.get("connector", "AscendStoreConnector"), "kv_role": "kv_both"}
    transfer["kv_connector_extra_config"] = extra
    first, second = case.get("devices", ["0", "1"])
    count, seed, phases = case["requests"], case.get("seed", 0), {}
    phases["restart"] = requests("restart", count, seed)
    if case.get("reload"):
        phases["weights reloaded"] = requests("reloaded", count, seed)
    for place, name in enumerate(case.get("harms", ())):
        phases[name] = requests(name, count, seed + 10 * (place + 1))
    everything = [item for items in phases.values() for item in items]
    result: dict[str, Any] = {}
    engines: list[Instance] = []

    def start(devices: str, transfer: dict[str, Any] | None) -> Instance:
        engines.append(Instance(case, devices, transfer))
        return engines[-1]

    try:
        alone = None
        if case.get("alone"):  # an engine without a connector
            reference = start(first, None).ready()
            alone = reference.ask(everything)
            reference.close()
        one = start(first, transfer)
        # both at once, to save time
        two = None if case.get("one by one") else start(second, transfer)
        began = time.monotonic()
        filled = one.ready().ask(everything)
        alone = alone or filled
        result["filled"] = judge(everything, filled, alone, began)
        result["filled"].pop("not loaded")
        assert one.free()
        one.stored(case.get("settle", 2.0))
        one.kill()
        two = two or start(second, transfer)
        two.ready()
        before: dict[str, int] = {}
        for name, items in phases.items():
            if name == "weights reloaded":
                two.ask("reload")
            began = time.monotonic()
            harm = (
                threading.Timer(case.get("after", 0.0), HARMS[name], (pool, disk))
                if name in HARMS
                else None
            )
            if harm:
                harm.start()
            result[name] = judge(items, two.ask(items, 120), alone, began)
            if harm:
                harm.join()
            result[name]["blocks are free"] = two.free()
            counts = two.ask("chunks")
            result[name]["chunks"] = {
                key: value - before.get(key, 0)
                for key, value in counts.items()
                if value != before.get(key)
            }
            before = counts
        two.close()
        result["left in /dev/shm"] = [
            path.name for path in Path("/dev/shm").glob("vllm_offload_*-store.mmap")
        ]
        return result
    finally:
        for each in engines:
            each.close()


def damage(pool: Any, disk: str) -> None:
    """Flip a bit in every second file, and truncate every fourth to half."""
    for number, file in enumerate(sorted(Path(disk).rglob("*.kv"))):
        data = bytearray(file.read_bytes())
        if number % 4 == 0:
            file.write_bytes(data[: len(data) // 2])
        elif number % 2 == 0:
            data[len(data) // 3] ^= 1
            file.write_bytes(data)


def start_master(pool: Any, _: Any) -> None:
    pool.start_master()
    time.sleep(2)


HARMS: dict[str, Callable[[Any, Any], object]] = {
    "damaged": damage,
    "master killed": lambda pool, disk: pool.signal("master", signal.SIGKILL),
    "master is back": start_master,
    "master stopped": lambda pool, disk: pool.signal("master", signal.SIGSTOP),
    "master goes on": lambda pool, disk: pool.signal("master", signal.SIGCONT),
    "owner killed": lambda pool, disk: pool.signal("owner", signal.SIGKILL),
    "owner stopped": lambda pool, disk: pool.signal("owner", signal.SIGSTOP),
    "owner goes on": lambda pool, disk: pool.signal("owner", signal.SIGCONT),
}


def main(case: dict[str, Any]) -> None:
    from harness.kv import mooncake_pool

    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(tempfile.TemporaryDirectory())
        pool = (
            stack.enter_context(mooncake_pool.mooncake_pool(case.get("mib", 512)))
            if "mooncake" in case["backend"]
            else None
        )
        if pool:
            os.environ["MOONCAKE_CONFIG_PATH"] = str(pool.config)
        print("RESULT", json.dumps(run(case, pool, disk)), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
