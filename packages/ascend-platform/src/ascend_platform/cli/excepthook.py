"""One line where vLLM's own commands cannot go on, or will not do what was meant: what is wrong, and what cures it.

``import torch`` loads torch_npu by itself, transformers imports it too, and vLLM imports both before it asks any plugin.
So where torch_npu is installed and CANN is not, nothing of vLLM or of ours runs before the error. Of two plugins of one name
vLLM keeps one, so that ours may not run at all, and a plugin that is filtered out does not run. ``ascend_platform.pth`` imports
this module as Python starts, which is the one earlier place, in vLLM's own commands alone.
"""

import errno
import os
import sys
from traceback import walk_tb

import ascend_platform
from ascend_platform import extension, host

_installed = False


def install() -> None:
    """End the command where it cannot serve; show an error that can be explained as one line, and every other as before.

    Python reads start-up files twice where lib64 is a link to lib; the second call does nothing.
    """
    from ascend_platform.cli import doctor, env_vars

    global _installed
    if _installed:
        return
    _installed = True
    if line := extension.clash() or _cpu_without_kernels():
        sys.stderr.write(f"ascend-platform: {line}\n")
        sys.stderr.flush()
        os._exit(1)  # while Python starts, SystemExit would be a fatal error with a traceback
    for title, state, found, fix in (*env_vars.target_device(), *doctor.triton()):
        if state != "ok":
            print(f"ascend-platform: {title}: {found}; to cure it: {fix}", file=sys.stderr)
    before = sys.excepthook

    def show(kind, error, traceback):  # type: ignore[no-untyped-def]
        line = explain(error)
        if not line or os.environ.get("VLLM_LOGGING_LEVEL") == "DEBUG":
            before(kind, error, traceback)
        if line:
            print(f"ascend-platform: {line}", file=sys.stderr)

    sys.excepthook = show


def explain(error: BaseException) -> str:
    """One line for an error that vLLM's command ends with, if it is one of those below; else ""."""
    explanations = (host.missing_library, _other_torch_npu, _refusal, _no_platform, _port_in_use, _no_suffix)
    return next(filter(None, (explanation(error) for explanation in explanations)), "")


def _other_torch_npu(error: BaseException) -> str:
    """A torch_npu for another torch, which fails in many ways as torch loads it."""
    for each in host.error_chain(error):
        if host.through_torch_npu(each) and (reason := extension.unmet("torch-npu") or extension.unmet("ascend-platform")):
            found = " ".join(str(each).split())
            return f"torch_npu {extension.version('torch-npu')} cannot be loaded ({found}): {reason}"
    return ""


def _refusal(error: BaseException) -> str:
    """What one of our wheels refuses, as it is or as pydantic hands it on."""
    for each in host.error_chain(error):
        listing = getattr(each, "errors", None)
        inner = [(item.get("ctx") or {}).get("error") for item in listing()] if callable(listing) else []
        for one in (each, *inner):
            if isinstance(one, extension.RefusedError):
                return str(one)
    return ""


def _no_platform(error: BaseException) -> str:
    """Why vLLM found no device, where that is for us to know (``vllm/config/device.py``)."""
    if not any(str(each).startswith("Failed to infer device type") for each in host.error_chain(error)):
        return ""
    if extension.allowed(extension.COMPONENTS["ascend-platform"]):
        return f"vLLM found no device: {ascend_platform._reason}" if ascend_platform._reason else ""
    from ascend_platform.cli import env_vars, plugins

    title, _, found, fix = next(env_vars.plugin_names(plugins.names()))
    return f"{title}: {found}; to cure it: {fix}"


def _port_in_use(error: BaseException) -> str:
    """A port that another process has (``vllm/entrypoints/launchers/launcher.py``, ``create_server_socket``)."""
    for each in host.error_chain(error):
        if isinstance(each, OSError) and each.errno == errno.EADDRINUSE:
            *_, last = walk_tb(each.__traceback__)
            address, port, *_ = last[0].f_locals.get("addr", ("", "of vLLM"))
            at = address and f" (on {address})"
            return f"port {port} is in use by another process{at}; end that, or choose another with --port"
    return ""


def _no_suffix(error: BaseException) -> str:
    """vLLM's own refusal (``vllm/config/speculative.py``, ``_validate_suffix_decoding``), which comes before ours could."""
    if any(isinstance(each, ImportError) and "Arctic Inference is required" in str(each) for each in host.error_chain(error)):
        return "speculative decoding by suffix needs arctic-inference; run: pip install 'ascend-platform[suffix]'"
    return ""


def _cpu_without_kernels() -> str:
    """VLLM_TARGET_DEVICE=cpu makes `vllm serve` use the CPU, and fail there after a while if vLLM was built without kernels."""
    vllm = host.package("vllm")
    if os.environ.get("VLLM_TARGET_DEVICE") != "cpu" or "serve" not in sys.orig_argv[:4] or not vllm or any(vllm.glob("_C*.so")):
        return ""
    return "VLLM_TARGET_DEVICE: 'cpu' makes vLLM use the CPU, for which this vLLM has no kernels; run: unset VLLM_TARGET_DEVICE"
