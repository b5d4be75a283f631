# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""General plugin ``ascend_service_profiling``: the functions of vLLM and of these wheels that
msServiceProfiler measures.

msServiceProfiler, from CANN's toolkit or from PyPI, is a vLLM plugin itself. It measures and labels
the functions that ``~/.config/vllm_ascend/service_profiling_symbols.VERSION.yaml`` names, VERSION
of vLLM, once ``SERVICE_PROF_CONFIG_PATH`` is set; ``PROFILING_SYMBOLS_PATH`` names another
file. Its documentation describes both, and the fields of the file:
https://docs.vllm.ai/projects/ascend/en/latest/developer_guide/performance_and_debug/service_profiling_guide.html
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

SWITCH = "SERVICE_PROF_CONFIG_PATH"
HANDLERS = {
    "ms_service_profiler": "ms_service_profiler.patcher.vllm.handlers.v1.{}_handlers:{}",
    "msserviceprofiler": "msserviceprofiler.vllm_profiler.vllm_v1.{}_hookers:{}",
}
"""Package of each distribution of the tool, newest first, to the name pattern of its handlers for
vLLM."""


class Symbol(NamedTuple):
    """A function to measure: under a name, or by one of the tool's handlers, which also label
    requests and batches."""

    symbol: str
    name: str = ""
    domain: str = ""
    handler: tuple[str, str] = ("", "")


# Symbol below vLLM, its group and handler of the tool, and the name of its ranges, if it has one.
_HANDLED = """
v1.core.sched.scheduler:Scheduler.schedule batch schedule batchFrameworkProcessing
v1.core.sched.scheduler:Scheduler.add_request batch add_request
v1.core.kv_cache_manager:KVCacheManager.free kvcache free
v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks kvcache get_computed_blocks
model_executor.layers.logits_processor:LogitsProcessor.forward model compute_logits computing_logits
v1.executor.abstract:Executor.execute_model model execute_model modelExec
v1.executor.multiproc_executor:MultiprocExecutor.execute_model model execute_model modelExec
v1.executor.uniproc_executor:UniProcExecutor.execute_model model execute_model modelExec
v1.engine.async_llm:AsyncLLM.add_request request add_request_async
v1.engine.output_processor:OutputProcessor.process_outputs request process_outputs
v1.engine.core:DPEngineCoreProc.add_request meta init_data_parallel
"""
SYMBOLS = [
    *(
        Symbol(f"vllm.{symbol}", "".join(name), handler=(group, handler))
        for symbol, group, handler, *name in map(str.split, _HANDLED.strip().splitlines())
    ),
    Symbol("ascend_platform.worker.worker:NPUWorker.execute_model", "workerExec", "Execute"),
]
"""Functions that every engine has."""


_RUNNER = "ascend_platform.runners.{}.runner:NPUModelRunner.{}"
_METHODS = {
    "v1": "_update_states _prepare_inputs _build_attention_metadata",
    "v2": "add_requests update_requests prepare_inputs prepare_attn sample postprocess_sampled",
}
_PROPOSE = "vllm.v1.worker.gpu.spec_decode.{}Speculator.propose"
_DRAFTERS = {
    "v1": (_RUNNER.format("v1", "propose_draft_token_ids"),),
    "v2": (
        _PROPOSE.format("target_dependent_ar.speculator:TargetDependentAR"),
        _PROPOSE.format("standalone_ar.speculator:StandaloneAR"),
        _PROPOSE.format("ngram.speculator:NgramGPU"),
    ),
}
_SAMPLER = Symbol(
    "vllm.v1.sample.sampler:Sampler.forward", "sample", handler=("model", "sampler_forward")
)


def of_runner(runner: str) -> list[Symbol]:
    """The functions of a model runner to measure."""
    named = {"execute_model": "modelRunnerExec"} | {
        each: each for each in ("sample_tokens", *_METHODS[runner].split())
    }
    methods = (
        Symbol(_RUNNER.format(runner, each), name, "Execute") for each, name in named.items()
    )
    drafters = (Symbol(each, "propose_draft_token_ids", "SpecDecode") for each in _DRAFTERS[runner])
    return [*([_SAMPLER] if runner == "v1" else []), *methods, *drafters]


def symbols() -> list[Symbol]:
    """Those of the installed vLLM: of the runners that it has, as an engine's options choose
    between them."""
    from ascend_platform.extension import installation

    return [*SYMBOLS, *(each for name in installation.runners() for each in of_runner(name))]


def register() -> None:
    """Entry point of group ``vllm.general_plugins``: write the file if the switch is set. Never
    raises.

    An existing file is kept, as the user may have edited it.
    """
    if not os.environ.get(SWITCH):
        return
    import vllm  # Already imported, because it loads this plugin.
    from ascend_platform.extension import logger

    package = next((name for name in HANDLERS if importlib.util.find_spec(name)), None)
    if package is None:
        logger.warning(
            "%s is set and msServiceProfiler is not installed; fix: pip install msserviceprofiler,"
            " or source CANN's set_env.sh",
            SWITCH,
        )
        return
    file = path(vllm.__version__)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x") as opened:
            opened.write(text(package))
    except FileExistsError:
        return
    except OSError as error:
        why = "cannot be written, and msServiceProfiler uses its own symbols"
        logger.warning("%s %s: %s", file, why, error.strerror)
        return
    logger.info("wrote %s, the functions that msServiceProfiler measures", file)


def path(version: str) -> Path:
    """The file of symbols for this version of vLLM."""
    return Path.home() / ".config" / "vllm_ascend" / f"service_profiling_symbols.{version}.yaml"


def text(package: str) -> str:
    """The contents of the file for this distribution of the tool."""
    lines = []
    for each in symbols():
        handler = HANDLERS[package].format(*each.handler) if any(each.handler) else ""
        fields = {
            "symbol": each.symbol,
            "handler": handler,
            "domain": each.domain,
            "name": each.name,
        }
        given = [f"{key}: {value}" for key, value in fields.items() if value]
        lines.append("- " + "\n  ".join(given))
    return "\n".join(lines) + "\n"
