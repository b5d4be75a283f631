# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Features of the worker and of profiling that are not supported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ascend_platform.config.features import Feature

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _other_encoder_cache(config: VllmConfig) -> str:
    connector = config.ec_transfer_config and config.ec_transfer_config.ec_connector
    return "" if connector in (None, "ECExampleConnector") else str(connector)


def _offloads_weights(config: VllmConfig) -> Any:
    offload = config.offload_config
    return offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size


def _other_weight_transfer(config: VllmConfig) -> str:
    backend = getattr(config.weight_transfer_config, "backend", "")
    others = ("nccl", "ipc", "sparse_nccl", "nccl_m2n", "sharded_rdt")
    return backend if backend in others else ""


def _other_sleep(config: VllmConfig) -> str:
    model = config.model_config
    names = ("sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend")
    used = [name for name in names if getattr(model, name, False)]
    if model.sleep_mode_backend != "cumem":
        used.append(f"sleep_mode_backend {model.sleep_mode_backend}")
    return ", ".join(f"--{name.replace('_', '-')}" for name in used)


def _other_profiler(config: VllmConfig) -> str:
    profiler = config.profiler_config.profiler
    return "" if profiler in (None, "torch") else profiler


FEATURES = (
    Feature("encoder-cache connectors other than ECExampleConnector", _other_encoder_cache),
    Feature("weight offloading", _offloads_weights),
    Feature(
        "--enable-fault-tolerance", lambda config: config.parallel_config.enable_fault_tolerance
    ),
    Feature("dual batch overlap", lambda config: config.parallel_config.use_ubatching),
    Feature(
        "weight transfer of CUDA devices (hccl is ascend-communicator's)", _other_weight_transfer
    ),
    Feature("sleep options of other devices", _other_sleep, of_model=True),
    Feature(
        "--enable-layerwise-nvtx-tracing, for NVIDIA's profiler (--profiler-config '{\"profiler\":"
        ' "torch"}\' traces operators)',
        lambda config: config.observability_config.enable_layerwise_nvtx_tracing,
    ),
    Feature("profilers other than torch", _other_profiler),
)
