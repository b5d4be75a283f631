# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Process groups of a worker: communicators that only requests use are created early, and the end
of the process is bounded."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from vllm.config import VllmConfig
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    get_dcp_group,
    get_pp_group,
    get_tp_group,
)
from vllm.distributed.parallel_state import (
    GroupCoordinator,
    get_pcp_group,
    model_parallel_is_initialized,
)
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from ascend_platform.errors import RefusedError
from ascend_platform.logger import logger

DESTROY_SECONDS = 30.0
"""For destroying the process groups at exit, which waits for pending collectives, hence for other
ranks."""


def create_communicators(vllm_config: VllmConfig, device: torch.device) -> None:
    """Create the communicators that vLLM's profile run does not use, so that their buffers are
    taken off the KV cache's budget.

    HCCL allocates a communicator's buffers at its first call: between pipeline stages and for
    decode context parallelism that would be the first request, when the KV cache has the memory.
    """
    pp, dcp = get_pp_group(), get_dcp_group()
    token = torch.zeros(1, device=device)
    if pp.world_size > 1:
        if not pp.is_first_rank:
            dist.recv(token, pp.prev_rank, group=pp.device_group)
        if not pp.is_last_rank:
            dist.send(token, pp.next_rank, group=pp.device_group)
        external = vllm_config.parallel_config.distributed_executor_backend == "external_launcher"
        # sampled tokens are broadcast
        if external or vllm_config.scheduler_config.async_scheduling:
            create_communicator_of_broadcasts(pp.device_group, pp.last_rank, device)
    if dcp.world_size > 1:
        dist.all_reduce(token, group=dcp.device_group)
    torch.npu.synchronize()


def create_communicator_of_broadcasts(
    group: dist.ProcessGroup, source: int, device: torch.device
) -> None:
    """Create the communicator of a group that broadcasts, by a first broadcast."""
    dist.broadcast(torch.zeros(1, device=device), source, group=group)
    torch.npu.synchronize()


def check_stages(vllm_config: VllmConfig, specs: Iterable[KVCacheSpec]) -> None:
    """Refuse pipeline stages if some have no attention, or no states, and each rank has its own
    scheduler.

    Under vLLM's external launcher a rank schedules by its own cache, and such stages would schedule
    other tokens.

    Raises:
        RefusedError: on all ranks.
    """
    pp, launcher = get_pp_group(), vllm_config.parallel_config.distributed_executor_backend
    if launcher != "external_launcher" or pp.world_size == 1:
        return
    types = {"states" if isinstance(spec, MambaSpec) else "attention" for spec in specs}
    own = " and ".join(sorted(types))
    stages: list[str] = [""] * pp.world_size
    dist.all_gather_object(stages, own, group=pp.cpu_group)
    if len(set(stages)) > 1:
        raise RefusedError(
            f"the pipeline stages' layers have {', '.join(stages)}: the external launcher, which"
            " schedules for each rank by its own cache, supports stages with the same layer types;"
            " fix: --distributed-executor-backend mp, or VLLM_PP_LAYER_PARTITION"
        )


def _engine_groups() -> list[GroupCoordinator]:
    """Groups that together reach all ranks of the engine."""
    if not model_parallel_is_initialized():
        return []
    return [get_tp_group(), get_pcp_group(), get_pp_group()]


@contextlib.contextmanager
def raising_on_last_rank() -> Iterator[None]:
    """Suppress exceptions on all ranks of the engine but the last, for failures that all ranks have.

    vLLM's multiprocessing executor reads the ranks' responses up to the first failure, and would
    take the others for those of its next call.
    """
    try:
        yield
    except Exception:
        if all(group.is_last_rank for group in _engine_groups()):
            raise


@contextlib.contextmanager
def agreement() -> Iterator[None]:
    """Raise on all ranks of the engine if the context fails on one.

    Raises:
        RuntimeError: another rank's error.
    """
    error, message = None, ""
    try:
        yield
    except Exception as caught:
        error, message = caught, str(caught) or repr(caught)
    for group in _engine_groups():
        messages = [""] * group.world_size
        dist.all_gather_object(messages, message, group=group.cpu_group)
        message = next(filter(None, messages), "")
    if message:
        raise error or RuntimeError(message)


def destroy() -> None:
    """Destroy the remaining process groups at exit, as vLLM's engine does on shutdown, or end the
    process after a time.

    torch_npu destroys them in an exit handler of its own
    (``torch_npu/_init/core/runtime_lifecycle.py``), and an engine in the main process, which is
    finalized after that, then fails. This handler is registered later, so it runs earlier.
    """
    if not dist.is_initialized():
        return
    timer = threading.Timer(DESTROY_SECONDS, _give_up)
    timer.daemon = True  # goes on during torch_npu's exit handler
    timer.start()
    destroy_model_parallel()
    destroy_distributed_environment()


def _give_up() -> None:
    logger.error(
        "destroying the process groups timed out after %g s; exiting anyway", DESTROY_SECONDS
    )
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(1)
