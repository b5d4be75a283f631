# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Free TCP ports for processes that listen on them later."""

import collections
import os
import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RANDOM = random.SystemRandom()  # Tests and vLLM seed the module's own generator.
_given: collections.deque[int] = collections.deque(maxlen=100)


def reserve_port() -> tuple[socket.socket, int]:
    """A port below those that the kernel gives to connections and to listeners on any port, and the
    socket that keeps other processes from it.

    Each of four pytest workers draws from other ports. The socket is bound without SO_REUSEADDR and
    gets the option afterwards: no other process can bind the port, but this process can listen on
    it with SO_REUSEADDR, as TCPStore does.
    """
    first = int(_RANGE.read_text().split()[0])
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = [
        port for port in range(first - first // 12 + worker % 4, first, 4) if port not in _given
    ]
    for port in _RANDOM.sample(ports, min(100, len(ports))):
        held = socket.socket()
        try:
            held.bind(("", port))
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _given.append(port)
        return held, port
    raise OSError(f"none of {len(ports)} ports below {first} is free")


def free_port() -> int:
    """A port as of :func:`reserve_port`, for another process; this one does not draw it again
    soon."""
    held, port = reserve_port()
    held.close()
    return port
