"""Errors of vLLM's own commands in one line: what was found, and what fixes it.

``import torch`` loads torch_npu by itself, transformers imports it too, and vLLM imports both before it asks any plugin. So where
torch_npu is installed and CANN is not, nothing of vLLM or of ours runs before the error. vLLM keeps one of two plugins with one
name, so ours may not run at all, and a plugin that is filtered out does not run. ``ascend_platform.pth`` imports this module as
Python starts, which is the one earlier place, in vLLM's own commands only.
"""

import errno
import os
import sys
from traceback import walk_tb

import ascend_platform
from ascend_platform import host
from ascend_platform.components import COMPONENTS, Problem, RefusedError, requirements
from ascend_platform.components.plugin_filter import VARIABLE, PluginFilter

_installed = False


def install() -> None:
    """Exit if vLLM's command cannot serve; otherwise install an excepthook that shows known errors in one line.

    Python reads start-up files twice where lib64 is a link to lib; the second call does nothing.
    """
    from ascend_platform.cli import checks, env_vars

    global _installed
    if _installed:
        return
    _installed = True
    if problem := requirements.conflict() or requirements.cuda_torch() or _cpu_without_kernels():
        sys.stderr.write(f"ascend-platform: {problem}\n")
        sys.stderr.flush()
        os._exit(1)  # while Python starts, SystemExit would be a fatal error with a traceback
    for result in (*env_vars.target_device(), *checks.triton()):
        if result.fix:
            print(f"ascend-platform: {result}", file=sys.stderr)
    before = sys.excepthook

    def show(kind, error, traceback):  # type: ignore[no-untyped-def]
        line = explain(error)
        if not line or os.environ.get("VLLM_LOGGING_LEVEL") == "DEBUG":
            before(kind, error, traceback)
        if line:
            print(f"ascend-platform: {line}", file=sys.stderr)

    sys.excepthook = show


def explain(error: BaseException) -> str:
    """One line for an error that ends vLLM's command if it is one of those below, otherwise ""."""
    explanations = (host.missing_library, _other_torch_npu, _refusal, _no_platform, _port_in_use, _no_suffix)
    return next(filter(None, (explanation(error) for explanation in explanations)), "")


def _other_torch_npu(error: BaseException) -> str:
    """A torch_npu for another version of torch, which fails in many ways when torch loads it."""
    for each in host.error_chain(error):
        if not host.through_torch_npu(each):
            continue
        if problem := requirements.unmet("torch-npu") or requirements.unmet("ascend-platform"):
            found = " ".join(str(each).split())
            return f"torch_npu {requirements.version('torch-npu')} cannot be loaded ({found}): {problem}"
    return ""


def _refusal(error: BaseException) -> str:
    """A RefusedError of one of our wheels, as it is or wrapped by pydantic."""
    for each in host.error_chain(error):
        listing = getattr(each, "errors", None)
        inner = [(item.get("ctx") or {}).get("error") for item in listing()] if callable(listing) else []
        for one in (each, *inner):
            if isinstance(one, RefusedError):
                return str(one)
    return ""


def _no_platform(error: BaseException) -> str:
    """Why vLLM found no device (``vllm/config/device.py``), if the platform knows."""
    if not any(str(each).startswith("Failed to infer device type") for each in host.error_chain(error)):
        return ""
    filtered = PluginFilter.current()
    if filtered.allows(COMPONENTS["ascend-platform"]):
        reason = ascend_platform._reason
        return f"vLLM found no device: {ascend_platform.NOT_ACTIVATED}: {reason}" if reason else ""
    from ascend_platform.cli import plugins

    wrong = filtered.problem(plugins.names())
    return f"{VARIABLE}: {wrong[0]}" if wrong else ""


def _port_in_use(error: BaseException) -> str:
    """A port that another process uses (``vllm/entrypoints/launchers/launcher.py``, ``create_server_socket``)."""
    for each in host.error_chain(error):
        if isinstance(each, OSError) and each.errno == errno.EADDRINUSE:
            *_, last = walk_tb(each.__traceback__)
            address, port, *_ = last[0].f_locals.get("addr", ("", "of vLLM"))
            at = address and f" (on {address})"
            return f"port {port} is in use by another process{at}; fix: end that process, or choose another port with --port"
    return ""


def _no_suffix(error: BaseException) -> str:
    """vLLM's own error about a missing library (``vllm/config/speculative.py``, ``_validate_suffix_decoding``)."""
    if any(isinstance(each, ImportError) and "Arctic Inference is required" in str(each) for each in host.error_chain(error)):
        return "speculative decoding with suffix needs arctic-inference; fix: pip install 'ascend-platform[suffix]'"
    return ""


def _cpu_without_kernels() -> Problem | None:
    """VLLM_TARGET_DEVICE=cpu with a vLLM that was built without CPU kernels: `vllm serve` would fail after a while."""
    vllm = host.package("vllm")
    if os.environ.get("VLLM_TARGET_DEVICE") != "cpu" or "serve" not in sys.orig_argv[:4] or not vllm or any(vllm.glob("_C*.so")):
        return None
    found = "VLLM_TARGET_DEVICE: 'cpu' makes vLLM use the CPU, for which this vLLM has no kernels"
    return Problem(found, "unset VLLM_TARGET_DEVICE")
