# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's GPU worker on the NPU, for both model runners: device, process groups and the KV cache's
memory budget."""

import atexit
import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from vllm import envs
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.model_executor.model_loader import register_model_loader
from vllm.platforms import current_platform
from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.utils.gc_utils import freeze_gc_heap, maybe_attach_gc_debug_callback
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.mem_utils import MemorySnapshot
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.utils import request_memory
from vllm.v1.worker.worker_base import CompilationTimes

from ascend_platform import ops
from ascend_platform.activation import activate
from ascend_platform.attention.kv_cache import LAYOUT
from ascend_platform.config import allocator, architectures, compilation, kv_connectors, runners
from ascend_platform.errors import RefusedError
from ascend_platform.graph import capture_sizes
from ascend_platform.logger import logger
from ascend_platform.observability import metrics
from ascend_platform.observability.profiler import NPUProfiler
from ascend_platform.overrides import guard, shims
from ascend_platform.plugins import slots
from ascend_platform.process import replacements, sockets, watchdog
from ascend_platform.worker import cores, process_groups, sleep_mode
from ascend_platform.worker.sleep_mode import VirtualMemoryBackend, notify_awake


class NPUWorker(Worker):
    """vLLM's GPU worker with an NPU as its device."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        activate(vllm_config)
        ops.register()
        architectures.register()
        guard.install(
            "common", "graph.acl_graph", "worker.torch_npu_view", "observability.profiler"
        )
        if vllm_config.use_v2_model_runner:
            guard.override("vllm.triton_utils.importing:HAS_TRITON", True)
        super().__init__(vllm_config, *args, **kwargs)
        sockets.replace_foreign_directory()
        directory = os.environ.get("VLLM_RPC_BASE_PATH")
        if directory and self.distributed_init_method.startswith("file://"):
            # A worker that dies leaves this file behind; the directory is removed with the main
            # process.
            name = self.distributed_init_method.rpartition("/")[2]
            self.distributed_init_method = f"file://{directory}/{name}"

    def init_device(self) -> None:
        """Open the device, initialize the process groups, take a memory snapshot and create the
        model runner.

        Raises:
            RuntimeError: there are fewer visible NPUs than local ranks.
        """
        parallel = self.parallel_config
        if parallel.assigned_physical_gpu_ids is not None:
            # vLLM assigns devices to the data-parallel engines that it starts
            # (vllm/v1/engine/utils.py:298).
            set_assigned_physical_gpu_ids(parallel.assigned_physical_gpu_ids)
            num_devices = len(parallel.assigned_physical_gpu_ids)
        else:
            num_devices = torch.npu.device_count()
            is_ours = parallel.distributed_executor_backend not in ("ray", "external_launcher")
            is_ours = is_ours and parallel.data_parallel_backend != "ray"
            if is_ours and parallel.nnodes_within_dp == 1:
                # Other engines on the node see all devices and use them in order.
                local_dp_rank = parallel.data_parallel_rank_local
                if local_dp_rank is None:
                    local_dp_rank = parallel.data_parallel_index
                self.local_rank += parallel.world_size * local_dp_rank
        if self.local_rank >= num_devices:
            raise RefusedError(
                f"rank {self.rank} needs NPU {self.local_rank}, but {num_devices} are visible; fix:"
                " lower --tensor-parallel-size, --pipeline-parallel-size or --data-parallel-size,"
                f" or list more NPUs in {current_platform.device_control_env_var}"
            )
        index = current_platform.logical_device_id_to_visible_device_id(self.local_rank)
        self.device = torch.device("npu", index)
        torch.npu.set_device(self.device)
        # CANN's default on 310P and 910A compiles each operator for each new shape, which takes
        # seconds.
        torch.npu.set_compile_mode(jit_compile=False)
        self._set_expandable_segments()
        self._set_task_queue()
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        of_first_node = parallel.data_parallel_index < parallel.data_parallel_size_local
        is_remote = parallel.node_rank > 0 or not of_first_node
        is_spawned = parallel.distributed_executor_backend in ("mp", "uni")
        if is_remote and is_spawned and torch.distributed.get_rank():
            watchdog.exit_when_rank_0_exits()
        atexit.register(process_groups.destroy)
        shims.set_random_seed(self.model_config.seed)
        # Memory is measured eight times before vLLM freezes it, with a collection of 0.4 s each.
        freeze_gc_heap()
        torch.npu.empty_cache()
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)
        process_groups.create_communicators(self.vllm_config, self.device)
        shims.init_workspace_and_model_runner(self)

    def _set_expandable_segments(self) -> None:
        """Let the allocator's segments grow, which fragments less, unless the user has set the
        allocator.

        Not with sleep mode, whose memory comes from pools, nor with KV transfer, which registers
        the cache's memory with transports that are not known to take memory of several mappings.
        """
        if not allocator.is_set():
            transfers = self.vllm_config.kv_transfer_config is not None
            expands = not self.model_config.enable_sleep_mode and not transfers
            torch.npu.memory._set_allocator_settings(f"expandable_segments:{expands}")

    def _set_task_queue(self) -> None:
        """Move the preparation of operators to torch_npu's launching thread too, unless the user
        has set ``TASK_QUEUE_ENABLE``.

        Level 2 is for inference (``torch_npu/npu/utils.py``, set_task_queue_enable), and torch_npu
        captures no graphs with it.
        """
        if "TASK_QUEUE_ENABLE" not in os.environ:
            torch.npu.set_task_queue_enable(1 if compilation.has_graphs(self.vllm_config) else 2)

    def load_model(self, **options: Any) -> None:
        """Load the model as vLLM does, after registering the load formats and weight transfer
        engines offered by components."""
        engine = slots.offered("weight_transfer.hccl")
        if engine and "hccl" not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine("hccl", *engine.rsplit(".", 1))
        for load_config in filter(None, (self.load_config, _draft_load_config(self.vllm_config))):
            if loader := slots.offered(f"load_format.{load_config.load_format}"):
                register_model_loader(load_config.load_format)(resolve_obj_by_qualname(loader))
        if self.parallel_config.use_sequence_parallel_moe:
            guard.install("common", "ops.sequence_parallel")
        kv_connectors.note_checkpoint(self.vllm_config)
        super().load_model(**options)

    def update_weights(self, update_info: Any) -> None:
        """Receive weights as vLLM does, also from engines that write parameters in place."""
        replacements.note_weights(self.vllm_config)
        super().update_weights(update_info)

    def save_sharded_state(self, *arguments: Any, **named: Any) -> None:
        """Save the parameters as vLLM does.

        Raises:
            RefusedError: they have another order than in vLLM.
        """
        self._check_order()
        super().save_sharded_state(*arguments, **named)

    def save_tensorized_model(self, *arguments: Any, **named: Any) -> None:
        """Save the parameters as vLLM does.

        Raises:
            RefusedError: they have another order than in vLLM.
        """
        self._check_order()
        super().save_tensorized_model(*arguments, **named)

    def _check_order(self) -> None:
        if any(getattr(x, "has_other_order", False) for x in self.get_model().modules()):
            raise RefusedError(
                "the projections of Qwen3-Next's gated delta nets are ordered for the NPU, so their"
                " state is not saved; fix: load the checkpoint"
            )

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """That of our attention, also in a pipeline stage that has only layers with states: vLLM
        requires that all stages agree."""
        return [LAYOUT.name]

    def determine_available_memory(self) -> int:
        """Return the bytes available for the KV cache: free memory minus graph memory, limited by
        CANN's attention kernels, and by what they take when the KV cache is bound.

        vLLM estimates graph memory on CUDA and XPU only. The keys of a layer, and its values, must
        have fewer than 2^31 elements (torch_npu's documentation of npu_fused_infer_attention_score,
        page attention).
        """
        available = super().determine_available_memory()
        if self._estimates_graph_memory():
            available -= self.model_runner.profile_cudagraph_memory()
        specs = self.get_kv_cache_spec().values()
        process_groups.check_stages(self.vllm_config, specs)
        paged = [spec for spec in specs if not isinstance(spec, MambaSpec)]
        if not paged:
            return available
        block_elements = max(
            spec.block_size * spec.num_kv_heads * max(spec.head_size, spec.head_size_v)
            for spec in paged
        )
        block = _block_bytes([*specs])
        available = min(available, (2**31 - 1) // block_elements * block)
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        is_fixed = self.cache_config.kv_cache_memory_bytes is not None
        if not is_fixed and any(getattr(_impl(layer), "borrows_part", False) for layer in layers):
            part = block_elements * paged[0].dtype.itemsize
            available = available * block // (block + part)
        return available

    def _estimates_graph_memory(self) -> bool:
        """Whether graph memory is subtracted: graphs are captured, the KV cache size is not fixed,
        and vLLM's switch is on."""
        has_graphs = compilation.has_graphs(self.vllm_config)
        if self.cache_config.kv_cache_memory_bytes is not None or not has_graphs:
            return False
        return envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Capture graphs, and set the seed.

        vLLM's version (``vllm/v1/worker/gpu_worker.py``) also warms up JIT-compiled kernels, which
        NPUs do not have, and imports models that need torchvision for it
        (``vllm/model_executor/warmup/kernel_warmup.py``).
        """
        self.model_runner.capture_model()
        # torch.compile keeps the model's graphs and their memory after the engine is deleted.
        compilation = self.vllm_config.compilation_config
        weakref.finalize(self, capture_sizes.clear_graphs, compilation).atexit = False
        shims.set_random_seed(self.model_config.seed, self.parallel_config.data_parallel_index)
        freeze_gc_heap()
        maybe_attach_gc_debug_callback()
        notify_awake(True)
        assert self.device is not None
        cores.bind(self.parallel_config, self.device.index)
        stop_metrics = metrics.report(self.vllm_config, self.rank, self.device.index)
        # Also at exit, before the interpreter destroys the modules that the thread uses.
        weakref.finalize(self, stop_metrics)
        return CompilationTimes(language_model=0.0, encoder=0.0)

    # All ranks fail if one does (worker/sleep_mode.py).

    def sleep(self, level: int = 1) -> None:
        """Sleep as vLLM does, also if another process takes what is freed at once: vLLM's assertion
        about free memory comes after the sleep, and would leave an engine that is asleep and counts as
        awake."""
        with process_groups.raising_on_last_rank():
            try:
                super().sleep(level)
            except AssertionError as error:
                if self.sleep_mode_backend.state() != "SUSPENDED":
                    raise
                text = "the engine sleeps, but the NPU has less free memory than before: %s"
                logger.warning(f"{text} Another process may have taken it", error)

    def discard(self, tags: tuple[str, ...]) -> None:
        with process_groups.raising_on_last_rank():
            super().discard(tags)

    def wake_up(self, tags: list[str] | None = None) -> None:
        with process_groups.raising_on_last_rank():
            super().wake_up(tags)

    def checkpoint_prepare(self) -> None:
        """Refuse checkpointing of the worker process.

        Raises:
            NotImplementedError: always; CANN cannot checkpoint and restore a process with an open
                NPU.
        """
        found = "a process with an open NPU cannot be checkpointed"
        raise NotImplementedError(f"{found}; use sleep mode or start another process")

    checkpoint_restore = checkpoint_prepare

    def profile(
        self, is_start: bool = True, profile_prefix: str | None = None, **iterations: Any
    ) -> None:
        """Start or stop torch_npu's profiler (``--profiler-config``), as vLLM's Worker.profile."""
        configured = self.profiler_config is not None and self.profiler_config.profiler is not None
        if is_start and configured and self.profiler is None:
            self.profiler = NPUProfiler(self.profiler_config, f"rank{self.rank}")
        super().profile(is_start, profile_prefix, **iterations)

    def _make_model_runner(self) -> Any:
        assert self.device is not None
        runner = runners.module("v2" if self.use_v2_model_runner else "v1", "runner")
        return runner.NPUModelRunner(self.vllm_config, self.device)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:
        """Context in which vLLM allocates weights and KV cache: with sleep mode, memory that can be
        freed and restored.

        Raises:
            RefusedError: expandable segments, whose memory does not come from memory pools.
        """
        if tag not in sleep_mode.TAGS or not self.model_config.enable_sleep_mode:
            return nullcontext()
        if variable := allocator.expandable_by():
            raise RefusedError(
                f"sleep mode does not support {variable}=expandable_segments:True; fix:"
                " unset it, or remove --enable-sleep-mode"
            )
        return self.sleep_mode_backend.pool(tag)

    @cached_property
    def sleep_mode_backend(self) -> VirtualMemoryBackend:
        return VirtualMemoryBackend(self)


def _impl(layer: Any) -> Any:
    return getattr(layer, "impl", None)


def _draft_load_config(vllm_config: Any) -> Any:
    return vllm_config.speculative_config and vllm_config.speculative_config.draft_load_config


def _block_bytes(specs: list[KVCacheSpec]) -> int:
    """Bytes of a block in the layers of the smallest KV cache group, by which other groups divide
    the memory too.

    A group has at least the layers of the rarest spec (``vllm/v1/core/kv_cache_utils.py``), and
    latents with the keys of indexers are one group.
    """
    kinds = [MLAAttentionSpec if isinstance(spec, MLAAttentionSpec) else spec for spec in specs]
    pages = [(kind, spec.page_size_bytes) for kind, spec in zip(kinds, specs, strict=True)]
    return min(sum(size for own, size in pages if own == kind) for kind in set(kinds))
