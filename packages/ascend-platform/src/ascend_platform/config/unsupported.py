# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Every refusal of a configuration; folders declare the features that are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.utils.import_utils import resolve_obj_by_qualname

from ascend_platform import options
from ascend_platform.config import (
    architectures,
    compilation,
    devices,
    features,
    kv_connectors,
    main_module,
    model_runner,
    quantization,
    runners,
)
from ascend_platform.config.features import Feature
from ascend_platform.errors import RefusedError
from ascend_platform.overrides import guard, table
from ascend_platform.plugins import registry, requirements, slots
from ascend_platform.process import sockets

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check(vllm_config: VllmConfig) -> None:
    """Refuse what is not supported. Nothing outside of the configuration is changed, so that a
    program may go on after a refusal.

    Raises:
        RefusedError: what is not supported, in one line.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    guard.check("common")
    main_module.check()
    if model is not None:
        architectures.check(model.architecture)
        architectures.check_offered(vllm_config)
    model_runner.check(vllm_config)
    architectures.check_chip(vllm_config)
    check_features(vllm_config)
    kv_connectors.check(vllm_config)
    check_load_format(vllm_config.load_config, vllm_config.quant_config is not None)
    devices.check(parallel)
    sockets.check_loopback(parallel)
    compilation.check(vllm_config)
    for module in features.modules():
        if check_more := getattr(module, "check", None):
            check_more(vllm_config)
    if formats := quantization.formats():
        formats.check_weights(model)
    if parallel.distributed_executor_backend != "external_launcher":
        sockets.check_directory()
    check_communicator(vllm_config)
    check_weight_transfer(vllm_config.weight_transfer_config)
    options.take(vllm_config)


def check_features(vllm_config: VllmConfig) -> None:
    """Refuse all requested features that are not supported, first those that only the engine's
    model runner does not support.

    Raises:
        RefusedError: their names, in one line.
    """
    own = f"ascend-platform {requirements.version('ascend-platform')}"
    if vllm_config.model_config is not None:
        is_v2, why = model_runner.choice(vllm_config)
        mine, other = (features.V2, features.V1) if is_v2 else (features.V1, features.V2)
        if refused := features.asked(vllm_config, mine):
            is_served = is_v2 and runners.has_v1() and not features.asked(vllm_config, other)
            fix = _fix(refused, "use V1" if is_served else "leave it out")
            raise RefusedError(
                f"{own} does not support {_names(refused)} with vLLM's {mine[0].upper()} model"
                f" runner ({why}) yet; fix: {fix}"
            )
    if refused := features.asked(vllm_config, features.V1 + features.V2):
        fix = _fix(refused, "leave it out")
        raise RefusedError(f"{own} does not support {_names(refused)} yet; fix: {fix}")


def _names(refused: list[tuple[Feature, str]]) -> str:
    """The names of features, with the values that request them and the first kernels that they
    need."""
    named = []
    for feature, value in refused:
        kernels = [f"kernel {name}" for name in table.kernels_of(feature.name)[:1]]
        details = ", ".join(filter(None, [value, *kernels]))
        named.append(f"{feature.name} ({details})" if details else feature.name)
    return ", ".join(named)


def _fix(refused: list[tuple[Feature, str]], default: str) -> str:
    return "; ".join(dict.fromkeys(feature.fix or default for feature, _ in refused))


SHARDED_STATES = ("sharded_state", "runai_streamer_sharded")
"""Load formats that copy what an engine has saved to the parameters, without their weight loaders."""


def check_load_format(load_config: Any, is_quantized: bool = False) -> None:
    """Check --load-format, and its options by the function that its component offers.

    Raises:
        RefusedError: wrong options, a load format whose component is not active, or a sharded state
            of quantized weights.
    """
    if is_quantized and load_config.load_format in SHARDED_STATES:
        raise RefusedError(
            f"--load-format {load_config.load_format} supports unquantized weights: a sharded state"
            " is saved after the weights are processed for the NPU, and loading would process them"
            " again; fix: load the checkpoint, or load weights from a peer"
        )
    if check := slots.offered(f"load_options.{load_config.load_format}"):
        resolve_obj_by_qualname(check)(load_config.model_loader_extra_config)
    elif load_config.load_format in ("ascend_peer", "netloader"):
        raise RefusedError(
            f"--load-format {load_config.load_format} needs"
            f" {registry.with_state('ascend-model-loader')}"
        )


def check_weight_transfer(config: Any) -> None:
    """Refuse weight transfer by HCCL without the component that offers it.

    Raises:
        RefusedError: the component's distribution, and its state.
    """
    if getattr(config, "backend", "") == "hccl" and not slots.offered("weight_transfer.hccl"):
        raise RefusedError(
            f"weight transfer by hccl needs {registry.with_state('ascend-communicator')}"
        )


def check_communicator(vllm_config: VllmConfig) -> None:
    """Refuse expert parallelism over data-parallel engines without ascend-communicator.

    Raises:
        RefusedError: the component's state, and what makes it active.
    """
    model, offered = vllm_config.model_config, slots.offered("communicator")
    if model and model.is_moe and vllm_config.parallel_config.use_all2all and not offered:
        raise RefusedError(
            "expert parallelism over data-parallel engines needs"
            f" {registry.with_state('ascend-communicator')}"
        )
