"""The directory of vLLM's Unix sockets."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile

from ascend_platform.cli import failures
from ascend_platform.components import RefusedError

VARIABLE = "VLLM_RPC_BASE_PATH"
LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000")  # bytes: sun_path of Linux, minus vLLM's name of a socket

_waiting: list["subprocess.Popen[bytes]"] = []


def use_own_directory() -> None:
    """Set VLLM_RPC_BASE_PATH to a directory that is removed at exit, with the sockets that killed processes leave behind.

    Raises:
        RefusedError: the names of sockets in it would be too long.
    """
    if VARIABLE not in os.environ:
        _check("TMPDIR", tempfile.gettempdir(), LONGEST - len("/vllm-00000000"))
        _create()
    else:
        _check(VARIABLE, os.environ[VARIABLE], LONGEST)


def replace_foreign_directory() -> None:
    """Replace VLLM_RPC_BASE_PATH in a process of Ray if it is no directory of this machine.

    vLLM hands its environment to Ray's workers and engines on other machines (``vllm/v1/executor/ray_env_utils.py``), and ends
    them without their exit handlers. So a process that waits for their end removes the new directory.
    """
    given = os.environ.get(VARIABLE)
    if given and "ray" in sys.modules and not os.path.isdir(given):
        _create()
        remove = ["sh", "-c", 'read -r line; rm -rf -- "$0"', os.environ[VARIABLE]]
        _waiting.append(subprocess.Popen(remove, stdin=subprocess.PIPE, start_new_session=True))


def _check(variable: str, directory: str, longest: int) -> None:
    from vllm import envs

    length = len(os.fsencode(directory))
    if length > longest and envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        raise RefusedError(
            f"{variable}: {directory} has {length} characters, and with more than {longest} the names of vLLM's Unix sockets "
            "in it are too long; fix: export VLLM_RPC_BASE_PATH=/tmp, or another short directory"
        )


def _create() -> None:
    directory = os.environ[VARIABLE] = tempfile.mkdtemp(prefix="vllm-")  # child processes inherit it
    atexit.register(_remove, directory, os.getpid())


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        failures.cause()  # reads what child processes have left there
        shutil.rmtree(directory, ignore_errors=True)
