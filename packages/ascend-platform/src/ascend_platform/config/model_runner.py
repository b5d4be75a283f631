# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The model runner: vLLM's V2, which NPUs serve without Triton from vLLM 0.33 on, or V1 for what V2
lacks and for earlier vLLMs.

The scheduler works differently for each, so that all processes must agree. The choice is made where
an engine is configured, and handed to its processes by vLLM's own environment variable.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version
from vllm import envs

from ascend_platform import options
from ascend_platform.config import features, runners
from ascend_platform.errors import RefusedError
from ascend_platform.logger import logger
from ascend_platform.overrides import guard, table
from ascend_platform.plugins import requirements
from ascend_platform.process import environment

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Choice(NamedTuple):
    is_v2: bool
    why: str
    """Source of the request for this runner, for messages."""


_chosen: dict[str, Choice] = {}
"""The choices for the engines of this process, by the ``instance_id`` of their VllmConfig."""


def choice(vllm_config: VllmConfig) -> Choice:
    """The runner of an engine: that of the option or the environment variable; else V2, but V1 for
    what V2 lacks.

    A configuration that is made for a drafter, while that of an engine is current, has the runner
    of the engine. In the processes of an engine the environment variable has the choice.

    Raises:
        RefusedError: another value of the option.
    """
    from vllm.config import get_current_vllm_config_or_none

    engine = get_current_vllm_config_or_none()
    for config in (vllm_config, engine):
        if config is not None and config.instance_id in _chosen:
            return _chosen[config.instance_id]
    asked = options.of(options.Platform, vllm_config).model_runner
    if asked != "auto":
        return Choice(asked == "v2", "additional_config")
    if Version(requirements.version("vllm")) < Version(table.V2_SINCE):
        return Choice(False, f"V2 is supported from vLLM {table.V2_SINCE} on")
    requested = environment.requested_runner
    if requested is not None and (requested == "1" or runners.has_v1()):
        return Choice(requested == "1", f"{environment.RUNNER}={requested}")
    if not runners.has_v1():
        return Choice(True, "vLLM has no V1 runner")
    lacking = [row.name for row, _ in features.asked(vllm_config, features.V2)]
    lacking += vllm_config._get_v2_model_runner_unsupported_features()
    if lacking and not features.asked(vllm_config, features.V1):
        return Choice(False, f"V2 lacks {', '.join(lacking)}")
    return Choice(True, f"the default from vLLM {table.V2_SINCE} on")


def resolve(vllm_config: VllmConfig) -> None:
    """Disable asynchronous scheduling where vLLM has chosen it for V2 and the engine has V1, which
    supports it for some drafters only, and not for pipelines."""
    if vllm_config.model_config is None:  # A configuration of vLLM's own, for its defaults.
        return
    runner = choice(vllm_config)
    if runner.is_v2 or not envs.VLLM_USE_V2_MODEL_RUNNER:
        return
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if vllm_config.speculative_config or stages > 1:
        if vllm_config.scheduler_config.async_scheduling:
            reason = "not supported by the V1 model runner"
            logger.info("disabled async scheduling: %s (%s)", reason, runner.why)
        vllm_config.scheduler_config.async_scheduling = False


def check(vllm_config: VllmConfig) -> None:
    """Refuse the chosen runner if that of this vLLM is not supported.

    Raises:
        RefusedError: which vLLM has a supported one, in one line.
    """
    if vllm_config.model_config is None:
        return
    is_v2, why = choice(vllm_config)
    if not is_v2:
        if not runners.has_v1():
            _refuse_v1(why)
        guard.check("v1")
        return
    if Version(version := requirements.version("vllm")) < Version(table.V2_SINCE):
        raise RefusedError(
            f"the V2 model runner (requested by {why}) requires vLLM >= {table.V2_SINCE},"
            f" found {version}; fix: unset it"
        )
    guard.check("v2")


def _refuse_v1(why: str) -> None:
    """Refuse the V1 runner where ascend-platform, or vLLM, lacks it: by vLLM's version, which V2
    does not support, or by the user's choice."""
    own = f"ascend-platform {requirements.version('ascend-platform')}"
    version, since = requirements.version("vllm"), f"vllm>={table.V2_SINCE}"
    if Version(version) < Version(table.V2_SINCE):
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
