"""The directory of vLLM's Unix sockets."""

import atexit
import os
import shutil
import tempfile


def use_own_directory() -> None:
    """Set VLLM_RPC_BASE_PATH to a directory that is removed at exit, with the sockets that killed processes leave behind."""
    if "VLLM_RPC_BASE_PATH" not in os.environ:
        directory = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.mkdtemp(prefix="vllm-")  # child processes inherit it
        atexit.register(_remove, directory, os.getpid())


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(directory, ignore_errors=True)
