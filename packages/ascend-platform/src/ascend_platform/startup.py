"""One line where vLLM's own commands cannot go on: CANN's libraries are missing, or another wheel has our plugins' names.

``import torch`` loads torch_npu by itself, transformers imports it too, and vLLM imports both before it asks any plugin.
So where torch_npu is installed and CANN is not, nothing of vLLM or of ours runs before the error. And of two plugins of
one name vLLM keeps one, so that ours may not run at all. ``ascend_platform.pth`` imports this module as Python starts,
which is the one earlier place, in vLLM's own commands alone.
"""

import os
import sys

from ascend_platform import extension


def missing_library(error: BaseException | None) -> str:
    """What is missing and what to do, if an error or its cause is torch_npu lacking a library of CANN; else ""."""
    while error is not None:
        name, _, rest = str(error).partition(": ")
        if isinstance(error, ImportError) and "cannot open shared object file" in rest and _through_torch_npu(error):
            return (
                f"CANN's library {name} was not found, so torch_npu cannot be loaded; source CANN's set_env.sh "
                "(usually /usr/local/Ascend/ascend-toolkit/set_env.sh), or use ascend-emulator run where there is no NPU"
            )
        error = error.__cause__ or error.__context__
    return ""


def install() -> None:
    """End the command if another wheel has our names; show missing libraries as one line, and every other error as before."""
    if line := extension.clash():
        sys.stderr.write(f"ascend-platform: {line}\n")
        sys.stderr.flush()
        os._exit(1)  # while Python starts, SystemExit would be a fatal error with a traceback
    before = sys.excepthook

    def show(kind, error, traceback):  # type: ignore[no-untyped-def]
        line = missing_library(error)
        if line:
            print(f"ascend-platform: {line}", file=sys.stderr)
        else:
            before(kind, error, traceback)

    sys.excepthook = show


def _through_torch_npu(error: BaseException) -> bool:
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "torch_npu":
            return True
        traceback = traceback.tb_next
    return False
