"""Run by test_communicator.py: two ranks, each with an NPU, in vLLM's own groups for two data-parallel engines with experts.

    python ranks.py

Prints `["<part>", [<of rank 0>, <of rank 1>]]` a line. The ranks are forks, so that torch and vLLM are imported once.
"""

import json
import os
import socket
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import DPMetadata, override_forward_context
from vllm.plugins import load_general_plugins

RANKS = 2
SIZES = [3, 5]


def data(rank: int, *shape: int, salt: int = 0) -> torch.Tensor:
    """What a rank puts in, on the CPU."""
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
    found = {
        "communicator": f"{type(ours).__module__}.{type(ours).__qualname__} on {ours.device}",
        "all_gather 0": ours.all_gather(x, 0),
        "all_gather -1": ours.all_gather(x),
        "reduce_scatter 0": ours.reduce_scatter(x, 0),
        "reduce_scatter -1": ours.reduce_scatter(x),
        "gather": ours.gather(x, dst=1, dim=0),
        "all_gatherv": ours.all_gatherv(mine, sizes=SIZES),
        "all_gatherv alike": ours.all_gatherv(x),
        "all_gatherv transposed": ours.all_gatherv(data(rank, 6, SIZES[rank], salt=3).npu().t(), sizes=SIZES),
        "all_gatherv list": ours.all_gatherv([mine, mine[:, :1].to(torch.int32)], sizes=SIZES),
        "reduce_scatterv": ours.reduce_scatterv(z, 0, SIZES),
        "reduce_scatterv alike": ours.reduce_scatterv(z, 0),
        "reduce_scatterv -1": ours.reduce_scatterv(data(rank, 6, 8, salt=2).npu(), sizes=SIZES),
        "reduce_scatterv_into_output": ours.reduce_scatterv_into_output(z, total, 0, SIZES),
        "the same output": total,
        "reduce_scatterv_into_output alike": ours.reduce_scatterv_into_output(z, same, 0),
        "reduce_scatterv_into_output strided": ours.reduce_scatterv_into_output(z, strided, 0, SIZES),
        "batch_isend_irecv": handed,
        "send and recv": received,
        "broadcast": ours.broadcast(x.clone(), src=1),
        "all_reduce": ours.all_reduce(x.clone()),
    }
    return {name: numbers(value) for name, value in found.items()}


def experts(rank: int) -> dict[str, Any]:
    group = parallel_state.get_ep_group()
    x, weights = data(rank, SIZES[rank], 8).npu(), data(rank, SIZES[rank], 2, salt=1).npu()
    ids, extra = weights.mul(100).to(torch.int32), data(rank, SIZES[rank], 1, salt=2).npu()
    made = data(rank, sum(SIZES), 8, salt=3).npu()
    output = torch.full((SIZES[rank], 8), torch.nan).npu()
    metadata = DPMetadata(torch.tensor(SIZES))
    context = type("Context", (), {"dp_metadata": metadata})()
    with override_forward_context(context), metadata.sp_local_sizes(1):
        found = {
            "manager": type(group.device_communicator.all2all_manager).__name__,
            "dispatch": group.dispatch(x, weights, ids),
            "dispatch extra": group.dispatch(x, weights, ids, extra_tensors=[extra]),
            "dispatch_router_logits": group.dispatch_router_logits(x, weights),
            "combine": group.combine(made),
            "combine_into_output": group.combine_into_output(made, output),
            "the same output": output,
            "allocate_combine_input": group.allocate_combine_input(made.shape, made.dtype, made.device),
        }
    return {name: numbers(value) for name, value in found.items()}


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
    said = {}
    for name, call in calls.items():
        try:
            said[name] = f"returned {call()}"
        except (ValueError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def play(rank: int, port: int) -> dict[str, Any]:
    load_general_plugins()
    torch.npu.set_device(rank)
    parallel = ParallelConfig(
        data_parallel_size=RANKS, data_parallel_rank=rank, enable_expert_parallel=True, data_parallel_master_port=port
    )
    parallel._data_parallel_master_port_list = [port]
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        parallel_state.init_distributed_environment(1, 0, "env://", rank, "hccl")
        parallel_state.initialize_model_parallel(backend="hccl")
        found = {"collectives": collectives(rank), "experts": experts(rank), "refusals": refusals(rank)}
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
    return found


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if not child:
                status = 1
                try:
                    with open(f"{directory}/{rank}", "w") as file:
                        json.dump(play(rank, port), file)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        failed = [os.waitpid(child, 0)[1] for child in children]
        if any(failed):
            sys.exit(f"the ranks ended with {failed}")
        results = [json.loads(Path(directory, str(rank)).read_text()) for rank in range(RANKS)]
    for part in results[0]:
        print(json.dumps([part, [result[part] for result in results]]))


if __name__ == "__main__":
    main()
