# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Run by test_communicator.py: two ranks, each with an NPU, in vLLM's own groups for two
data-parallel engines with experts.

    python ranks.py

Prints `["<part>", [<of rank 0>, <of rank 1>]]` a line. The ranks are forks, so that torch and vLLM
are imported once.
"""

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ascend_communicator.moe import mc2
from ascend_communicator.p2p_link import P2PLink
from ascend_communicator.pyhccl import HCCLError, PyHcclCommunicator
from harness.engines import launcher
from torch.distributed import ReduceOp
from vllm.config import ParallelConfig, VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import DPMetadata, override_forward_context
from vllm.plugins import load_general_plugins

RANKS = 2
SIZES = [3, 5]


def data(rank: int, *shape: int, salt: int = 0) -> torch.Tensor:
    """Input of a rank, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * salt + rank))


def numbers(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu().double().tolist()
    return [numbers(each) for each in value] if isinstance(value, list | tuple) else value


def collectives(rank: int) -> dict[str, Any]:
    group = parallel_state.get_dp_group()
    ours = group.device_communicator
    x, y, z = data(rank, 4, 6).npu(), data(rank, 4, 6, salt=1).npu(), data(rank, 8, 6, salt=2).npu()
    mine = data(rank, SIZES[rank], 6, salt=3).npu()
    total = torch.full((SIZES[rank], 6), torch.nan).npu()
    same = torch.full((4, 6), torch.nan).npu()
    strided = torch.full((6, SIZES[rank]), torch.nan).npu().t()
    handed = torch.empty(SIZES[1 - rank], 6).npu()
    ours.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine, group.ranks[1 - rank], ours.device_group),
            dist.P2POp(dist.irecv, handed, group.ranks[1 - rank], ours.device_group),
        ]
    )
    ours.batch_isend_irecv([])
    if rank == 0:
        ours.send(x)
        received = ours.recv(y.shape, y.dtype)
    else:
        received = ours.recv(x.shape, x.dtype)
        ours.send(y)
    result = {
        "communicator": f"{type(ours).__module__}.{type(ours).__qualname__} on {ours.device}",
        "all_gather 0": ours.all_gather(x, 0),
        "all_gather -1": ours.all_gather(x),
        "reduce_scatter 0": ours.reduce_scatter(x, 0),
        "reduce_scatter -1": ours.reduce_scatter(x),
        "gather": ours.gather(x, dst=1, dim=0),
        "all_gatherv": ours.all_gatherv(mine, sizes=SIZES),
        "all_gatherv alike": ours.all_gatherv(x),
        "all_gatherv transposed": ours.all_gatherv(
            data(rank, 6, SIZES[rank], salt=3).npu().t(), sizes=SIZES
        ),
        "all_gatherv list": ours.all_gatherv([mine, mine[:, :1].to(torch.int32)], sizes=SIZES),
        "reduce_scatterv": ours.reduce_scatterv(z, 0, SIZES),
        "reduce_scatterv alike": ours.reduce_scatterv(z, 0),
        "reduce_scatterv -1": ours.reduce_scatterv(data(rank, 6, 8, salt=2).npu(), sizes=SIZES),
        "reduce_scatterv_into_output": ours.reduce_scatterv_into_output(z, total, 0, SIZES),
        "the same output": total,
        "reduce_scatterv_into_output alike": ours.reduce_scatterv_into_output(z, same, 0),
        "reduce_scatterv_into_output strided": ours.reduce_scatterv_into_output(
            z, strided, 0, SIZES
        ),
        "batch_isend_irecv": handed,
        "send and recv": received,
        "broadcast": ours.broadcast(x.clone(), src=1),
        "all_reduce": ours.all_reduce(x.clone()),
    }
    return {name: numbers(value) for name, value in result.items()}


def experts(rank: int) -> dict[str, Any]:
    group = parallel_state.get_ep_group()
    x, weights = data(rank, SIZES[rank], 8).npu(), data(rank, SIZES[rank], 2, salt=1).npu()
    ids, extra = weights.mul(100).to(torch.int32), data(rank, SIZES[rank], 1, salt=2).npu()
    tokens = data(rank, sum(SIZES), 8, salt=3).npu()
    output = torch.full((SIZES[rank], 8), torch.nan).npu()
    metadata = DPMetadata(torch.tensor(SIZES))
    context = type("Context", (), {"dp_metadata": metadata})()
    with override_forward_context(context), metadata.sp_local_sizes(1):
        result = {
            "manager": type(group.device_communicator.all2all_manager).__name__,
            "dispatch": group.dispatch(x, weights, ids),
            "dispatch extra": group.dispatch(x, weights, ids, extra_tensors=[extra]),
            "dispatch_router_logits": group.dispatch_router_logits(x, weights),
            "combine": group.combine(tokens),
            "combine_into_output": group.combine_into_output(tokens, output),
            "the same output": output,
            "allocate_combine_input": group.allocate_combine_input(
                tokens.shape, tokens.dtype, tokens.device
            ),
        }
    return {name: numbers(value) for name, value in result.items()}


FACTORS = torch.tensor([0.5, -1.0, 2.0, -0.5])


def routed(rank: int, tokens: int, to: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, weights and two different experts per token, of the first ``to`` experts."""
    draw = torch.Generator().manual_seed(50 + rank)
    ids = torch.stack([torch.randperm(to, generator=draw)[:2] for _ in range(tokens)]).int()
    return data(rank, tokens, 64, salt=7), torch.rand(tokens, 2, generator=draw), ids


def ways(rank: int) -> dict[str, Any]:
    """Different numbers of tokens per rank, routed to experts that multiply by a factor; once all
    to the first rank."""
    manager = parallel_state.get_ep_group().device_communicator.all2all_manager
    factors = FACTORS[2 * rank : 2 * rank + 2].npu()
    seen = []

    def experts(
        rows: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        seen.append(counts.tolist())
        out = torch.full_like(rows, torch.nan)
        out[: sum(seen[-1])] = rows[: sum(seen[-1])] * factors.repeat_interleave(counts).unsqueeze(
            1
        ).to(rows.dtype)
        return out

    vars(experts).update(takes_int8=False)
    results: dict[str, Any] = {}
    for name, sizes, to in (("uneven", SIZES, 4), ("one rank", SIZES, 2), ("large", [300, 2], 4)):
        metadata = DPMetadata(torch.tensor(sizes))
        x, weights, ids = routed(rank, sizes[rank], to)
        for asked in ("auto", "allgather", "alltoall", "mc2"):
            for dtype in (torch.float32, torch.bfloat16):
                manager.requested, manager.used, label = asked, set(), f"{name} {asked} {dtype}"
                context = type("Context", (), {"dp_metadata": metadata})()
                with override_forward_context(context), metadata.sp_local_sizes(1):
                    try:
                        message = manager.dispatch_and_combine(
                            x.npu().to(dtype), weights.npu(), ids.npu(), 4, experts
                        )
                    except ValueError as error:
                        message = str(error)
                results[label] = [*manager.used, numbers(message)]
    return results


def alternating(rank: int) -> list[Any]:
    """Steps of a few tokens by mc2 and of many by alltoall in turn, with collectives of the expert
    parallel group in between."""
    group = parallel_state.get_ep_group()
    manager = group.device_communicator.all2all_manager
    manager.requested, manager.used, result = "mc2", set(), []
    for sizes in (SIZES, [300, 2], SIZES, [2, 300], SIZES):
        group.all_reduce(torch.ones(4).npu())
        result.append(step(manager, rank, sizes, FactorExperts(rank)))
    return [sorted(manager.used), *result]


def recreated(rank: int) -> list[int]:
    """Groups of mc2 one after the other. Rank 0 is late: root info of the group before would be
    found by the other."""
    cpu_group, sizes = parallel_state.get_ep_group().cpu_group, []
    for _ in range(2):
        if rank == 0:
            time.sleep(0.5)
        group = mc2.MC2Group(cpu_group, {"hccl_buffer_size": 16})
        sizes.append(group.size)
        group.destroy()
    return sizes


class Streamless(P2PLink):
    """A link on an NPU without a stream left."""

    def _check(self, name: str, *arguments: Any) -> None:
        if name == "aclrtCreateStream":
            raise HCCLError("no stream is left")
        super()._check(name, *arguments)


def streamless(rank: int) -> list[Any]:
    """The error of a link, and the bytes that it leaves allocated."""
    given = [P2PLink.root_info() if rank == 0 else b""]
    dist.broadcast_object_list(given, 0, parallel_state.get_ep_group().cpu_group)
    before, message = torch.npu.mem_get_info()[0], "no error"
    try:
        Streamless(rank, given[0])
    except HCCLError as error:
        message = str(error)
    return [message, before - torch.npu.mem_get_info()[0]]


def quantized(rank: int) -> dict[str, list[Any]]:
    """A step by each backend that sends int8, with experts that take it."""
    manager, result = parallel_state.get_ep_group().device_communicator.all2all_manager, {}
    for manager.requested in ("alltoall", "mc2"):
        experts = FactorExperts(rank)
        experts.takes_int8 = True
        result[manager.requested] = [step(manager, rank, SIZES, experts), experts.dtypes]
    return result


class FactorExperts:
    """A rank's experts, each a factor; int8 rows come with scales."""

    takes_int8 = False

    def __init__(self, rank: int) -> None:
        self.factors, self.dtypes = FACTORS[2 * rank : 2 * rank + 2].npu(), []

    def __call__(
        self, rows: torch.Tensor, counts: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.dtypes.append(str(rows.dtype))
        total = int(counts.sum())
        out = torch.full(rows.shape, torch.nan, dtype=torch.bfloat16, device="npu")
        values = rows[:total] if scale is None else rows[:total] * scale[:total].unsqueeze(1)
        out[:total] = values * self.factors.repeat_interleave(counts).unsqueeze(1).to(values.dtype)
        return out


def step(manager: Any, rank: int, sizes: list[int], experts: FactorExperts) -> Any:
    x, weights, ids = routed(rank, sizes[rank], 4)
    metadata = DPMetadata(torch.tensor(sizes))
    context = type("Context", (), {"dp_metadata": metadata})()
    with override_forward_context(context), metadata.sp_local_sizes(1):
        return numbers(
            manager.dispatch_and_combine(x.npu().bfloat16(), weights.npu(), ids.npu(), 4, experts)
        )


def refusals(rank: int) -> dict[str, str]:
    ours = parallel_state.get_dp_group().device_communicator
    x = torch.zeros(3, 4, device="npu")
    calls = {
        "dimension": lambda: ours.all_gatherv(x, dim=1),
        "how many sizes": lambda: ours.all_gatherv(x, sizes=[3]),
        "sum of sizes": lambda: ours.reduce_scatterv(x, 0, [1, 1]),
        "odd rows": lambda: ours.reduce_scatterv(x, 0),
        "no experts": lambda: ours.dispatch(x, x, x),
        "no experts to combine": lambda: ours.combine(x),
    }
    return refused(calls)


def refused(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    messages = {}
    for name, call in calls.items():
        try:
            messages[name] = f"returned {call()}"
        except (ValueError, RuntimeError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def direct(rank: int) -> dict[str, Any]:
    """The same collectives by pyhccl, on the current stream and on another; and
    unsupported calls."""
    ours, stream = (
        PyHcclCommunicator(parallel_state.get_dp_group().cpu_group, rank),
        torch.npu.Stream(),
    )
    x, y, z = data(rank, 4, 6).npu(), data(rank, 4, 6, salt=1).npu(), data(rank, 8, 6, salt=2).npu()
    mine = data(rank, SIZES[rank], 6, salt=3).npu()
    results: dict[str, Any] = {}
    for where, on in (("current", None), ("own", stream)):
        out = {name: torch.full(shape, torch.nan).npu() for name, shape in SHAPES.items()}
        out |= {"all_reduce in place": x + 0, "broadcast": x * 1}
        out["reduce_scatterv"] = torch.full((SIZES[rank], 6), torch.nan).npu()
        out["all_to_all"] = torch.full((sum(row[rank] for row in SENT), 6), torch.nan).npu()
        stream.wait_stream(torch.npu.current_stream())
        ours.all_reduce(out["all_reduce in place"], out["all_reduce in place"], stream=on)
        out["all_reduce max"] = ours.all_reduce(x, op=ReduceOp.MAX, stream=on)
        ours.reduce(out["reduce"], x, 1, stream=on)
        ours.all_gather(out["all_gather"], x, stream=on)
        ours.all_gatherv(out["all_gatherv"], mine, SIZES, stream=on)
        ours.reduce_scatter(out["reduce_scatter"], x, stream=on)
        ours.reduce_scatterv(out["reduce_scatterv"], z, SIZES, stream=on)
        ours.broadcast(out["broadcast"], 1, stream=on)
        ours.all_to_all(
            out["all_to_all"],
            x[: sum(SENT[rank])],
            [row[rank] for row in SENT],
            SENT[rank],
            stream=on,
        )
        (ours.send if rank == 0 else ours.recv)(
            x if rank == 0 else out["send"], 1 - rank, stream=on
        )
        with ours.grouped():
            ours.send(y, 1 - rank, stream=on)
            ours.recv(out["both ways"], 1 - rank, stream=on)
        fresh = x + 0
        # Enough operators that some are still in torch_npu's queue when HCCL is called.
        for _ in range(400):
            fresh = fresh.neg()
        if on:
            on.wait_stream(torch.npu.current_stream())
        out["all_reduce"] = ours.all_reduce(fresh, stream=on)
        torch.npu.current_stream().wait_stream(stream)
        results[where] = {name: numbers(value) for name, value in out.items()}
    results["captured"] = captured(rank, ours)
    cpu_group, device_group = (
        getattr(parallel_state.get_dp_group(), name) for name in ("cpu_group", "device_group")
    )
    calls = {
        "dtype": lambda: ours.all_reduce(x.to(torch.complex64)),
        "another dtype": lambda: ours.all_gather(out["all_gather"].int(), x),
        "operation": lambda: ours.all_reduce(x, op=ReduceOp.BAND),
        "HCCL refuses": lambda: ours.all_reduce(x.to(torch.uint8)),
        "device": lambda: ours.broadcast(torch.zeros(2), 0),
        "strides": lambda: ours.all_reduce(x.t(), torch.empty_like(x)),
        "size": lambda: ours.all_gather(x, x),
        "sizes": lambda: ours.all_gatherv(z, x, [4, 5]),
        "group": lambda: PyHcclCommunicator(device_group, rank),
        "library": lambda: PyHcclCommunicator(cpu_group, rank, "libhccl-of-nobody.so"),
        "closed": lambda: ours.destroy() or ours.destroy() or ours.all_reduce(x),
        "closed group": ours.group_start,
    }
    results["refusals"] = refused(calls)
    return results


SHAPES = {
    "reduce": (4, 6),
    "all_gather": (8, 6),
    "all_gatherv": (8, 6),
    "reduce_scatter": (2, 6),
    "send": (4, 6),
    "both ways": (4, 6),
}
SENT = [[1, 2], [3, 1]]  # rows of each rank to each


def captured(rank: int, ours: PyHcclCommunicator) -> list[Any]:
    """A graph with operators around an all-reduce, replayed with other contents."""
    x, graph = torch.zeros(4, 6).npu(), torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph):
        before = x * 2
        total = ours.all_reduce(before)
        after = total + x
    result = [numbers(x.sum())]
    for salt in (4, 5, 6):
        x.copy_(data(rank, 4, 6, salt=salt))
        graph.replay()
        result.append(numbers(after))
    return result


def play(rank: int, port: int) -> dict[str, Any]:
    load_general_plugins()
    torch.npu.set_device(rank)
    parallel = ParallelConfig(
        data_parallel_size=RANKS,
        data_parallel_rank=rank,
        enable_expert_parallel=True,
        data_parallel_master_port=port,
    )
    parallel._data_parallel_master_port_list = [port]
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        parallel_state.init_distributed_environment(1, 0, "env://", rank, "hccl")
        parallel_state.initialize_model_parallel(backend="hccl")
        result = {
            "collectives": collectives(rank),
            "experts": experts(rank),
            "ways": ways(rank),
            "refusals": refusals(rank),
        }
        result |= {
            "alternating": alternating(rank),
            "quantized": quantized(rank),
            "direct": direct(rank),
            "recreated": recreated(rank),
            "streamless": streamless(rank),
        }
        parallel_state.destroy_model_parallel()
        result["options"] = options(rank)
    return result


def options(rank: int) -> dict[str, Any]:
    """New groups, one with options, in which a rank waits for the other until the timeout."""
    given_groups = {"dp": {"buffer_size": 64, "exec_timeout": 3}}
    # The default takes no mc2 within a machine of this chip.
    given_options = {"communicator": {"groups": given_groups, "all2all": "mc2"}}
    get_current_vllm_config().additional_config = {"ascend": given_options}
    parallel_state.initialize_model_parallel(backend="hccl")
    groups = {"dp": parallel_state.get_dp_group(), "ep": parallel_state.get_ep_group()}
    given = {
        name: dict(group.device_group._get_backend(torch.device("npu")).options.hccl_config)
        for name, group in groups.items()
    }
    manager = groups["ep"].device_communicator.all2all_manager
    again = step(manager, rank, SIZES, FactorExperts(rank))
    x, waited = torch.ones(4).npu(), []
    for group in groups.values():
        group.all_reduce(x)
    torch.npu.synchronize()
    if rank == 0:
        began, message = time.monotonic(), "no error"
        try:
            groups["dp"].all_reduce(x)
            torch.npu.synchronize()
        except RuntimeError as error:
            message = str(error)
        waited = [time.monotonic() - began, message]
    dist.barrier(groups["dp"].cpu_group)
    return {"given": given, "waited": waited, "again": again, "used": sorted(manager.used)}


def main() -> None:
    results = launcher.run_ranks("ranks.py", RANKS, play)
    for part in results[0]:
        print(json.dumps([part, [result[part] for result in results]]))


if __name__ == "__main__":
    main()
