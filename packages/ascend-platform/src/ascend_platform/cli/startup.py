"""Start-up of vLLM's own commands, called by ``ascend_platform.pth`` as Python starts."""

import os
import sys
from collections.abc import Sequence

SWITCH = "VLLM_ASCEND_STARTUP_CHECKS"
"""Environment variable; with "0" nothing is checked and no excepthook is installed."""


def run() -> None:
    """Check the environment and install the excepthook if vLLM is the program that this process runs."""
    if os.environ.get(SWITCH) != "0" and runs_vllm(sys.orig_argv):
        from ascend_platform.cli import excepthook

        excepthook.install()


def runs_vllm(command: Sequence[str]) -> bool:
    """Whether a command of Python is ``vllm …`` or ``python -m vllm…``, with or without options of Python."""
    words = [word for word in command[1:] if word == "-m" or not word.startswith("-")]
    if words[:1] == ["-m"]:
        return words[1:] != [] and words[1].split(".")[0] == "vllm"
    return words != [] and "-c" not in command[1:2] and os.path.basename(words[0]) == "vllm"
