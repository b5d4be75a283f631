"""The model runner: vLLM's V1, or on request V2, which NPUs serve without Triton from vLLM 0.33 on.

The scheduler works differently for each, so that all processes must agree. The choice is made where an engine is configured, and
handed to its processes by vLLM's own environment variable.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from vllm import envs

from ascend_platform import extension, vllm_overrides
from ascend_platform.components import options
from ascend_platform.config import state_layers
from ascend_platform.config.unsupported import Feature
from ascend_platform.worker.v2 import launch_sites, overrides

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_RUNNERS = ("v1", "v2")
_IN_ENVIRONMENT = os.environ.get(VARIABLE) == "1"
"""What the user has set, or, in a process of an engine, the engine's choice."""

options.register("platform", {"model_runner": "v1"})


_OTHER_METHODS = ("block", "fly")


def _drafts(config: VllmConfig, asked: Callable[[Any], Any]) -> bool:
    return config.speculative_config is not None and bool(asked(config.speculative_config))


def _has_stages(config: VllmConfig) -> bool:
    return config.parallel_config.pipeline_parallel_size > 1


FEATURES = (
    Feature("dflash and dspark drafters", lambda config: _drafts(config, lambda it: it.use_dflash() or it.use_dspark())),
    Feature("MTP with several modules", lambda config: _drafts(config, lambda it: it.use_multi_module_mtp())),
    Feature("extract_hidden_states", lambda config: _drafts(config, lambda it: it.method == "extract_hidden_states")),
    Feature("adaptive draft verification", lambda config: _drafts(config, lambda it: it.enable_adaptive_verification)),
    Feature(
        "block verification and FLy", lambda config: _drafts(config, lambda it: it.rejection_sample_method in _OTHER_METHODS)
    ),
    Feature("speculative decoding with pipeline parallelism", lambda config: _drafts(config, lambda _: _has_stages(config))),
    Feature("watermarking", lambda config: config.watermark_config),
    Feature("thinking budgets", lambda config: config.reasoning_config),
    Feature("batch-sharded sampling", lambda config: config.parallel_config.enable_batch_sharded_sampling),
    Feature("KV-sharing fast prefill", lambda config: config.cache_config.kv_sharing_fast_prefill),
    Feature("state-space layers", state_layers.has_states, of_model=True),
    Feature("prompt embeddings", lambda config: config.model_config.enable_prompt_embeds, of_model=True),
    Feature("sampling masks", lambda config: config.model_config.return_sampling_mask, of_model=True),
    Feature("trace replay", lambda config: config.model_config.enable_trace_replay, of_model=True),
)
"""What the V2 runner does not serve yet on NPUs."""

REQUEST_FEATURES: dict[str, Any] = {
    "thinking budgets": lambda params: getattr(params, "thinking_token_budget", None) is not None,
}
"""The same of a request's sampling parameters."""


def reason(vllm_config: VllmConfig) -> str:
    """What asks for the V2 runner: the option, the environment variable, a vLLM without V1, or "" for V1.

    Raises:
        RefusedError: another value of the option.
    """
    given = options.given(vllm_config, "platform").get("model_runner", "v1")
    if given not in _RUNNERS:
        raise extension.RefusedError(
            f'additional_config "ascend.platform.model_runner" is {given!r}; supported: {", ".join(_RUNNERS)}'
        )
    if given == "v2":
        return "additional_config"
    return f"{VARIABLE}=1" if _IN_ENVIRONMENT else "" if vllm_overrides.has_v1_runner() else "vLLM has no V1 runner"


def choose(vllm_config: VllmConfig) -> None:
    """Choose the runner of an engine, and refuse what V2 does not serve.

    Raises:
        RefusedError: this vLLM's V2 runner is not supported, or a feature of the configuration is not, in one line.
    """
    if vllm_config.model_config is None:  # made somewhere in an engine's processes, for defaults
        return
    asked = reason(vllm_config)
    if asked:
        if Version(version := extension.version("vllm")) < Version(overrides.SINCE):
            raise extension.RefusedError(
                f"vLLM's V2 model runner, which {asked} asks for, is supported from vLLM {overrides.SINCE} on, and this is "
                f"{version}; fix: do not ask for it"
            )
        vllm_overrides.check(overrides.OVERRIDES)
        if difference := launch_sites.difference():
            raise extension.RefusedError(f"vLLM {version}'s V2 model runner is not as ascend-platform supports it: {difference}")
        _refuse([feature.name for feature in FEATURES if feature.asked(vllm_config)], asked)
        os.environ["VLLM_MOE_SKIP_PADDING"] = "0"  # routers on the NPU do not read the mask, which costs a step two launches
    os.environ[VARIABLE] = "1" if asked else "0"


def check_request(params: Any) -> None:
    """Refuse sampling parameters that the V2 runner does not serve.

    Raises:
        ValueError: their names, in one line.
    """
    if envs.VLLM_USE_V2_MODEL_RUNNER and hasattr(params, "temperature"):
        _refuse([name for name, asked in REQUEST_FEATURES.items() if asked(params)], "this engine's choice")


def _refuse(features: list[str], asked: str) -> None:
    if not features:
        return
    named = []
    for feature in features:
        kernels = launch_sites.kernels_of(feature)
        named.append(f"{feature} (kernel {kernels[0]})" if kernels else feature)
    raise extension.RefusedError(
        f"ascend-platform {extension.version('ascend-platform')} does not support {', '.join(named)} with vLLM's V2 model runner "
        f"({asked}) yet; fix: use V1{'' if vllm_overrides.has_v1_runner() else ', which an earlier vLLM has'}"
    )
