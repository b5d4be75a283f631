"""The last line of vLLM's own commands: what was found, and what fixes it.

``import torch`` loads torch_npu by itself, transformers imports it too, and vLLM imports both before it asks any plugin. So where
torch_npu is installed and CANN is not, nothing of vLLM or of ours runs before the error. vLLM keeps one of two plugins with one
name, so ours may not run at all, and a plugin that is filtered out does not run. ``ascend_platform.pth`` imports this module as
Python starts, which is the one earlier place, in vLLM's own commands only.
"""

import atexit
import contextlib
import os
import signal
import sys
from types import FrameType

from ascend_platform import host
from ascend_platform.cli import explanations, failures
from ascend_platform.components import Problem, requirements

_installed = False
_last = ""


def install() -> None:
    """Exit if vLLM's command cannot serve; otherwise let the command end with one line if it fails.

    Python reads start-up files twice where lib64 is a link to lib; the second call does nothing.
    """
    from ascend_platform.cli import checks, env_vars

    global _installed
    if _installed:
        return
    _installed = True
    if problem := requirements.conflict() or _cpu_without_kernels():
        sys.stderr.write(f"ascend-platform: {problem}\n")
        sys.stderr.flush()
        os._exit(1)  # while Python starts, SystemExit would be a fatal error with a traceback
    for result in (*env_vars.target_device(), *checks.triton()):
        if result.fix:
            print(f"ascend-platform: {result}", file=sys.stderr)
    before = sys.excepthook

    def show(kind, error, traceback):  # type: ignore[no-untyped-def]
        global _last
        if issubclass(kind, KeyboardInterrupt):
            _last = f"vllm: interrupted by {'SIGTERM' if str(error) == 'terminated' else 'SIGINT'}"  # vLLM's own text for SIGTERM
            return
        line = failures.cause() or explanations.explain(error)
        if not line or os.environ.get("VLLM_LOGGING_LEVEL") == "DEBUG":
            before(kind, error, traceback)
        _last = f"ascend-platform: {line}" if line else f"vllm: {explanations.describe(error)}; fix: see the traceback above"

    sys.excepthook = show
    failures.forget()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # torch_npu prints a line at exit if the excepthook was called (torch_npu/utils/_error_code.py). The handler registered first,
    # before torch_npu is imported, runs last.
    atexit.register(_print_last)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End on ctrl-C: at once while modules are imported, some of which catch KeyboardInterrupt, and later by that.

    asyncio would replace Python's own handler by one that waits for the event loop, and vLLM starts the engine without returning
    to it. VLLM_RPC_BASE_PATH is set before child processes are started (``config/sockets.py``).
    """
    if "VLLM_RPC_BASE_PATH" in os.environ:
        raise KeyboardInterrupt
    os.write(2, b"vllm: interrupted by SIGINT\n")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _print_last() -> None:
    line = _last or (failures.cause() and f"ascend-platform: {failures.cause()}")
    if line:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()
        print(line, file=sys.stderr, flush=True)


def _cpu_without_kernels() -> Problem | None:
    """VLLM_TARGET_DEVICE=cpu with a vLLM that was built without CPU kernels: `vllm serve` would fail after a while."""
    vllm = host.package("vllm")
    if os.environ.get("VLLM_TARGET_DEVICE") != "cpu" or "serve" not in sys.orig_argv[:4] or not vllm or any(vllm.glob("_C*.so")):
        return None
    found = "VLLM_TARGET_DEVICE: 'cpu' makes vLLM use the CPU, for which this vLLM has no kernels"
    return Problem(found, "unset VLLM_TARGET_DEVICE")
