# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""vLLM's start_profile and stop_profile with torch_npu's profiler, for MindStudio Insight and
Perfetto."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch_npu
from vllm.config import ProfilerConfig
from vllm.profiler import wrapper

ACTIVITIES = {
    "CPU": torch_npu.profiler.ProfilerActivity.CPU,
    "PrivateUse1": torch_npu.profiler.ProfilerActivity.NPU,
}
"""vLLM's names of profiler activities to those of torch_npu."""

# vLLM looks up such tables by device type to validate the profiler configuration
# (validate_worker_profiler_config).
KINDS = {"npu": frozenset({"torch"})}
DEFAULT_ACTIVITIES = {"npu": tuple(ACTIVITIES)}
SUPPORTED_ACTIVITIES = {"npu": frozenset(ACTIVITIES)}


class NPUProfiler(wrapper.WorkerProfiler):
    """torch_npu's profiler with vLLM's delays and limits; each session writes a directory
    ``{name}_…_ascend_pt``."""

    def __init__(self, profiler_config: ProfilerConfig, name: str) -> None:
        super().__init__(profiler_config)
        self._config, self._name = profiler_config, name

    def set_output_name(self, worker_name: str) -> None:
        if not self._active:
            self._name = worker_name

    def annotate_context_manager(self, name: str) -> AbstractContextManager:
        return torch.profiler.record_function(name) if self._running else nullcontext()

    def _start(self) -> None:
        config, npu = self._config, torch_npu.profiler
        schedule, wait, warmup = None, config.wait_iterations, config.warmup_iterations
        if warmup > 0 or wait > 0:
            active = config.active_iterations
            schedule = npu.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
        # Starting consumes the first step of the schedule; vLLM's limit counts only recorded steps.
        self._before = max(wait + warmup - 1, 0)
        self._scheduled = schedule is not None
        names = config.torch_profiler_activities or ACTIVITIES
        self._profile = npu.profile(
            activities=[ACTIVITIES[name] for name in names],
            schedule=schedule,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
            on_trace_ready=npu.tensorboard_trace_handler(config.torch_profiler_dir, self._name),
            # Kernels and HCCL; level 0, the default, has no HCCL.
            experimental_config=npu._ExperimentalConfig(profiler_level=npu.ProfilerLevel.Level1),
        )
        self._profile.start()

    def _stop(self) -> None:
        self._profile.stop()

    def _profiler_step(self) -> bool:
        if self._scheduled:
            self._profile.step()
            if self._before > 0:
                self._before -= 1
                return False
        return True
