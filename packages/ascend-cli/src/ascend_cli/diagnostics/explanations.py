# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""One-line explanations of the errors that end vLLM's commands: what was found, and what
fixes it."""

from __future__ import annotations

import errno
import importlib
import re
import signal
from collections.abc import Iterator
from traceback import walk_tb
from typing import Any

from ascend_platform import extension
from ascend_platform.extension import RefusedError, installation

LONGEST = 600  # characters of another library's message


def explain(error: BaseException) -> str:
    """One line for an error that is one of those below, otherwise ""."""
    explanations = (
        installation.missing_library,
        _other_torch_npu,
        _unusable_extension,
        _refusal,
        _no_platform,
        _port_in_use,
        _no_suffix,
        _dead_process,
        _damaged_checkpoint,
        _unreachable_peer,
        _out_of_memory,
        _long_request,
        _no_cache,
        _adapter_rank,
        _indivisible_heads,
        _unknown_quantization,
        _refused_architecture,
        _missing_package,
        _own_words,
    )
    return next(filter(None, (explanation(error) for explanation in explanations)), "")


def describe(error: BaseException) -> str:
    """Type and message of an error in one line; only the message if pydantic wraps the error."""
    *_, inner = _errors(error) if hasattr(error, "errors") else [error]
    message = _one_line(inner)
    if inner is not error:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def death(what: str, status: int | None) -> str:
    """How a process ended that should not have, from multiprocessing's ``exitcode``."""
    if status is None or status >= 0:
        return f"{what} exited with status {status or 0}; fix: see the log above"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "a signal"
    fix = "report the log above with the output of vllm-ascend env"
    if -status == signal.SIGKILL:
        killer = "if no user killed it, the kernel did because memory ran out (dmesg)"
        fix = f"{killer}: give the machine or container more"
    elif -status == signal.SIGBUS:
        fix = "free or enlarge /dev/shm (docker run --shm-size)"
    return f"{what} was killed by {name} (signal {-status}); fix: {fix}"


def _errors(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes, and those that pydantic wraps."""
    for found in installation.error_chain(error):
        # The cause of a RayTaskError, which has its cause's class and a traceback as its message.
        cause = getattr(found, "cause", None)
        each = cause if isinstance(cause, BaseException) else found
        yield each
        listing = getattr(each, "errors", None)
        for item in listing() if callable(listing) else ():
            if isinstance(inner := (item.get("ctx") or {}).get("error"), BaseException):
                yield inner


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:LONGEST]


def _search(error: BaseException, pattern: str) -> re.Match[str] | None:
    return next(filter(None, (re.search(pattern, str(each)) for each in _errors(error))), None)


def _local(error: BaseException, name: str) -> Any:
    """A local variable, from the innermost frame of a traceback that defines it."""
    found = [
        frame.f_locals[name] for frame, _ in walk_tb(error.__traceback__) if name in frame.f_locals
    ]
    return found[-1] if found else None


def _other_torch_npu(error: BaseException) -> str:
    """A torch_npu for another version of torch, which fails in many ways when torch loads it."""
    for each in installation.error_chain(error):
        if not installation.through_torch_npu(each):
            continue
        if problem := installation.unmet("torch-npu") or installation.unmet("ascend-platform"):
            found = extension.version("torch-npu")
            return f"torch_npu {found} cannot be loaded ({_one_line(each)}): {problem}"
    return ""


def _unusable_extension(error: BaseException) -> str:
    """torchvision or torchaudio whose libraries cannot be loaded with this torch
    (``torchvision/extension.py``, which hides why, and ``torchaudio/_extension``)."""
    found = _search(error, r"operator (torchvision)::|/(torchaudio)/lib/")
    if not found:
        return ""
    name = found[1] or found[2]
    return str(installation.unusable_extensions() or installation.unloadable(name))


def _refusal(error: BaseException) -> str:
    """A RefusedError of one of our wheels, as it is or wrapped by pydantic."""
    return next((str(each) for each in _errors(error) if isinstance(each, RefusedError)), "")


def _own_words(error: BaseException) -> str:
    """Another error of our wheels: one line with what fixes it."""
    return next((_one_line(each) for each in _errors(error) if "; fix: " in str(each)), "")


def _no_platform(error: BaseException) -> str:
    """Why vLLM found no device (``vllm/config/device.py``), if the platform knows."""
    if not any(
        str(each).startswith("Failed to infer device type")
        for each in installation.error_chain(error)
    ):
        return ""
    filtered = installation.PluginFilter.current()
    if filtered.allows(installation.COMPONENTS["ascend-platform"]):
        reason = installation.not_activated()
        return f"vLLM found no device: {installation.NOT_ACTIVATED}: {reason}" if reason else ""
    wrong = filtered.problem(installation.plugin_names())
    return f"{installation.PLUGINS_VARIABLE}: {wrong[0]}" if wrong else ""


def _port_in_use(error: BaseException) -> str:
    """A port that another process uses (``vllm/entrypoints/launchers/launcher.py``,
    ``create_server_socket``)."""
    for each in installation.error_chain(error):
        if isinstance(each, OSError) and each.errno == errno.EADDRINUSE:
            *_, last = walk_tb(each.__traceback__)
            address, port, *_ = last[0].f_locals.get("addr", ("", "of vLLM"))
            at = address and f" (on {address})"
            fix = "end that process, or choose another port with --port"
            return f"port {port} is in use by another process{at}; fix: {fix}"
    return ""


def _no_suffix(error: BaseException) -> str:
    """vLLM's own error about a missing library (``vllm/config/speculative.py``,
    ``_validate_suffix_decoding``)."""
    missing = [each for each in installation.error_chain(error) if isinstance(each, ImportError)]
    if not any("Arctic Inference is required" in str(each) for each in missing):
        return ""
    needs = "speculative decoding with suffix needs arctic-inference"
    return f"{needs}; fix: pip install 'ascend-platform[suffix]'"


def _dead_process(error: BaseException) -> str:
    """An engine core or worker that a signal ended while it started.

    In ``vllm/v1/engine/utils.py``, ``wait_for_engine_startup``, and
    ``vllm/v1/executor/multiproc_executor.py``, ``wait_for_ready``. Both end the other processes by
    SIGTERM.
    """
    processes: list[Any] = []
    if str(error).startswith("Engine core initialization failed"):
        manager = getattr(_local(error, "launch"), "engine_manager", None)
        processes = getattr(manager, "processes", [])
    elif str(error).startswith("WorkerProc initialization failed") and (
        handle := _local(error, "unready_proc_handle")
    ):
        processes = [handle.proc]
    for process in processes:
        if (process.exitcode or 0) < 0 and process.exitcode != -signal.SIGTERM:
            return death(process.name, process.exitcode)
    return ""


def _damaged_checkpoint(error: BaseException) -> str:
    for each in installation.error_chain(error):
        if type(each).__name__ == "SafetensorError":
            found = f"checkpoint file {_local(each, 'st_file') or 'of the model'}"
            fix = "compare its size and checksum with the original, and copy or download it again"
            return f"{found} is incomplete or damaged ({_one_line(each)}); fix: {fix}"
    return ""


def _unreachable_peer(error: BaseException) -> str:
    """Ranks that did not meet in time (torch's ``TCPStore``)."""
    hint = "or raise --distributed-timeout-seconds"
    lost = r"timed out after (\d+)ms while trying to connect to \((.+), (\d+)\)"
    if found := _search(error, lost):
        seconds, address, port = int(found[1]) / 1000, found[2], found[3]
        fix = "start vllm serve with --node-rank 0 there, correct --master-addr and --master-port"
        return f"no answer from {address} port {port} in {seconds:g} s; fix: {fix}, {hint}"
    few = r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+) clients joined"
    if found := _search(error, few):
        meeting = _search(error, r"\[?([\w.:]+)\]?:(\d+)")
        at = f" at {meeting[0]}" if meeting and "." in meeting[1] else ""
        fix = (
            "start vllm serve --headless with the other values of --node-rank on the other machines"
        )
        joined = f"{found[2]} of {found[3]} ranks joined{at} in {found[1]} s"
        return f"{joined}; fix: {fix}, {hint}"
    return ""


def _out_of_memory(error: BaseException) -> str:
    found = _search(error, r"NPU out of memory\.[^\n]*?(?=Please set|If reserved|See doc|$)")
    if not found:
        return ""
    lower = "--gpu-memory-utilization, --kv-cache-memory-bytes, --max-num-seqs or"
    fix = f"lower {lower} --max-num-batched-tokens, or use more NPUs (--tensor-parallel-size)"
    return f"{' '.join(found[0].split()).rstrip('. ')}; fix: {fix}"


def _long_request(error: BaseException) -> str:
    """A length whose KV cache memory cannot hold (``vllm/v1/core/kv_cache_utils.py``)."""
    needs = r"max seq len \((\d+)\), \((\S+ GiB) KV cache is needed"
    found = _search(error, rf"{needs}, .*? memory \((\S+ GiB)\)")
    if not found:
        return ""
    longest = _search(error, r"estimated maximum model length is (\d+)")
    fix = f"--max-model-len {longest[1]}, or" if longest else "lower --max-model-len, or"
    return (
        f"a request of {found[1]} tokens needs {found[2]} of KV cache, and {found[3]} are"
        f" available; fix: {fix} raise {_cache_option(error)}, or use more NPUs"
        " (--tensor-parallel-size)"
    )


def _no_cache(error: BaseException) -> str:
    """No memory at all for the KV cache, in the same file."""
    if not _search(error, r"No available memory for the cache blocks"):
        return ""
    return (
        f"no memory is left for the KV cache; fix: raise {_cache_option(error)}, lower"
        " --max-num-batched-tokens, or use more NPUs (--tensor-parallel-size)"
    )


def _cache_option(error: BaseException) -> str:
    """The option that sets the memory of the KV cache, with its value where it is given
    in bytes."""
    configs = (_local(each, "vllm_config") for each in _errors(error))
    size = next((config.cache_config.kv_cache_memory_bytes for config in configs if config), None)
    return f"--kv-cache-memory-bytes, which is {size}" if size else "--gpu-memory-utilization"


def _adapter_rank(error: BaseException) -> str:
    found = _search(error, r"LoRA rank (\d+) is greater than max_lora_rank (\d+)")
    if not found:
        return ""
    requests = (_local(each, "lora_request") for each in installation.error_chain(error))
    lora = next(filter(None, requests), None)
    which = f"adapter {lora.lora_name} in {lora.lora_path}" if lora else "an adapter"
    has = f"{which} has rank {found[1]}, and --max-lora-rank is {found[2]}"
    return f"{has}; fix: --max-lora-rank {found[1]}"


def _indivisible_heads(error: BaseException) -> str:
    divided = r"number of attention heads \((\d+)\) must be divisible by"
    found = _search(error, rf"{divided} tensor parallel size \((\d+)\)")
    if not found:
        return ""
    heads = int(found[1])
    sizes = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
    return (
        f"--tensor-parallel-size {found[2]} does not divide the model's {heads} attention heads;"
        f" fix: choose one of {sizes}"
    )


def _unknown_quantization(error: BaseException) -> str:
    found = _search(error, r"Unknown quantization method: (\S+?)\.(?:\s|$)")
    if not found:
        return ""
    methods = ", ".join(installation.QUANTIZATION_METHODS)
    fix = f"correct or remove --quantization (supported: {methods})"
    return f"quantization method {found[1]} is unknown; fix: {fix}"


def _refused_architecture(error: BaseException) -> str:
    """An architecture whose module vLLM cannot import, because it is written for CUDA and ROCm."""
    if not (names := _not_inspected(error)):
        return ""
    return next(filter(None, map(installation.architecture_refusal, names)), "")


def _not_inspected(error: BaseException) -> list[str]:
    found = _search(error, r"Model architectures \[(.*?)\] failed to be inspected")
    return re.findall(r"'(\w+)'", found[1]) if found else []


def _missing_package(error: BaseException) -> str:
    """An architecture whose module vLLM could not import for a package that is not installed (its
    log has the traceback)."""
    for architecture in _not_inspected(error):
        from vllm.model_executor.models.registry import ModelRegistry

        model = ModelRegistry.models.get(architecture)
        try:
            importlib.import_module(getattr(model, "module_name", "vllm"))
        except ModuleNotFoundError as missing:
            name = (missing.name or "").partition(".")[0]
            is_built_for_torch = name in installation.BUILT_FOR_TORCH
            fix = (
                installation.install_extensions_command(name)
                if is_built_for_torch
                else f"pip install {name}"
            )
            return f"{architecture} needs {name}, which is not installed; fix: {fix}"
        except Exception:
            continue
    return ""
