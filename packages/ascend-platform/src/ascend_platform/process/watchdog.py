# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Watchdog threads that end a process when the process that it depends on has exited.

Without them vLLM's engine core outlives its API server, and a worker outlives rank 0.
"""

import contextlib
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
from typing import Any

from ascend_platform.logger import logger
from ascend_platform.process import startup

TCP_KEEPALIVE = 5, 5, 3  # TCP_KEEPIDLE and TCP_KEEPINTVL in seconds, TCP_KEEPCNT
SIGTERM_GRACE = 10.0  # Seconds. A process that waits in C++ does not handle SIGTERM.
VLLM_PROCESS_NAMES = ("EngineCore", "VllmWorker", "ApiServer", "VLLM_DP_Coordinator")


def exit_when_parent_exits() -> None:
    """End this process when its parent exits, if it is a multiprocessing child of vLLM. Called when
    the platform is activated.

    The parent may have exited before this call. It is not known yet where the platform is activated
    while multiprocessing unpickles the process's object, as in an engine core of ``vllm serve``.
    Such a process leaves out the last garbage collection, for which the parent waits.
    """
    if multiprocessing.current_process().name.startswith(VLLM_PROCESS_NAMES):
        threading.Thread(target=_watch_parent, name="ascend-parent", daemon=True).start()
        startup.skip_last_collection()


def _watch_parent() -> None:
    parent: Any
    # Until multiprocessing has unpickled this process's object.
    while (parent := multiprocessing.parent_process()) is None:
        time.sleep(0.1)
    # The sentinel is a pipe, which other processes forked by the parent keep open.
    sentinels = [parent.sentinel]
    while os.getppid() == parent.pid and not multiprocessing.connection.wait(sentinels, timeout=1):
        pass
    # The parent may have ended as it should: Ray ends an actor without its engine's shutdown. vLLM's
    # workers say at this level that their parent has exited.
    logger.info("the parent process %d has exited; terminating", parent.pid)
    _terminate()


def exit_when_rank_0_exits() -> None:
    """End this process when rank 0 exits, detected by a connection to the TCP store of
    torch.distributed.

    Call it after the process groups are initialized. Does nothing with other stores.
    """
    import torch  # only a worker needs it

    store = torch.distributed.distributed_c10d._get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    if isinstance(store, torch.distributed.TCPStore):
        connection = socket.create_connection((store.host, store.port), timeout=60)
        threading.Thread(
            target=_watch_rank_0, args=(connection,), name="ascend-rank-0", daemon=True
        ).start()


def _watch_rank_0(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
    for option, value in zip(options, TCP_KEEPALIVE, strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    host, port = connection.getpeername()[:2]
    with contextlib.suppress(OSError):
        while connection.recv(1):
            pass
    lost = "lost the connection to rank 0 (%s port %d): its process or machine is down; terminating"
    logger.error(lost, host, port)
    _terminate()


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SIGTERM_GRACE)
    os._exit(1)
