# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The model runner: vLLM's V2, which NPUs serve without Triton from vLLM 0.33 on, or V1 for what V2
lacks and for earlier vLLMs.

The scheduler works differently for each, so that all processes must agree. The choice is made where
an engine is configured, and handed to its processes by vLLM's own environment variable.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pkgutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version
from vllm import envs

from ascend_platform.config import options
from ascend_platform.config.features import Feature
from ascend_platform.errors import RefusedError
from ascend_platform.logger import logger
from ascend_platform.overrides import guard, launch_sites
from ascend_platform.plugins import requirements
from ascend_platform.process import environment
from ascend_platform.worker import runners

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Choice(NamedTuple):
    is_v2: bool
    why: str
    """Source of the request for this runner, for messages."""


_OTHER_METHODS = ("block", "fly")


def _drafts(config: VllmConfig, asked: Callable[[Any], Any]) -> bool:
    return config.speculative_config is not None and bool(asked(config.speculative_config))


def _has_stages(config: VllmConfig) -> bool:
    return config.parallel_config.pipeline_parallel_size > 1


def _drafts_in_stages(config: VllmConfig) -> bool:
    """Whether a drafter with layers follows a pipeline. Some of vLLM's take themselves for a stage,
    such as ``qwen3_next_mtp.py``."""
    others = "ngram", "ngram_gpu"
    return _has_stages(config) and _drafts(config, lambda it: it.method not in others)


def _logits_processors(config: VllmConfig) -> Iterator[Any]:
    """Those of the configuration and of installed plugins; vLLM reports what cannot be loaded."""
    for processor in config.model_config.logits_processors or ():
        with contextlib.suppress(Exception):
            yield pkgutil.resolve_name(processor) if isinstance(processor, str) else processor
    for point in importlib.metadata.entry_points(group="vllm.logits_processors"):
        with contextlib.suppress(Exception):
            yield point.load()


def _has_v1_logits_processors(config: VllmConfig) -> bool:
    if config.model_config.runner_type == "pooling":  # which vLLM refuses with any
        return False
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

    return any(
        isinstance(each, type) and not issubclass(each, LogitsProcessor)
        for each in _logits_processors(config)
    )


def _pools_by_plugin(config: VllmConfig) -> bool:
    """Whether the pooling task is a plugin's, which V2 has not
    (``vllm/v1/worker/gpu/pool/pooling_runner.py``)."""
    pooler, architecture = config.model_config.pooler_config, config.model_config.architecture
    if not pooler:
        return False
    return pooler.task == "plugin" or (not pooler.task and architecture == "Terratorch")


FEATURES = (
    Feature(
        "dflash and dspark drafters",
        lambda config: _drafts(config, lambda it: it.use_dflash() or it.use_dspark()),
    ),
    Feature("gemma4_mtp drafters", lambda config: _drafts(config, lambda it: it.use_gemma4_mtp())),
    Feature(
        "MTP with several modules",
        lambda config: _drafts(config, lambda it: it.use_multi_module_mtp()),
    ),
    Feature(
        "extract_hidden_states",
        lambda config: _drafts(config, lambda it: it.method == "extract_hidden_states"),
    ),
    Feature(
        "adaptive draft verification",
        lambda config: _drafts(config, lambda it: it.enable_adaptive_verification),
    ),
    Feature(
        "block verification and FLy",
        lambda config: _drafts(config, lambda it: it.rejection_sample_method in _OTHER_METHODS),
    ),
    Feature(
        "speculative decoding other than by n-grams with pipeline parallelism",
        _drafts_in_stages,
    ),
    Feature(
        "batch-sharded sampling",
        lambda config: config.parallel_config.enable_batch_sharded_sampling,
    ),
    Feature("KV-sharing fast prefill", lambda config: config.cache_config.kv_sharing_fast_prefill),
    Feature(
        "sampling masks", lambda config: config.model_config.return_sampling_mask, of_model=True
    ),
    Feature("trace replay", lambda config: config.model_config.enable_trace_replay, of_model=True),
    Feature("logits processors with V1's interface", _has_v1_logits_processors, of_model=True),
    Feature("the pooling task plugin", _pools_by_plugin, of_model=True),
)
"""Features that the V2 runner does not support yet on NPUs."""

_V2_ONLY = ("sampling masks", "trace replay")
"""Features that V1 would ignore, as it would watermarking and routed experts, which V2 has."""


_chosen: dict[str, Choice] = {}
"""The choices for the engines of this process, by the ``instance_id`` of their VllmConfig."""


def choice(vllm_config: VllmConfig) -> Choice:
    """The runner of an engine: that of the option or the environment variable; else V2, but V1 for
    what V2 lacks.

    A configuration that is made while an engine's is current, for a drafter, has the engine's. In
    the processes of an engine the environment variable has what was chosen.

    Raises:
        RefusedError: another value of the option.
    """
    from vllm.config import get_current_vllm_config_or_none

    engine = get_current_vllm_config_or_none()
    for config in (vllm_config, engine):
        if config is not None and config.instance_id in _chosen:
            return _chosen[config.instance_id]
    asked = options.platform(vllm_config).model_runner
    if asked != "auto":
        return Choice(asked == "v2", "additional_config")
    if Version(requirements.version("vllm")) < Version(launch_sites.SINCE):
        return Choice(False, f"V2 is supported from vLLM {launch_sites.SINCE} on")
    requested = environment.requested_runner
    if requested is not None and (requested == "1" or runners.has_v1()):
        return Choice(requested == "1", f"{environment.RUNNER}={requested}")
    if not runners.has_v1():
        return Choice(True, "vLLM has no V1 runner")
    lacking = [*_lacking(vllm_config), *vllm_config._get_v2_model_runner_unsupported_features()]
    needs_v2 = vllm_config.watermark_config or vllm_config.aux_output_config.enabled
    if lacking and not needs_v2 and not set(lacking) & set(_V2_ONLY):
        return Choice(False, f"V2 lacks {', '.join(lacking)}")
    return Choice(True, f"the default from vLLM {launch_sites.SINCE} on")


def resolve(vllm_config: VllmConfig) -> None:
    """Disable asynchronous scheduling where vLLM has chosen it for V2 and the engine has V1, which
    has it for some drafters only, and not for pipelines."""
    if vllm_config.model_config is None:  # A configuration of vLLM's own, for its defaults.
        return
    runner = choice(vllm_config)
    if runner.is_v2 or not envs.VLLM_USE_V2_MODEL_RUNNER:
        return
    if vllm_config.speculative_config or _has_stages(vllm_config):
        if vllm_config.scheduler_config.async_scheduling:
            reason = "not supported by the V1 model runner"
            logger.info("disabled async scheduling: %s (%s)", reason, runner.why)
        vllm_config.scheduler_config.async_scheduling = False


def check(vllm_config: VllmConfig) -> None:
    """Refuse what V2 does not serve, for an engine that has it.

    Raises:
        RefusedError: this vLLM's V2 runner is not supported, or a feature of the configuration is
            not, in one line.
    """
    if vllm_config.model_config is None:
        return
    is_v2, why = choice(vllm_config)
    if not is_v2:
        if not runners.has_v1():
            _refuse_v1(why)
        guard.check("v1")
        runners.module("v1", "unsupported").check(vllm_config)
        return
    if Version(version := requirements.version("vllm")) < Version(launch_sites.SINCE):
        raise RefusedError(
            f"the V2 model runner (requested by {why}) requires vLLM >= {launch_sites.SINCE},"
            f" found {version}; fix: unset it"
        )
    guard.check("v2")
    if difference := launch_sites.difference():
        raise RefusedError(
            f"the V2 model runner of vLLM {version} is not supported: {difference}; fix:"
            f"{' use V1, or' if runners.has_v1() else ''} install an unedited release of a"
            " supported vLLM"
        )
    _refuse(_lacking(vllm_config), why)


def _refuse_v1(why: str) -> None:
    """Refuse the V1 runner where ascend-platform, or vLLM, has none: by vLLM's version, which V2
    does not support, or by the user's choice."""
    own = f"ascend-platform {requirements.version('ascend-platform')}"
    version, since = requirements.version("vllm"), f"vllm>={launch_sites.SINCE}"
    if Version(version) < Version(launch_sites.SINCE):
        fix = requirements.install_command(Requirement(since))
        raise RefusedError(
            f"{own} has no V1 model runner, and its V2 model runner requires {since}, found"
            f" {version}; fix: {fix}"
        )
    raise RefusedError(
        f"the V1 model runner, requested by {why}, is not part of {own} with vLLM {version}; fix:"
        " leave the choice of the runner out, which is V2 then"
    )


def publish(vllm_config: VllmConfig) -> None:
    """Keep the choice for an engine, and hand it to the engine's processes."""
    if vllm_config.model_config is None:
        return
    runner = _chosen[vllm_config.instance_id] = choice(vllm_config)
    if runner.is_v2:
        # Routers on the NPU do not read the mask, which costs two launches per step.
        os.environ["VLLM_MOE_SKIP_PADDING"] = "0"
    if os.environ.get(environment.RUNNER) != (value := str(int(runner.is_v2))):
        os.environ[environment.RUNNER] = value
        envs.disable_envs_cache()  # Of an engine in this process.


def _lacking(vllm_config: VllmConfig) -> list[str]:
    has_model = vllm_config.model_config is not None
    features = [each for each in FEATURES if has_model or not each.of_model]
    return [each.name for each in features if each.asked(vllm_config)]


def _refuse(features: list[str], asked: str) -> None:
    if not features:
        return
    named = []
    for feature in features:
        kernels = launch_sites.kernels_of(feature)
        named.append(f"{feature} (kernel {kernels[0]})" if kernels else feature)
    raise RefusedError(
        f"ascend-platform {requirements.version('ascend-platform')} does not support"
        f" {', '.join(named)} with vLLM's V2 model runner ({asked}) yet; fix:"
        f" {'use V1' if runners.has_v1() else 'leave it out'}"
    )
