# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Clients, a router and two instances under faults: vLLM's schedulers, the connector and its
messages, without a model.

The engines are those of ``ascend_kv_connector.testing``: every token of every block that a step
uses is compared. KV cache moves by the in-memory transport, directly or staged. The router is this
program: it also repeats requests, mixes their parameters up, and dies.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic, sleep
from typing import Any

from ascend_kv_connector.p2p import worker
from ascend_kv_connector.p2p.consumer import push_stop
from ascend_transfer import engine
from harness.kv.memory_transport import Faults, InMemoryNetwork, InMemoryTransport, LinkCuts

NETWORK = InMemoryNetwork()

TIMEOUT, LEASE, LINGER = 2.0, 3.0, 0.3
LATE = 20.0
"""Seconds beyond the deadline of its transfer in which a request must have ended, however busy this
machine."""

LENGTH, INFLIGHT = 3, 8
OPTIONS: dict[str, Any] = {
    "host": "127.0.0.1",
    "transport": "memory",
    "chunk_mib": 1,
    "answer_timeout": 1.0,
    "transfer_timeout": TIMEOUT,
    "lease": LEASE,
}
WAYS: tuple[dict[str, Any], ...] = ({}, {"verify": True}, {"expose_cache": False}, {"chunk_mib": 2})
"""Options of successive instances: direct reads, checksums, staged, direct."""

KINDS = {
    "once": 40,
    "layer by layer": 15,
    "the same body again": 12,
    "n = 2": 12,
    "a list of prompts": 9,
    "parameters of another prompt": 4,
    "no request for the decode instance": 4,
    "its client leaves": 4,
}
"""Request types, with their weights."""

RATES: dict[str, Any] = {"fail": 0.02, "delay": 0.04, "late": 0.02, "hang": 0.002}


def check() -> None:
    """This transport needs nothing."""


class MemoryTransport(InMemoryTransport):
    def __init__(
        self, host: str, protocol: str, keys: Any = None, ports: Any = None, timeout: float = 0.0
    ) -> None:
        transport = NETWORK.make_transport()
        super().__init__(NETWORK, transport.session)
        NETWORK.transports[self.session] = self


class Written:
    """Event of a device that executes at once: the KV cache is in host memory."""

    def query(self) -> bool:
        return True


@contextmanager
def host_memory() -> Iterator[None]:
    """The connector's workers have KV cache in host memory, which needs no streams, and the
    in-memory transport."""
    places: list[tuple[Any, str, Any]] = [
        (worker, "record_event", Written),
        (worker, "private_stream", lambda device, behind=None: nullcontext()),
    ]
    # Writes of an instance that was killed.
    places += [(push_stop, "LINGER_SECONDS", LINGER)]
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    engine.ENGINES["memory"] = f"{__name__}.MemoryTransport"
    try:
        for module, name, value in places:
            setattr(module, name, value)
        yield
    finally:
        del engine.ENGINES["memory"]
        for module, name, value in before:
            setattr(module, name, value)


class Router(BaseHTTPRequestHandler):
    """Where decode instances ask for a prefill layer by layer; without ``alive`` it has died."""

    posted: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    alive = True

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.alive:
            self.posted.put(content)
        self.send_response(200 if self.alive else 503)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@dataclass
class Request:
    """A client's request: its completions on the decode instance are ``names``, the others have not
    been sent."""

    kind: str
    prompts: list[list[int]]
    began: float
    names: dict[str, list[int]] = field(default_factory=dict)
    leaves: float = 0.0
    waiting: int = 0


@dataclass
class Result:
    """``ended``: completions by request type and outcome. The last three should be empty:
    completions with
    wrong tokens or KV cache, those that ended late, and resources that were not freed."""

    ended: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    loaded: int = 0
    wrong: list[Any] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)


class Endurance:
    """``count`` requests, eight at a time; either side is restarted ``restarts`` times, and the
    router dies a tenth as often.

    ``make(transfer, blocks)`` makes an engine of the suite's.
    """

    def __init__(
        self, make: Callable[..., Any], count: int, restarts: int = 50, seed: int = 23
    ) -> None:
        NETWORK.__init__()  # type: ignore[misc]
        NETWORK.faults = Faults(draw=random.Random(seed), seconds=0.02, **RATES)
        self.make, self.count, self.draw, self.result = (
            make,
            count,
            random.Random(seed + 1),
            Result(),
        )
        self.cuts = LinkCuts(NETWORK, seed + 2, 0.001)
        events = ["kill prefill", "restart decode"] * restarts + ["the router dies"] * max(
            1, restarts // 10
        )
        self.draw.shuffle(events)
        self.events = [
            (count * (place + 1) // (len(events) + 1), event) for place, event in enumerate(events)
        ]
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Router)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.metaserver = f"http://127.0.0.1:{self.server.server_address[1]}/v1/metaserver"
        self.open: list[Request] = []
        # Number of the prompt, by the request's name on the prefill instance.
        self.prefills: dict[str, tuple[Request, int]] = {}
        self.layerwise: dict[str, tuple[Request, list[int]]] = {}
        self.repeats: list[tuple[float, str, list[int], dict[str, Any], Request]] = []
        self.other_params: dict[str, Any] = {}
        self.lives = Counter[str]()

    def new_engine(self, role: str) -> Any:
        self.lives[role] += 1
        options = OPTIONS | WAYS[self.lives[role] % len(WAYS)]
        if role == "kv_consumer":
            options |= {"metaserver": self.metaserver}
            NETWORK.faults.corrupt = 0.02 if options.get("verify") else 0.0
        policy = "recompute" if self.lives[role] % 3 == 0 else "fail"
        transfer = {
            "kv_connector": "AscendP2PConnector",
            "kv_role": role,
            "kv_connector_extra_config": options,
        }
        return self.make(transfer | {"kv_load_failure_policy": policy}, blocks=300)

    def run(self) -> Result:
        """All requests; the engines' caches have to be on the CPU."""
        with host_memory():
            return self._run()

    def _run(self) -> Result:
        from ascend_kv_connector.testing import prompts

        given = list(prompts(self.count, 9).values())
        handles = _handles()
        self.prefill, self.decode = self.new_engine("kv_producer"), self.new_engine("kv_consumer")
        while given or self.open:
            if self.events and self.count - len(given) >= self.events[0][0]:
                self.happen(self.events.pop(0)[1])
            self.cut()
            while given and len(self.open) < INFLIGHT:
                self.begin(given)
            self.prefill.step()
            self.route()
            self.decode.step()
            self.collect()
            sleep(0.0005)
        self.end("prefill", self.prefill)
        self.end("decode", self.decode)
        NETWORK.faults.hung.set()
        self.server.shutdown()
        self.server.server_close()
        self.result.faults = Counter(
            {name or "none": count for name, count in NETWORK.faults.counts.items()}
        )
        self.check_handles(handles)
        return self.result

    def begin(self, given: list[list[int]]) -> None:
        self.result.requests += 1
        kind = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
        number = f"q{self.result.requests}"
        count = min(3, len(given)) if kind == "a list of prompts" else 1
        request = Request(kind, [given.pop() for _ in range(count)], monotonic())
        self.result.requests += count - 1
        self.open.append(request)
        if kind == "its client leaves":
            request.leaves = request.began + 0.05 * self.draw.random()
        if kind == "layer by layer":
            name = f"{number}-12345678"  # as vLLM randomizes request ids
            self.layerwise[number] = request, request.prompts[0]
            params = {"do_remote_prefill": True, "metaserver": self.metaserver}
            self.complete(request, name, request.prompts[0], params)
            return
        for place, prompt in enumerate(request.prompts):
            self.prefills[f"{number}.{place}"] = request, place
            request.waiting += 1
            self.prefill.add(f"{number}.{place}", prompt, 1, {"do_remote_decode": True})

    def complete(
        self, request: Request, name: str, prompt: list[int], params: dict[str, Any]
    ) -> None:
        request.names[name] = prompt
        self.decode.add(name, prompt, LENGTH, json.loads(json.dumps(params)))

    def route(self) -> None:
        """Pass on what prefill instance, metaserver and clients have sent."""
        while not Router.posted.empty():
            params = Router.posted.get()
            if params["request_id"] in self.layerwise:
                _, prompt = self.layerwise.pop(params["request_id"])
                self.prefill.add(f"{params['request_id']}.p", prompt, 1, params)
        for name in [name for name in self.prefills if self.prefill.ended.get(name, ("",))[0]]:
            request, place = self.prefills.pop(name)
            request.waiting -= 1
            reason, _, params = self.prefill.ended.pop(name)
            if reason == "length" and params and place == 0 and request in self.open:
                self.to_decode(request, name, params)
        now = monotonic()
        for repeat in [repeat for repeat in self.repeats if repeat[0] <= now]:
            self.repeats.remove(repeat)
            _, name, prompt, params, request = repeat
            request.waiting -= 1
            if request in self.open:
                self.complete(request, name, prompt, params)
        for request in [
            request for request in self.open if request.leaves and request.leaves <= now
        ]:
            self.leave(request)

    def to_decode(self, request: Request, name: str, params: dict[str, Any]) -> None:
        if request.kind == "no request for the decode instance":
            return
        sent = (
            self.other_params
            if request.kind == "parameters of another prompt" and self.other_params
            else params
        )
        self.other_params = params
        copies = 2 if request.kind == "n = 2" else 1
        for copy in range(copies):
            for place, prompt in enumerate(request.prompts):
                self.complete(request, f"{copy}_{name}_{place}", prompt, sent)
        if request.kind == "the same body again":
            request.waiting += 1
            when = monotonic() + self.draw.choice([0.0, 0.01, 0.2])
            self.repeats.append((when, f"again_{name}", request.prompts[0], sent, request))

    def leave(self, request: Request) -> None:
        request.leaves = 0.0
        for name in request.names:
            self.decode.abort(name)
        for name in [name for name, (owner, _) in self.prefills.items() if owner is request]:
            self.prefill.abort(name)

    def collect(self) -> None:
        from ascend_kv_connector.testing import expected_tokens

        for request in list(self.open):
            for name in [name for name in request.names if self.decode.ended.get(name, ("",))[0]]:
                reason, tokens, _ = self.decode.ended.pop(name)
                prompt = request.names.pop(name)
                loaded = self.decode.loaded.pop(name, 0)
                if reason == "length":
                    how = (
                        "transferred"
                        if len(prompt) == 1 or loaded >= len(prompt) - 1
                        else "computed"
                    )
                    self.result.loaded += how == "transferred"
                    if tokens != expected_tokens(prompt, LENGTH):
                        self.result.wrong.append((request.kind, name, tokens))
                else:
                    how = {"abort": "left", "error": "error"}.get(reason, reason)
                self.result.ended[f"{request.kind}: {how}"] += 1
            if (
                monotonic() - request.began > 2 * TIMEOUT + LATE
                and request.kind not in self.result.late
            ):
                self.result.late.append(
                    f"{request.kind}: {request.names}, {request.waiting} to come"
                )
                self.open.remove(request)
            elif not request.names and not request.waiting:
                self.open.remove(request)
                if request.kind == "no request for the decode instance":
                    self.result.ended[f"{request.kind}: prefilled"] += 1

    def cut(self) -> None:
        if self.cuts.step(lambda: itertools.product(NETWORK.transports, repeat=2)):
            self.result.events["the link is cut"] += 1

    def happen(self, event: str) -> None:
        """Restart an instance or the router; the clients' requests stand still meanwhile."""
        began = monotonic()
        self._happen(event)
        for request in self.open:
            request.began += monotonic() - began

    def _happen(self, event: str) -> None:
        self.result.events[event] += 1
        if event == "kill prefill":
            NETWORK.killed.add(self.prefill.worker._worker._transport.session)
            for name in list(self.prefills):
                request, _ = self.prefills.pop(name)
                request.waiting -= 1
                self.result.ended[f"{request.kind}: the prefill instance was killed"] += 1
            self.result.wrong += self.prefill.wrong
            self.prefill.close()
            self.other_params = {}
            self.prefill = self.new_engine("kv_producer")
        elif event == "restart decode":
            for request in self.open:
                for name in list(request.names):
                    del request.names[name]
                    self.decode.abort(name)
                    self.result.ended[f"{request.kind}: the decode instance was restarted"] += 1
            self.end("decode", self.decode)
            self.decode = self.new_engine("kv_consumer")
        else:  # Its connections close, so the instances abort its requests.
            Router.alive = False
            for request in self.open:
                self.leave(request)
            self.repeats.clear()
            self.layerwise.clear()
            for request in self.open:
                request.waiting = 0
            for name in list(self.prefills):
                self.prefill.abort(name)
                del self.prefills[name]
            Router.alive = True

    def end(self, name: str, engine: Any) -> None:
        """Let an instance's leases and transfers end, and close it."""
        until = monotonic() + LEASE + 2 * TIMEOUT + LATE
        NETWORK.faults.hung.set()  # those of its reads that hang
        while (engine.held or engine.scheduler.has_unfinished_requests()) and monotonic() < until:
            engine.step()
            if name == "decode" and engine is not self.prefill:
                self.prefill.step()
            sleep(0.001)
        NETWORK.faults.hung = threading.Event()
        part = engine.worker._worker
        if engine.held:
            self.result.leaked.append(f"{engine.held} blocks of a {name} instance")
        if part._producer and (part._producer.buffers_in_use or len(part._producer.leases)):
            self.result.leaked.append(
                f"{part._producer.buffers_in_use} buffers, {len(part._producer.leases)} leases"
            )
        self.result.wrong += engine.wrong
        engine.close()

    def check_handles(self, before: Counter[str]) -> None:
        """Compare open files and threads, once what is in the background has ended."""
        until = monotonic() + 20.0
        while monotonic() < until:
            gc.collect()
            if not (more := _handles() - before):
                return
            sleep(0.2)
        self.result.leaked.append(f"{dict(more)}")


def _handles() -> Counter[str]:
    """Open files, sockets and threads of this process, by type."""
    threads = Counter(thread.name.rstrip("-0123456789 ()") for thread in threading.enumerate())
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            threads[os.readlink(f"/proc/self/fd/{name}").partition(":[")[0]] += 1
    return threads
