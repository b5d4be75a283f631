"""A worker on another machine than rank 0's ends when that is gone: vLLM lets it wait for the next step for ever."""

import os
import signal
import socket
import threading
import time

import torch

from ascend_platform import extension

SILENCE = 5, 5, 3  # seconds until TCP asks whether the other machine is there, between two questions, and how often it asks
GRACE = 10.0  # seconds to end by SIGTERM, which a worker that waits for a collective cannot


def end_with_rank_0() -> None:
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
    line = "the connection to rank 0 (%s port %d) has ended, so its process or machine is gone; this worker ends"
    extension.logger.error(line, host, port)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)
