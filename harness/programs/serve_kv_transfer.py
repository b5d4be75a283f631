# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_kv_connector.py and `tools/check transfers`: a prefill instance and a decode
instance.

    python harness/programs/serve_kv_transfer.py '{"model": DIR, "prefill": {…}, "decode": {…},
    "pull": 20, "kill": 16, …}'

Each instance is an engine in processes of its own. Prints a line `RESULT {json}`: by phase the
number of requests for each outcome, those whose tokens differ from the prefill instance's own
answers, and those whose KV cache was not transferred. If the two instances do not have the same
shape, `no transfer` counts the prompts that they answer differently without any transfer.
"""

import collections
import contextlib
import json
import multiprocessing
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import kv_engine

if __name__ == "__mp_main__":  # In an instance, and in its engine core.
    import harness.engines.imports  # noqa: F401

VOCABULARY = 512

ANSWER_TIMEOUT = 5
"""Seconds for each of many prompts; a prompt with drafts and states takes one, on two busy cores.
"""

AT_ONCE = 50
"""Requests whose prompts are read layer by layer at the same time."""


class Router(BaseHTTPRequestHandler):
    """The metaserver that decode instances ask for a prefill; `given` holds their posts, each with
    a queue for the status."""

    given: "queue.Queue[tuple[dict[str, Any], queue.Queue[int]]]" = queue.Queue()
    closed = False

    def do_POST(self) -> None:
        answer: queue.Queue[int] = queue.Queue()
        self.given.put((json.loads(self.rfile.read(int(self.headers["Content-Length"]))), answer))
        self.send_response(answer.get(timeout=240))
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


def prompts(count: int, seed: int, adder: bool = False) -> list[list[int]]:
    """Prompts of 1 to 600 tokens; every third begins as others do. The adder's are sums that have
    one right continuation."""
    draw = random.Random(seed)
    if adder:
        from harness.models.adder import chain, vocabulary

        shared_chain = chain(3, 4, 200)
        texts = [
            chain(draw.randrange(100), draw.randrange(100), 200) if each % 3 < 2 else shared_chain
            for each in range(count)
        ]
        return [
            [
                vocabulary()[sign]
                for sign in text[: draw.choice([7, 33, 127, 128, 129, 257, 400, 600])]
            ]
            for text in texts
        ]
    shared = [draw.randrange(3, VOCABULARY) for _ in range(600)]
    out = []
    for number in range(count):
        length = draw.choice([1, 2, 7, 33, 127, 128, 129, 257, 400, 600])
        prompt_tokens = [draw.randrange(3, VOCABULARY) for _ in range(length)]
        out.append(
            (shared[: length // 2] + prompt_tokens)[:length] if number % 3 == 2 else prompt_tokens
        )
    return out


class LogprobDifferences:
    """Log-probability differences of two engines while their tokens are the same, and the gap
    between the two most likely tokens where they diverge."""

    def __init__(self) -> None:
        self.absolute: list[float] = []
        self.gaps: list[float] = []
        self.diverged: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        tokens: list[int],
        weights: list[Any],
        more: list[int],
        other_weights: list[Any],
    ) -> None:
        """`weights`: for each position, the log-probabilities of the most likely tokens."""
        for place, (one, other) in enumerate(zip(weights, other_weights, strict=False)):
            self.absolute += [abs(one[token] - other[token]) for token in one.keys() & other.keys()]
            best, second = sorted(other.values())[-1:-3:-1]
            self.gaps.append(best - second)
            if tokens[place] != more[place]:
                self.diverged.append({"name": name, "position": place, "gap": best - second})
                break

    def result(self) -> dict[str, Any]:
        if not self.absolute:
            return {}
        return {
            "log-probability difference": [
                max(self.absolute),
                sum(self.absolute) / len(self.absolute),
            ],
            "diverged": self.diverged,
            "positions with such a gap": sum(
                gap <= max((each["gap"] for each in self.diverged), default=0) for gap in self.gaps
            ),
            "positions": len(self.gaps),
        }


@contextlib.contextmanager
def chip(soc: str | None) -> Iterator[None]:
    """Processes that start here have this emulated chip; without one that of this process."""
    if soc is None:
        yield
        return
    from ascend_emulator import activation

    number, memory = (int(os.environ[f"ASCEND_EMULATOR_{name}"]) for name in ("NPUS", "MEMORY"))
    before = dict(os.environ)
    activation.set_environment(os.environ, number, soc, memory)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Pair:
    """The two instances.

    prefill_alone, alone: the answers that the prefill and the decode instance compute without a
    transfer. The first are the reference of transfers: a KV cache continues what the instance that
    computed it began, which with another number of NPUs rounds differently.
    """

    def __init__(self, case: dict[str, Any], port: int) -> None:
        self.metaserver = f"http://127.0.0.1:{port}/v1/metaserver"
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            ours, theirs = context.Pipe()
            shape = case[name]
            allowed = {"metaserver": self.metaserver} if role == "kv_consumer" else {}
            options = (
                case.get("transfer", {}) | allowed,
                shape.get("tiers", {}),
                shape.get("engine", {}),
            )
            arguments = (theirs, case["model"], shape["devices"], role, *options)
            self.processes.append(context.Process(target=kv_engine.instance, args=arguments))
            with chip(shape.get("soc")):
                self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)
        self.prefill, self.decode = self.pipes
        self.prefill_alone: dict[str, Any] = {}
        self.alone: dict[str, Any] = {}
        self.has_states = bool(case.get("states"))

    def ask(self, pipe: Connection, what: Any) -> Any:
        pipe.send(what)
        seconds = max(240, ANSWER_TIMEOUT * len(what))
        assert pipe.poll(seconds), f"no answer in {seconds} s"
        return pipe.recv()

    def compute_alone(self, items: list[dict[str, Any]]) -> None:
        given = [item | {"params": None, "abort after": None} for item in items]
        self.prefill_alone, self.alone = self.ask(self.prefill, given), self.ask(self.decode, given)
        assert self.free(self.prefill)
        assert self.free(self.decode)

    def alone_differently(self) -> dict[str, Any]:
        """Answers of the two instances that differ without any transfer."""
        different = [
            name for name, each in self.alone.items() if each[0] != self.prefill_alone[name][0]
        ]
        lines = [
            f"{name}: {self.alone[name][0]} and not {self.prefill_alone[name][0]}"
            for name in different
        ]
        ended = {"length": len(self.alone)}
        return {
            "ended": ended,
            "different": lines,
            "not transferred": [],
            "seconds": "",
            "blocks are free": [],
        }

    def compute_alone_again(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """The same engine with other batches, which shows only the effect of rounding."""
        began = time.monotonic()
        given = [item | {"params": None, "abort after": None} for item in reversed(items)]
        again = self.ask(self.decode, given)
        answers = {name: (each[0], each[1], None, 1 << 20, each[4]) for name, each in again.items()}
        result = self.judge(given, {}, answers, began, self.alone)
        return result | {"blocks are free": [self.free(self.decode)]}

    def free(self, pipe: Connection, seconds: float = 90.0) -> bool:
        """Whether all blocks of an instance are free, in time: those of failed reads are kept for a
        minute."""
        until = time.monotonic() + seconds
        while not (done := self.ask(pipe, "reset")) and time.monotonic() < until:
            time.sleep(0.2)
        return done

    def compute_there(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Let the prefill instance compute prompts and keep them."""
        given = {"do_remote_decode": True}
        first = self.ask(
            self.prefill,
            [
                item | {"length": 1, "params": given, "abort after": item.get("abort prefill")}
                for item in items
            ],
        )
        for _, _, params, *_ in first.values():
            if params:  # Otherwise vLLM would use its own blocks instead of the missing ones.
                params.pop("remote_prefill_cached_tokens", None)
        return first

    def pull(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """The decode instance reads the KV cache of finished prompts."""
        first = self.compute_there(items)
        there = [
            item | {"params": first[item["name"]][2]} for item in items if item["name"] in first
        ]
        began = time.monotonic()
        return self.judge(items, first, self.ask(self.decode, there), began)

    def layerwise(
        self, items: list[dict[str, Any]], finished: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The decode instance has blocks first; the prompts are read while they are computed, but
        for those that are finished.

        At most AT_ONCE at a time, because a transfer's time begins when it has blocks, and includes
        waiting for the prefill.
        """
        began, first = time.monotonic(), dict(finished or {})
        second: dict[str, Any] = {}
        by_name = {item["name"]: item for item in items}
        for start in range(0, len(items), AT_ONCE):
            second |= self._layerwise(items[start : start + AT_ONCE], by_name, first)
        return self.judge(items, first, second, began)

    def _layerwise(
        self, items: list[dict[str, Any]], by_name: dict[str, Any], first: dict[str, Any]
    ) -> dict[str, Any]:
        """The decode instance's answers; the prefill instance's are added to `first`. Aborted
        requests may be posted later."""
        params = {"do_remote_prefill": True, "metaserver": self.metaserver}
        began = time.monotonic()
        self.decode.send(
            [
                item | {"params": first[item["name"]][2] if item["name"] in first else params}
                for item in items
            ]
        )
        while not self.decode.poll(0.02):
            assert time.monotonic() - began < 240
            posted = []
            while not Router.given.empty():
                posted.append(Router.given.get())
            wanted = [
                by_name[each["request_id"]]
                | {
                    "length": 1,
                    "params": each,
                    "abort after": by_name[each["request_id"]].get("abort prefill"),
                }
                for each, _ in posted
            ]
            status = 200
            try:
                first |= self.ask(self.prefill, wanted) if wanted else {}
            except (EOFError, OSError):
                assert Router.closed
                status = 502
            for _, answer in posted:
                answer.put(status)
        answers: dict[str, Any] = self.decode.recv()
        return answers

    def offload(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """The decode instance loads from host memory what it computed before and no longer has on
        the NPU."""
        began = time.monotonic()
        again = self.ask(
            self.decode, [item | {"params": None, "abort after": None} for item in items]
        )
        long = [item["name"] for item in items if len(item["prompt"]) > 2 * 128]
        return {
            "ended": dict(collections.Counter(str(each[1]) for each in again.values())),
            "different": [name for name, each in again.items() if each[0] != self.alone[name][0]],
            "not transferred": [name for name in long if again[name][3] < 128],
            "seconds": round(time.monotonic() - began, 2),
            "blocks are free": [self.free(self.decode)],
        }

    def judge(
        self,
        items: list[dict[str, Any]],
        first: dict[str, Any],
        second: dict[str, Any],
        began: float,
        expected: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Compare answers with those expected, or the prefill instance's own."""
        expected = expected or self.prefill_alone
        ended: collections.Counter[str] = collections.Counter()
        different, recomputed, failed, differences = [], [], [], LogprobDifferences()
        aborted: tuple[Any, ...]
        for item in items:
            name = item["name"]
            aborted = (None, "aborted" if name in first else "prefill aborted", None, 0, [])
            tokens, reason, _, cached, weights = second.get(name, aborted)
            ended[str(reason)] += 1
            if reason == "length":
                differences.add(name, tokens, weights, *(expected[name][place] for place in (0, 4)))
                if tokens != expected[name][0]:
                    different.append(f"{name}: {tokens} and not {expected[name][0]}")
            if reason == "error" and not item.get("abort prefill"):
                failed.append(name)
            if reason == "length" and cached < len(item["prompt"]) - 1:
                recomputed.append(f"{name}: {cached} of {len(item['prompt'])}")
            # With states a prefill instance leaves out the prompt's last token, so its own sampled
            # token follows the one before.
            if name in first and not self.has_states and first[name][0] != expected[name][0][:1]:
                different.append(f"{name}, first token")
        return {
            "ended": dict(ended),
            "different": different,
            "not transferred": recomputed,
            "failed": failed,
            "seconds": round(time.monotonic() - began, 2),
        } | differences.result()

    def kill_prefill(self) -> None:
        Router.closed = True
        kill(self.processes[0])

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send("stop")
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                kill(process)


def kill(instance: BaseProcess) -> None:
    """Kill a process and its children: an engine core outlives its parent, and holds the pipe that
    is read to its end."""
    import psutil

    assert instance.pid
    process = psutil.Process(instance.pid)
    for each in [*process.children(recursive=True), process]:
        each.kill()


def requests(
    phase: str, count: int, seed: int, aborting: bool, adder: bool = False
) -> list[dict[str, Any]]:
    """`count` requests; with `aborting`, every seventh is aborted on the decode instance, every
    eleventh while prefilling."""
    draw = random.Random(seed + 1)
    out = []
    for number, prompt in enumerate(prompts(count, seed, adder)):
        item: dict[str, Any] = {
            "name": f"{phase}-{number}",
            "prompt": prompt,
            "length": draw.choice([1, 3, 12]),
        }
        if aborting and number % 7 == 6:
            item["abort after"], item["length"] = draw.choice([1, 2, 4]), 12
        elif aborting and number % 11 == 10:
            item["abort prefill"] = 1
        out.append(item)
    return out


def run(case: dict[str, Any]) -> dict[str, Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port, seed = server.server_address[1], case.get("seed", 0)
    pair = Pair(case, port)
    try:
        for pipe in pair.pipes:
            assert pipe.poll(480)
            assert pipe.recv() == "ready"
        phases = {
            name: requests(
                name,
                case.get(name, 0),
                seed + 10 * place,
                not case.get("logprobs"),
                case.get("adder", False),
            )
            for place, name in enumerate(("pull", "layerwise"))
        }
        if case.get("kill"):
            phases["killed"] = requests(
                "killed", case["kill"], seed + 20, False, case.get("adder", False)
            )
        every = [
            item | {"logprobs": case.get("logprobs", False)}
            for items in phases.values()
            for item in items
        ]
        phases = {
            name: [item for item in every if item["name"].startswith(name)] for name in phases
        }
        pair.compute_alone(every)
        result: dict[str, Any] = {}
        if case["prefill"].get("engine") != case["decode"].get("engine"):
            result["no transfer"] = pair.alone_differently()
        if case.get("logprobs"):
            result["recomputed"] = pair.compute_alone_again(every)
        for name in ("pull", "layerwise"):
            if phases[name]:
                result[name] = (
                    pair.pull(phases[name]) if name == "pull" else pair.layerwise(phases[name])
                )
                result[name]["blocks are free"] = [pair.free(pipe) for pipe in pair.pipes]
        if case["decode"].get("tiers"):
            result["from host memory"] = pair.offload(phases["pull"])
        # Some read finished prompts, the others prompts that are being computed.
        if case.get("kill"):
            half, draw = len(phases["killed"]) // 2, random.Random(seed)
            finished = pair.compute_there(phases["killed"][:half])
            killer = threading.Timer(draw.uniform(0.0, 0.2), pair.kill_prefill)
            killer.start()
            result["killed"] = pair.layerwise(phases["killed"], finished)
            killer.join()
            result["killed"]["blocks are free"] = [pair.free(pair.decode)]
        return result
    finally:
        pair.close()


if __name__ == "__main__":
    print("RESULT", json.dumps(run(json.loads(sys.argv[1]))), flush=True)
