# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Programs that observe streams, events, graphs and their limits. Each returns facts that two
reports can be compared by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ascend_emulator.verify.errors import described
from ascend_emulator.verify.lazy import torch

Facts = dict[str, Any]
PROGRAMS: dict[str, Callable[[Facts], Facts]] = {}
ISOLATED = set[str]()
LIMITS = set[str]()
MOST_STREAMS, MOST_GRAPHS = 4096, 2200


def _program(
    isolated: bool = False, limit: bool = False
) -> Callable[[Callable[[], Facts]], Callable[[], Facts]]:
    """Register a program under its function's name; its record is ``observed`` with the facts that
    it returns."""

    def register(function: Callable[[], Facts]) -> Callable[[], Facts]:
        name = function.__name__.replace("_", "-")

        def run(options: Facts) -> Facts:
            facts = function()
            if not isolated:  # Such a program may exit with a failed stream.
                torch.npu.synchronize()
            return {"outcome": "observed", "facts": facts}

        PROGRAMS[name] = run
        if isolated or limit:
            ISOLATED.add(name)
        if limit:
            LIMITS.add(name)
        return function

    return register


def _attempt(function: Callable[[], Any]) -> Any:
    """``accepted``, or the codes and type of the error."""
    try:
        function()
        return "accepted"
    except (RuntimeError, AttributeError, ValueError) as error:
        description = described(error)
        return " ".join([description["type"], *description["codes"]])


def _long_work(x: Any, times: int = 60) -> Any:
    y = x
    for _ in range(times):
        y = (y @ x).clamp(-1, 1)
    return y


@_program()
def streams_run_in_order_of_events() -> Facts:
    x = torch.eye(512).npu()
    first, second = torch.npu.Stream(), torch.npu.Stream()
    done = torch.npu.Event()
    first.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(first):
        y = _long_work(x)
        done.record()
    with torch.npu.stream(second):
        done.wait()
        total = y.sum()
    second.synchronize()
    return {"right": total.item() == 512.0, "different_streams": first != second}


@_program()
def events_measure_time() -> Facts:
    x = torch.eye(256).npu()
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    _long_work(x, 10)
    end.record()
    end.synchronize()
    return {
        "positive": start.elapsed_time(end) > 0,
        "query_after_synchronize": end.query(),
        "stream_query": torch.npu.current_stream().query(),
    }


@_program()
def events_not_recorded() -> Facts:
    event = torch.npu.Event()
    return {
        "query": event.query(),
        "synchronize": _attempt(event.synchronize),
        "wait": _attempt(event.wait),
    }


@_program()
def stream_pool_and_priorities() -> Facts:
    handles = {torch.npu.Stream().npu_stream for _ in range(80)}
    return {
        "distinct_of_80": len(handles),
        "priority": _attempt(lambda: torch.npu.Stream(priority=-1)),
    }


@_program()
def memory_granularity() -> Facts:
    before = torch.npu.memory_allocated()
    x = torch.empty(1, dtype=torch.uint8, device="npu")
    small = torch.npu.memory_allocated() - before
    y = torch.empty((3 << 20) + 1, dtype=torch.uint8, device="npu")
    large = torch.npu.memory_allocated() - before - small
    return {
        "bytes_of_1": small,
        "bytes_of_3MiB_and_1": large,
        "aligned_512": x.data_ptr() % 512 == 0 and y.data_ptr() % 512 == 0,
    }


@_program()
def an_error_of_a_call_is_not_sticky() -> Facts:
    x = torch.ones(4).npu()
    error = _attempt(lambda: torch.empty(1 << 50, dtype=torch.uint8, device="npu"))
    return {"out_of_memory": error, "next": (x + 1).sum().item()}


@_program()
def random_numbers_repeat_with_the_seed() -> Facts:
    from ascend_emulator.verify import inputs

    hashes, means = [], []
    for _ in range(2):
        torch.npu.manual_seed(7)
        x = torch.rand(4096, device="npu")
        hashes.append(inputs.digest(x))
        means.append(round(x.mean().item(), 1))
    return {"repeats": hashes[0] == hashes[1], "hash": hashes[0], "mean": means[0]}


def _graph(function: Callable[[], Any]) -> tuple[Any, Any]:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = function()
    return graph, result


@_program()
def graphs_replay_with_new_inputs() -> Facts:
    x = torch.ones(64, 64).npu()
    graph, y = _graph(lambda: (x @ x).sum())
    graph.replay()
    first = y.item()
    x.fill_(2)
    graph.replay()
    torch.npu.synchronize()
    return {"first": first, "second": y.item()}


@_program()
def graphs_capture_random_numbers() -> Facts:
    graph, y = _graph(lambda: torch.rand(256, device="npu"))
    graph.replay()
    first = y.cpu()
    graph.replay()
    torch.npu.synchronize()
    return {"replays_differ": not torch.equal(first, y.cpu())}


@_program()
def graphs_fork_and_join_streams() -> Facts:
    x, side = torch.ones(64).npu(), torch.npu.Stream()

    def work() -> Any:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y = x * 2
        z = x * 3
        torch.npu.current_stream().wait_stream(side)
        return y + z

    graph, total = _graph(work)
    x.fill_(2)
    graph.replay()
    torch.npu.synchronize()
    return {"sum": total.sum().item()}


@_program()
def graphs_copy_pinned_memory() -> Facts:
    source = torch.arange(16.0).pin_memory()
    target = torch.zeros(16).npu()
    graph, _ = _graph(lambda: target.copy_(source, non_blocking=True))
    source.fill_(5)
    graph.replay()
    torch.npu.synchronize()
    return {"reads_at_replay": target.sum().item() == 80.0}


@_program()
def graphs_share_a_memory_pool() -> Facts:
    x = torch.ones(1 << 20).npu()
    graph, y = _graph(lambda: x + 1)
    other = torch.npu.NPUGraph()
    before = torch.npu.memory_reserved()
    with torch.npu.graph(other, pool=graph.pool()):
        z = x + 2
    reserved = torch.npu.memory_reserved() - before
    graph.replay()
    other.replay()
    torch.npu.synchronize()
    return {
        "more_bytes_reserved": reserved,
        "right": y.sum().item() == 2 << 20 and z.sum().item() == 3 << 20,
    }


@_program()
def graphs_task_groups() -> Facts:
    names = (
        "graph_task_group_begin",
        "graph_task_group_end",
        "graph_task_update_begin",
        "graph_task_update_end",
        "ExternalEvent",
    )
    return {name: hasattr(torch.npu, name) for name in names}


@_program(isolated=True)
def an_error_of_the_device_fails_the_stream() -> Facts:
    """An index out of range; whether and where it is reported, and whether the process
    can go on."""
    table, index = torch.ones(50, 20).npu(), torch.tensor([0, 50]).npu()
    torch.npu.synchronize()
    call = _attempt(lambda: torch.nn.functional.embedding(index, table))
    wait = _attempt(torch.npu.synchronize)
    return {"call": call, "synchronize": wait, "next": _attempt(lambda: (table + 1).sum().item())}


def _limit(what: str, most: int) -> tuple[int, str]:
    """Number of streams or events until one is refused, and the refusal; all are destroyed."""
    from ascend_emulator.verify.refusals import StatusError, call, create

    handles: list[Any] = []
    refusal = "none"
    try:
        while len(handles) < most:
            handles.append(create(what))
    except StatusError as error:
        refusal = str(error)
    for handle in handles:
        call(f"aclrtDestroy{what}", handle)
    return len(handles), refusal


@_program(limit=True)
def limit_of_streams() -> Facts:
    """Streams of aclrtCreateStream until one is refused."""
    streams, refusal = _limit("Stream", MOST_STREAMS)
    return {"streams": streams, "refusal": refusal}


@_program(limit=True)
def limit_of_graphs() -> Facts:
    """Graphs of one operator until one is refused."""
    x = torch.ones(8).npu()
    graphs: list[Any] = []
    refusal = "none"
    pool = None
    try:
        while len(graphs) < MOST_GRAPHS:
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph, pool=pool):
                x + 1
            graphs.append(graph)
            pool = pool or graph.pool()
    except RuntimeError as error:
        refusal = " ".join(described(error)["codes"])
    return {"graphs": len(graphs), "refusal": refusal}


@_program(limit=True)
def limit_of_events() -> Facts:
    """Events of aclrtCreateEvent, until 70,000 or one is refused."""
    events, refusal = _limit("Event", 70_000)
    return {"events": events, "refusal": refusal}
