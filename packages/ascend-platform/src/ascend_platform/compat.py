"""What some of the supported versions of vLLM lack; a function here goes once the lowest of them has it.

Whether it is needed is asked of vLLM's code, never of its version. ``until``, the first vLLM that has what is missing, is for
the tests (``tests/plugins/test_compat.py``), which fail when no supported vLLM is below it, and for the table in the
documentation.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.utils import torch_utils
from vllm.v1.worker import block_table, gpu_worker


class Shim(NamedTuple):
    until: str
    needed: bool
    function: Callable[..., Any]


SHIMS: dict[str, Shim] = {}


def shim(*, until: str, lacks: str, needed: bool, otherwise: Callable[..., Any]) -> Callable[[Callable], Callable[..., Any]]:
    """Use the decorated function where it is needed, and ``otherwise``, which is what to write once it is gone, elsewhere."""

    def choose(function: Callable[..., Any]) -> Callable[..., Any]:
        SHIMS[function.__name__] = Shim(until, needed, function)
        return function if needed else otherwise

    return choose


@shim(
    until="0.32",
    lacks="``Worker._init_workspace_and_model_runner``, which makes the runner by a method that can be overridden",
    needed=not hasattr(gpu_worker.Worker, "_init_workspace_and_model_runner"),
    otherwise=lambda worker: worker._init_workspace_and_model_runner(),
)
def init_workspace_and_model_runner(worker: Any) -> None:
    """Do what 0.31 has at the end of ``Worker.init_device`` instead."""
    config = worker.vllm_config
    ubatches = 2 if config.parallel_config.enable_dbo else 1
    lanes = gpu_worker._num_workspace_lanes(config, worker.use_v2_model_runner)
    gpu_worker.init_workspace_manager(worker.device, ubatches, lanes)
    worker.model_runner = worker._make_model_runner()
    if worker.rank == 0:
        gpu_worker.report_usage_stats(config)


@shim(
    until="0.32",
    lacks="block tables in the KV cache's own blocks: it splits these into the attention's, and places tokens by both",
    needed=hasattr(block_table.BlockTable, "map_to_kernel_blocks"),
    otherwise=lambda compute: compute,
)
def slot_mapping_kernel(compute: Callable[..., None]) -> Callable[..., None]:
    """Take 0.31's arguments of ``ComputeSlotMappingKernel.kernel`` for a function with 0.32's.

    There are two more: ``block_size`` of the attention, before ``slot_mapping``, and ``BLOCKS_PER_KV_BLOCK``, after
    ``KV_CACHE_BLOCK_SIZE``, their product. The table is of the attention's blocks, so a token's place follows from these alone.
    """
    return lambda *arguments: compute(*arguments[:6], arguments[7], arguments[6], *arguments[10:])


@shim(
    until="0.32",
    lacks="another seed for each data-parallel engine, whose index ``set_random_seed`` does not take",
    needed="data_parallel_index" not in inspect.signature(torch_utils.set_random_seed).parameters,
    otherwise=torch_utils.set_random_seed,
)
def set_random_seed(seed: int | None, data_parallel_index: int = 0) -> None:
    """Give all of them the same seed, as 0.31 does."""
    torch_utils.set_random_seed(seed)
