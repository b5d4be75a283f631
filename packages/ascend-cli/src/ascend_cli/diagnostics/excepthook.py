# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The last line of vLLM's own commands: what was found, and what fixes it.

``import torch`` loads torch_npu by itself, transformers imports it too, and vLLM imports both
before it asks any plugin. So where torch_npu is installed and CANN is not, nothing of vLLM or of
ours runs before the error. vLLM keeps one of two plugins with one name, so ours may not run at all,
and a plugin that is filtered out does not run. ascend-platform calls :func:`install` as Python
starts, which is the one earlier time, in vLLM's own commands only.
"""

import atexit
import contextlib
import functools
import os
import signal
import sys
import time
from types import FrameType

from ascend_platform.extension import installation

from ascend_cli.diagnostics import checks, explanations, failures

_last = ""
TRACKER_PATIENCE = 2.0  # seconds


@functools.cache
def install() -> None:
    """Exit if vLLM's command cannot serve; otherwise let the command end with one line if it fails.

    Python reads start-up files twice where lib64 is a link to lib; the second call does nothing.
    """
    checked = (
        installation.conflict,
        installation.cuda_torch,
        installation.cuda_extensions,
        _cpu_without_kernels,
    )
    if problem := next(filter(None, (check() for check in checked)), None):
        sys.stderr.write(f"ascend-platform: {problem}\n")
        sys.stderr.flush()
        os._exit(1)  # While Python starts, SystemExit would be a fatal error with a traceback.
    warned = {checks.TARGET_DEVICE: checks.target_device(), "triton": checks.two_tritons()}
    for title, problem in warned.items():
        if problem:
            print(f"ascend-platform: {title}: {problem}", file=sys.stderr)
    before = sys.excepthook

    def show(kind, error, traceback):  # type: ignore[no-untyped-def]
        global _last
        if issubclass(kind, KeyboardInterrupt):
            # vLLM's own text for SIGTERM
            _last = f"vllm: interrupted by {'SIGTERM' if str(error) == 'terminated' else 'SIGINT'}"
            return
        line = failures.cause() or explanations.explain(error)
        if not line or os.environ.get("VLLM_LOGGING_LEVEL") == "DEBUG":
            before(kind, error, traceback)
        other = f"vllm: {explanations.describe(error)}; fix: see the traceback above"
        _last = f"ascend-platform: {line}" if line else other

    sys.excepthook = show
    failures.forget()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    # torch_npu prints a line at exit if the excepthook was called (torch_npu/utils/_error_code.py).
    # The handler registered first, before torch_npu is imported, runs last.
    atexit.register(_print_last)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End on ctrl-C: at once while modules are imported, because some catch any exception,
    and later by SystemExit.

    vLLM catches KeyboardInterrupt where it waits for the engine (``zmq_socket_ctx``), and asyncio
    replaces Python's own handler by one that waits for the event loop. VLLM_RPC_BASE_PATH is set
    before child processes are started (``ascend_platform/process/sockets.py``).
    """
    global _last
    line = "vllm: interrupted by SIGINT"
    if "VLLM_RPC_BASE_PATH" in os.environ:
        _last = line
        raise SystemExit(128 + number)
    os.write(2, f"{line}\n".encode())
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _print_last() -> None:
    line = _last or (failures.cause() and f"ascend-platform: {failures.cause()}")
    if line:
        with contextlib.suppress(OSError, AttributeError):
            _wait_for_resource_tracker()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # Closed, or without a reader.
                stream.flush()
        print(line, file=sys.stderr, flush=True)


def _wait_for_resource_tracker() -> None:
    """Let Python's resource tracker warn of what killed processes have left, which it removes when
    all processes have ended."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = module and module._resource_tracker
    if tracker and tracker._fd is not None:
        os.close(tracker._fd)
        pid, tracker._fd, tracker._pid = tracker._pid, None, None
        deadline = time.monotonic() + TRACKER_PATIENCE
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
            time.sleep(0.02)


def _cpu_without_kernels() -> installation.Problem | None:
    """VLLM_TARGET_DEVICE=cpu with a vLLM that was built without CPU kernels: `vllm serve` would
    fail after a while."""
    vllm = installation.package("vllm")
    is_served = os.environ.get("VLLM_TARGET_DEVICE") == "cpu" and "serve" in sys.orig_argv[:4]
    if not is_served or not vllm or any(vllm.glob("_C*.so")):
        return None
    found = "VLLM_TARGET_DEVICE: 'cpu' makes vLLM use the CPU, for which this vLLM has no kernels"
    return installation.Problem(found, "unset VLLM_TARGET_DEVICE")
