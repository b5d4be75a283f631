# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Graph mode and capture sizes of a model runner: the same on all ranks, and limited by the NPU's
streams.

A graph holds one stream of the NPU for each stream that it captured, until it is freed. In
piecewise mode every piece between two attention layers is a graph, so that sizes times layers
reaches the limit.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm import envs
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.distributed import get_dp_group, get_ep_group, get_pcp_group, get_pp_group, get_tp_group
from vllm.distributed.parallel_state import get_world_group, is_global_first_rank
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport

from ascend_platform import chips, host, options
from ascend_platform.logger import logger
from ascend_platform.overrides.guard import without

RESERVED_STREAMS = 184
"""Streams left to torch_npu's stream pools, HCCL and other processes on the NPU."""

HCCL_STREAMS = 40
"""Streams that HCCL itself takes for a communicator where it does not schedule collectives on the
vector cores (from vllm-ascend's ``update_aclgraph_sizes``)."""

EXPANSION_MODE_AIV = 3
"""HCCL's number of the mode, and that of a mode with errors instead of a fallback by the next."""

OUT_OF_STREAMS = ("207008", "207005", "Alloc sq cq fail", "Insufficient_Stream_Resources")
"""CANN's error codes when no stream is left (vllm-project/vllm-ascend, issues 9564 and 9691), and
texts. Drivers before 25.5.1 have the third (issues 5213 and 8393, pull request 10555), which HCCL
and operators report with codes of their own."""

ENCODER_GRAPHS = "num_encoder_graphs"
"""Attribute of a compilation_config; graphs of the vision encoder, which have no capture sizes."""


class OutOfStreamsError(RuntimeError):
    """A capture failed on some rank because the NPU has no stream left."""


class GraphSizes:
    """The capture sizes of an engine's graphs, which it limits to what the NPU's streams allow.

    Args:
        mode: the graph mode that vLLM has chosen.
        pieces: graphs of one size in piecewise mode, which are the parts of the model between
            attention layers.
        max_decode_tokens: tokens of the largest decode step, the limit of decode-only full graphs.
    """

    def __init__(
        self, vllm_config: Any, mode: CUDAGraphMode, pieces: int, max_decode_tokens: int
    ) -> None:
        self._config, self._mode = vllm_config, mode
        self._pieces, self._max_decode_tokens = pieces, max_decode_tokens
        self._compilation = vllm_config.compilation_config

    def limit(self) -> bool:
        """Remove sizes until the graphs fit; returns whether any was removed."""
        requested = sorted(self._compilation.cudagraph_capture_sizes)
        kept = sizes_that_fit(requested, self._num_streams)
        if kept:
            self._set(kept)
        return kept is not None

    def halve(self, reason: str) -> bool:
        """Drop the graphs of a capture for which the streams ran out, and keep half of the sizes.

        Returns:
            False if there was one size.
        """
        torch.npu.synchronize()
        clear_graphs(self._compilation)
        torch.npu.empty_cache()
        kept = half_of_sizes(sorted(self._compilation.cudagraph_capture_sizes), reason)
        if kept:
            self._set(kept)
        return bool(kept)

    def renew_pool(self) -> Any:
        """Capture into a new memory pool from now on, and return it.

        torch_npu cannot capture into a pool after a failed start of a capture (beginAllocateToPool:
        already recording), and in a pool that is shared a replay of another engine overwrites this
        one's outputs.
        """
        pool = current_platform.graph_pool_handle()
        for wrapper in wrappers_of(self._compilation):
            wrapper.graph_pool = pool
        return pool

    def _set(self, sizes: list[int]) -> None:
        self._compilation.cudagraph_capture_sizes = sizes
        self._compilation.max_cudagraph_capture_size = sizes[-1]

    def _num_streams(self, sizes: list[int]) -> int:
        """Count the streams of the graphs of these sizes, and those of HCCL."""
        graphs = num_graphs(self._mode, sizes, self._pieces, self._max_decode_tokens)
        graphs += getattr(self._compilation, ENCODER_GRAPHS, 0)
        return num_streams_here(graphs, self._config)


def least_support(own: int) -> int:
    """Return the least support of graphs among the pipeline's stages, as a value of
    ``AttentionCGSupport``.

    A stage may have no attention, or other attention. With a graph mode of its own it would capture
    by itself, and its waits for the other ranks, at each capture, would be answered by their next
    collective.
    """
    return own if get_pp_group().world_size == 1 else _min_over_ranks(own)


def support_of_other_stages(vllm_config: Any, backends: list[set[Any]], groups: list[Any]) -> Any:
    """Return a backend with :func:`least_support`, None if this stage supports no more."""
    own = min(
        (
            backend.get_builder_cls().get_cudagraph_support(vllm_config, group.kv_cache_spec).value
            for of_group, group in zip(backends, groups, strict=False)
            for backend in of_group
        ),
        default=AttentionCGSupport.ALWAYS.value,
    )
    least = least_support(own)
    if least == own:
        return None

    class AnotherStage:
        """The name is part of vLLM's line that says why the mode has changed."""

        @classmethod
        def get_builder_cls(cls) -> Any:
            return cls

        @staticmethod
        def get_cudagraph_support(vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
            return AttentionCGSupport(least)

    return AnotherStage


def sizes_that_fit(
    requested: list[int], num_streams: Callable[[list[int]], int]
) -> list[int] | None:
    """Return the sizes to capture where the NPU has too few streams for all of them, and warn; None
    if it has enough.

    All are captured where CANN reuses the streams of graphs on each rank; if they run out all the
    same, fewer are.
    """
    chip = chips.chip()
    limit = chip.family.streams
    fitting = len(requested)
    if not host.reuses_streams():
        fitting = max_sizes_that_fit(requested, limit - RESERVED_STREAMS, num_streams)
    count = _min_over_ranks(fitting)
    if count == len(requested):
        return None
    kept = subsample_sizes(requested, count)
    _warn(
        "capturing graphs of %d of the %d requested sizes (%s tokens): all sizes need %d streams,"
        " and %s has %d, %d of them reserved; steps are padded to the next captured size. fix:"
        ' fewer cudagraph_capture_sizes, or "cudagraph_mode": "FULL_DECODE_ONLY", in'
        " --compilation-config",
        count,
        len(requested),
        ", ".join(map(str, kept)),
        num_streams(requested),
        chip.name,
        limit,
        RESERVED_STREAMS,
    )
    return kept


def half_of_sizes(sizes: list[int], reason: str) -> list[int]:
    """Return the sizes to capture after a capture for which the streams ran out, and warn; none if
    there was one size."""
    if len(sizes) == 1:
        _warn(
            "graphs disabled: %s; steps run eagerly. fix: end other processes of the NPU, whose"
            " graphs hold its streams",
            reason,
        )
        return []
    kept = subsample_sizes(sizes, len(sizes) // 2)
    tokens = ", ".join(map(str, kept))
    _warn(
        "capturing graphs of %d of %d sizes (%s tokens): %s", len(kept), len(sizes), tokens, reason
    )
    return kept


def wrappers_of(compilation_config: Any) -> list[CUDAGraphWrapper]:
    """The wrappers of an engine's models; the draft model's configuration differs, but not its
    compilation_config."""
    return [
        wrapper
        for wrapper in CUDAGraphWrapper._all_instances
        if wrapper.compilation_config is compilation_config
    ]


@contextlib.contextmanager
def without_other_engines(compilation_config: Any) -> Iterator[None]:
    """Hide the wrappers of other engines of the process, whose graphs vLLM would clear when it
    estimates the memory of graphs."""
    others = set(CUDAGraphWrapper._all_instances).difference(wrappers_of(compilation_config))
    with without("vllm.compilation.cuda_graph:CUDAGraphWrapper._all_instances", others):
        yield


def clear_graphs(compilation_config: Any) -> None:
    """Drop the graphs of an engine's models, whose wrappers torch.compile keeps for the life of the
    process."""
    for wrapper in wrappers_of(compilation_config):
        wrapper.clear_graphs()


@contextlib.contextmanager
def failing_on_all_ranks(group: Any = None) -> Iterator[None]:
    """Context of a capture: if one rank runs out of streams in it, fail on all; the others would
    hang in a collective.

    Args:
        group: the ranks that capture; the world group unless given.

    Raises:
        OutOfStreamsError: at the end of the context.
    """
    failure = ""
    try:
        yield
    except RuntimeError as error:
        failure = str(error)
        if not any(sign.lower() in failure.lower() for sign in OUT_OF_STREAMS):
            raise
    if _min_over_ranks(0 if failure else 1, group) == 0:
        raise OutOfStreamsError(
            failure.strip().splitlines()[-1] if failure else "another rank ran out of streams"
        )


@contextlib.contextmanager
def freeze_gc() -> Iterator[None]:
    """Collect no garbage during captures, as vLLM, whose context also ends what is frozen.

    Each of its later collections, four of them while an engine starts, would walk through all
    that is imported: 0.4 s.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    if not envs.VLLM_ENABLE_CUDAGRAPH_GC:
        gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()


def num_streams_here(graphs: int, vllm_config: Any) -> int:
    """Count the streams that graphs take in this engine's layout."""
    is_moe = vllm_config.model_config.is_moe
    every = (get_tp_group(), get_dp_group(), get_pcp_group(), *([get_ep_group()] if is_moe else []))
    groups = [group for group in every if group.world_size > 1]
    own = 1 + (is_moe and options.of(options.Platform, vllm_config).shared_experts_stream)
    return num_streams(graphs, len(groups), sum(map(_is_on_vector_cores, groups)), own)


def _is_on_vector_cores(group: Any) -> bool:
    """Whether HCCL schedules a group's collectives on the vector cores: by the group's mode,
    otherwise by the mode of the environment."""
    backend = group.device_group._get_backend(torch.device("npu"))
    if mode := backend.options.hccl_config.get("hccl_op_expansion_mode"):
        return bool(mode >= EXPANSION_MODE_AIV)
    return os.environ.get("HCCL_OP_EXPANSION_MODE") == "AIV"


def num_streams(graphs: int, groups: int, on_vector_cores: int, own: int = 1) -> int:
    """Count the streams that graphs take.

    Each graph has its own, and for each process group whose collectives it contains one more if
    HCCL schedules them on the vector cores, otherwise two.

    Args:
        on_vector_cores: how many of the groups' collectives HCCL schedules there.
        own: streams on which a step computes.
    """
    others = groups - on_vector_cores
    return graphs * (own + on_vector_cores + 2 * others) + HCCL_STREAMS * others


def num_graphs(mode: CUDAGraphMode, sizes: list[int], pieces: int, max_decode_tokens: int) -> int:
    """Count the graphs of these capture sizes.

    Args:
        pieces: graphs of one size in piecewise mode, which are the parts of the model between
            attention layers.
        max_decode_tokens: tokens of the largest decode step, the limit of decode-only full graphs.
    """
    piecewise = pieces * len(sizes) if mode.has_mode(CUDAGraphMode.PIECEWISE) else 0
    full = [size for size in sizes if size <= max_decode_tokens or not mode.separate_routine()]
    return piecewise + (len(full) if mode.has_mode(CUDAGraphMode.FULL) else 0)


def max_sizes_that_fit(
    sizes: list[int], max_streams: int, num_streams: Callable[[list[int]], int]
) -> int:
    """Count the evenly spaced sizes that need at most ``max_streams``; at least 1."""
    count = len(sizes)
    while count > 1 and num_streams(subsample_sizes(sizes, count)) > max_streams:
        count -= 1
    return count


def subsample_sizes(sizes: list[int], count: int) -> list[int]:
    """Select ``count`` evenly spaced sizes, with the first and the last; the last if there is only
    one."""
    if count == 1:
        return sizes[-1:]
    return [sizes[round(i * (len(sizes) - 1) / (count - 1))] for i in range(count)]


def _min_over_ranks(number: int, group: Any = None) -> int:
    """Return the minimum over all ranks of the group, or of the world group."""
    group = group or get_world_group()
    if group.world_size > 1:
        found = torch.tensor(number)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        number = int(found)
    return number


def _warn(message: str, *arguments: object) -> None:
    if is_global_first_rank():
        logger.warning(message, *arguments)
