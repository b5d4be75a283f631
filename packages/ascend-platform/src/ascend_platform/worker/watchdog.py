"""No process waits for one that is gone: vLLM's engine core lives on without its API server, and a worker without rank 0."""

import multiprocessing
import os
import signal
import socket
import threading
import time

import torch

from ascend_platform import extension

SILENCE = 5, 5, 3  # seconds until TCP asks whether the other machine is there, between two questions, and how often it asks
GRACE = 10.0  # seconds to end by SIGTERM, which a process that waits in C++ cannot
STARTED_BY_VLLM = ("EngineCore", "VllmWorker", "ApiServer", "VLLM_DP_Coordinator")  # as vLLM names its processes


def exit_when_parent_exits() -> None:
    """Watch the process that has started this one, if vLLM did so by multiprocessing. Called as the platform is imported."""
    if multiprocessing.current_process().name.startswith(STARTED_BY_VLLM):
        threading.Thread(target=_watch_parent, args=(os.getppid(),), name="ascend-parent", daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    _end("the process %d that has started this one is gone; this one ends", parent)


def exit_when_rank_0_exits() -> None:
    """Watch the process that has torch.distributed's TCP store, which is rank 0's, by a connection of our own.

    Called once the process groups are there. It does nothing where the store is no TCP store.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    if isinstance(store, torch.distributed.TCPStore):
        connection = socket.create_connection((store.host, store.port), timeout=60)
        threading.Thread(target=_watch, args=(connection,), name="ascend-rank-0", daemon=True).start()


def _watch(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in zip((socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), SILENCE, strict=True):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    host, port = connection.getpeername()[:2]
    try:
        while connection.recv(1):
            pass
    except OSError:
        pass
    _end("the connection to rank 0 (%s port %d) has ended, so its process or machine is gone; this worker ends", host, port)


def _end(line: str, *arguments: object) -> None:
    extension.logger.error(line, *arguments)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)
