# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""The directory of vLLM's Unix sockets."""

import atexit
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from typing import Any

from ascend_platform.errors import RefusedError
from ascend_platform.process import diagnostics

VARIABLE = "VLLM_RPC_BASE_PATH"
# Bytes: sun_path of Linux, minus vLLM's name of a socket.
LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000")

_waiting: list["subprocess.Popen[bytes]"] = []


def use_own_directory() -> None:
    """Set VLLM_RPC_BASE_PATH to a directory that is removed at exit, with the sockets that killed
    processes leave behind.

    One that the user has set is used if no other user may write there, and otherwise has the new
    directory.
    """
    user_directory = os.environ.get(VARIABLE)
    if _needs_directory(user_directory):
        _create(user_directory)


def check_directory() -> None:
    """Refuse a directory in which the names of sockets would be too long.

    Raises:
        RefusedError: the directory, and the longest that is supported.
    """
    user_directory = os.environ.get(VARIABLE)
    directory = user_directory or tempfile.gettempdir()
    longest = LONGEST - len("/vllm-00000000") * _needs_directory(user_directory)
    _check("TMPDIR" if user_directory is None else VARIABLE, directory, longest)


def is_private(directory: str) -> bool:
    """Whether this is a directory, and no link to one, in which only this user, and root, may
    write."""
    try:
        found = os.lstat(directory)
    except OSError:
        return False
    is_writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not is_writable


def _needs_directory(user_directory: str | None) -> bool:
    return user_directory is None or (
        os.path.isdir(user_directory) and not is_private(user_directory)
    )


def check_loopback(parallel: Any) -> None:
    """Refuse several ranks on a machine without 127.0.0.1, where vLLM's and Gloo's sockets for
    local processes are.

    Raises:
        RefusedError: the address, and the command that adds it.
    """
    if parallel.world_size == parallel.data_parallel_size == 1:
        return
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError as error:
            raise RefusedError(
                f"this machine has no address 127.0.0.1 ({error.strerror}), at which the ranks of"
                " an engine meet; fix: ip link set lo up; ip address add 127.0.0.1/8 dev lo"
            ) from error


def replace_foreign_directory() -> None:
    """Replace VLLM_RPC_BASE_PATH in a process of Ray if it is no directory of this machine and
    user.

    vLLM hands its environment to Ray's workers and engines on other machines
    (``vllm/v1/executor/ray_env_utils.py``), and ends them without their exit handlers. So a process
    that waits for their end removes the new directory.
    """
    directory = os.environ.get(VARIABLE)
    if directory and "ray" in sys.modules and not is_private(directory):
        _create()
        remove = ["sh", "-c", 'read -r line; rm -rf -- "$0"', os.environ[VARIABLE]]
        _waiting.append(subprocess.Popen(remove, stdin=subprocess.PIPE, start_new_session=True))


def _check(variable: str, directory: str, longest: int) -> None:
    from vllm import envs

    length = len(os.fsencode(directory))
    if length > longest and envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        raise RefusedError(
            f"{variable}: {directory} has {length} characters, and with more than {longest} the"
            " names of vLLM's Unix sockets in it are too long; fix: export"
            " VLLM_RPC_BASE_PATH=/tmp, or another short directory"
        )


def _create(parent: str | None = None) -> None:
    # child processes inherit it
    directory = os.environ[VARIABLE] = tempfile.mkdtemp(prefix="vllm-", dir=parent)
    atexit.register(_remove, directory, os.getpid())


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        diagnostics.read_reports()
        shutil.rmtree(directory, ignore_errors=True)
