"""The directory of vLLM's Unix sockets."""

import atexit
import os
import shutil
import tempfile


def use_own_directory() -> None:
    """Give vLLM's Unix sockets a directory that goes with this process: what processes that die have left goes with it."""
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        directory = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.mkdtemp(prefix="vllm-")  # which child processes inherit
        atexit.register(_remove, directory, os.getpid())


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # not a fork of it
        shutil.rmtree(directory, ignore_errors=True)
