# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Shims for what some supported versions of vLLM lack; each is removed once the lowest supported
version includes it.

Whether it is needed is determined from vLLM's code, never from its version. ``until``, the first
vLLM that has what is missing, is for the tests (``tests/plugins/test_compat.py``), which fail when
no supported vLLM is below it, and for the table in the documentation.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.platforms import Platform, current_platform
from vllm.utils import torch_utils
from vllm.v1.worker import block_table, gpu_worker

from ascend_platform.overrides.guard import override


class Shim(NamedTuple):
    until: str
    needed: bool
    function: Callable[..., Any]


SHIMS: dict[str, Shim] = {}


def shim(
    *, until: str, lacks: str, needed: bool, otherwise: Callable[..., Any]
) -> Callable[[Callable], Callable[..., Any]]:
    """Use the decorated function where it is needed, elsewhere ``otherwise``, which replaces the
    shim once it is removed."""

    def choose(function: Callable[..., Any]) -> Callable[..., Any]:
        SHIMS[function.__name__] = Shim(until, needed, function)
        return function if needed else otherwise

    return choose


@shim(
    until="0.32",
    lacks=(
        "``Worker._init_workspace_and_model_runner``, which creates the runner by a method that can"
        " be overridden"
    ),
    needed=not hasattr(gpu_worker.Worker, "_init_workspace_and_model_runner"),
    otherwise=lambda worker: worker._init_workspace_and_model_runner(),
)
def init_workspace_and_model_runner(worker: Any) -> None:
    """The code that 0.31 has at the end of ``Worker.init_device`` instead."""
    config = worker.vllm_config
    ubatches = 2 if config.parallel_config.enable_dbo else 1
    lanes = gpu_worker._num_workspace_lanes(config, worker.use_v2_model_runner)
    gpu_worker.init_workspace_manager(worker.device, ubatches, lanes)
    worker.model_runner = worker._make_model_runner()
    if worker.rank == 0:
        gpu_worker.report_usage_stats(config)


@shim(
    until="0.32",
    lacks=(
        "block tables of KV cache blocks: it splits them into the attention's blocks, and computes"
        " slots from both"
    ),
    needed=hasattr(block_table.BlockTable, "map_to_kernel_blocks"),
    otherwise=lambda compute: compute,
)
def slot_mapping_kernel(compute: Callable[..., None]) -> Callable[..., None]:
    """Adapt a function with 0.32's arguments of ``ComputeSlotMappingKernel.kernel`` to 0.31.

    0.31 has two more: ``block_size`` of the attention, before ``slot_mapping``, and
    ``BLOCKS_PER_KV_BLOCK``, after ``KV_CACHE_BLOCK_SIZE``, which is one times the other. The table
    contains the attention's blocks, and only these determine a token's slot.
    """
    return lambda *arguments: compute(*arguments[:6], arguments[7], arguments[6], *arguments[10:])


@shim(
    until="0.32",
    lacks=(
        "a different seed for each data-parallel engine: ``set_random_seed`` has no argument for"
        " its index"
    ),
    needed="data_parallel_index" not in inspect.signature(torch_utils.set_random_seed).parameters,
    otherwise=torch_utils.set_random_seed,
)
def set_random_seed(seed: int | None, data_parallel_index: int = 0) -> None:
    """Give all engines the same seed, as 0.31 does."""
    torch_utils.set_random_seed(seed)


@shim(
    until="0.32",
    lacks=(
        "``Platform.get_mla_prefill_backend_cls``, by which a platform gives the backend of latent"
        " attention's prefills"
    ),
    needed=not hasattr(Platform, "get_mla_prefill_backend_cls"),
    otherwise=lambda: None,
)
def ask_platform_for_mla_prefill_backend() -> None:
    """Ask the platform, because 0.31's default requires FlashAttention."""
    choose = current_platform.get_mla_prefill_backend_cls
    override("vllm.v1.attention.backends.mla.prefill.selector:get_mla_prefill_backend", choose)
