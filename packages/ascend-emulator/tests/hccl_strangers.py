# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Processes that are not of a communicator and connect to its ranks or to its root's store: for
test_hccl.py."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hccl_c_scenarios import library, message
from hccl_ranks import scenario, timed


def root_info() -> Any:
    """The root info that HcclGetRootInfo passes to the ranks: mark, address, port, identifier,
    secret and
    machine."""
    root = ctypes.create_string_buffer(4108)
    assert library().HcclGetRootInfo(root) == 0, message()
    return root


def store_of(root: str) -> dist.Store:
    _, ip, port, name, *_ = root.split()
    return dist.PrefixStore(
        name, dist.TCPStore(ip, int(port), is_master=False, wait_for_workers=False)
    )


def signature(secret: str, message_text: str) -> str:
    """HMAC of RFC 2104 with hexadecimal digests of SHA-1, as transport.h has it."""
    key = secret.encode().ljust(64, b"\0")
    inner = hashlib.sha1(bytes(each ^ 0x36 for each in key) + message_text.encode()).hexdigest()
    return hashlib.sha1(bytes(each ^ 0x5C for each in key) + inner.encode()).hexdigest()


def publish(store: dist.Store, secret: str, key: str, value: str) -> None:
    store.set(key, f"{value} {signature(secret, f'{key}={value}')}")


# Who connects to rank 0 of 3: what the connection sends, rank, number of ranks.
HANDSHAKES: dict[str, list[tuple[str, int, int]]] = {
    "strangers": [
        ("wrong", 7, 9),
        ("half", 7, 9),
        ("right", 2, 3),
        ("wrong", 7, 9),
        ("right", 1, 3),
    ],
    "silent strangers": [*[("silent", 0, 0)] * 40, ("split", 2, 3), ("right", 1, 3)],
    "another number of ranks": [("right", 1, 2)],
    "its own rank": [("right", 0, 3)],
    "a rank that is not there": [("right", 3, 3)],
    "a rank twice": [("right", 1, 3), ("right", 1, 3)],
}


@scenario("handshakes", ranks=1, plain_c="1", HCCL_CONNECT_TIMEOUT="20")
def handshakes(rank: int, ranks: int) -> Any:
    """Rank 0 of three, whose peers are this program: they know its root info, and say what they
    like."""
    torch.ones(1, device="npu")
    hccl, out = library(), {}
    for name, signed_text in HANDSHAKES.items():
        root, comm = root_info(), ctypes.c_void_p()
        peers = threading.Thread(target=connect, args=(root.value.decode(), signed_text))
        peers.start()
        status = hccl.HcclCommInitRootInfo(3, root, 0, ctypes.byref(comm))
        out[name] = [status, message() if status else ""]
        peers.join()
        if not status:
            hccl.HcclCommDestroy(comm)
    return out


def connect(root: str, signed_text: list[tuple[str, int, int]]) -> None:
    secret, store = root.split()[4], store_of(root)
    place = store.get("0/0").decode().rpartition(" ")[0]
    machine, _, local, _ = place.split()
    for peer in (1, 2):
        publish(store, secret, f"0/{peer}", f"{machine} {peer} nowhere any")
    open_links = []
    for what, rank, ranks in signed_text:
        link = socket.socket(socket.AF_UNIX)
        open_links.append(link)
        link.connect("\0" + local)
        link_secret = "guessed" if what == "wrong" else secret
        greeting = (
            struct.pack("II", rank, ranks)
            + signature(link_secret, f"link to {place} from {rank} of {ranks}").encode()
        )
        if what == "split":
            link.send(greeting[:5])
            time.sleep(0.2)
            link.send(greeting[5:])
        elif what != "silent":
            link.send(greeting[:20] if what == "half" else greeting)
        if what == "half":
            link.close()
    time.sleep(0.5 if "silent" in signed_text[0] else 0)
    for link in open_links:
        link.close()


def listening() -> list[str]:
    """Addresses at which this process listens for TCP, without the port."""
    inodes = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(path))
        except FileNotFoundError:
            continue
    addresses = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        lines = Path(table).read_text().splitlines()[1:] if Path(table).exists() else []
        for fields in map(str.split, lines):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                addresses.append(fields[1].partition(":")[0])
    return sorted(addresses)


@scenario("stranger", ranks=1, plain_c="1", HCCL_CONNECT_TIMEOUT="20")
def stranger(rank: int, ranks: int) -> Any:
    """Rank 0 of two. A process that was not given the root info connects to the store, and tries to
    be rank 1."""
    torch.ones(1, device="npu")
    root, comm = root_info(), ctypes.c_void_p()
    seen: dict[str, str] = {}

    def intrude() -> None:
        # Any process can find the port, and list the keys.
        _, ip, port, name, *_ = root.value.decode().split()
        store = dist.PrefixStore(
            name, dist.TCPStore(ip, int(port), is_master=False, wait_for_workers=False)
        )
        address = store.get("0/0").decode()
        seen.update(
            {
                key: store.get(key).decode("latin-1")
                for key in ("0/0", "0/token")
                if store.check([key])
            }
        )
        machine, _, local, *_ = address.split()
        store.set("0/1", f"{machine} 1 nowhere any")
        with socket.socket(socket.AF_UNIX) as link:
            link.connect("\0" + local)
            link.send(seen.get("0/token", "").encode("latin-1") + struct.pack("II", 1, 2))
            link.settimeout(15)
            with contextlib.suppress(OSError):
                link.recv(1)

    thread = threading.Thread(target=intrude)
    thread.start()
    status = library().HcclCommInitRootInfo(2, root, 0, ctypes.byref(comm))
    text = message() if status else ""
    if not status:
        library().HcclCommDestroy(comm)
    thread.join()
    secrets = root.value.decode().split()[4:5]
    return {
        "status": status,
        "message": text,
        "token": any(
            key == "0/token" or secret in value
            for key, value in seen.items()
            for secret in [*secrets, "\0"]
        ),
        "listening": listening(),
    }


@scenario("lost store", ranks=1, plain_c="1", HCCL_CONNECT_TIMEOUT="20")
def lost_store(rank: int, ranks: int) -> Any:
    """Rank 1 of two, whose root ends while it waits for it; a root on another machine; values that
    another secret signed."""
    torch.ones(1, device="npu")
    mark, _, _, name, secret, machine = root_info().value.decode().split()
    servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]

    def started(ip: str, where: str) -> Any:
        root = ctypes.create_string_buffer(
            f"{mark} {ip} {servers[0].port} {name} {secret} {where}".encode(), 4108
        )

        def init() -> None:
            if library().HcclCommInitRootInfo(2, root, 1, ctypes.byref(ctypes.c_void_p())):
                raise RuntimeError(message())

        return timed(init)

    elsewhere = started("127.0.0.1", "another/machine")
    publish(dist.PrefixStore(name, servers[0]), "another secret", "0/0", f"{machine} 0 nowhere any")
    forged = started("127.0.0.1", machine)
    servers[0].delete_key(f"{name}/0/0")
    threading.Timer(1, servers.clear).start()
    return [started("127.0.0.1", machine), elsewhere, forged]


@scenario("bad devices", ranks=2, plain_c="1", HCCL_CONNECT_TIMEOUT="20")
def bad_devices(rank: int, ranks: int) -> Any:
    """HcclCommInitAll with an NPU that is not there, and with one whose buffers do not fit."""
    if rank:
        return None
    torch.ones(1, device="npu")

    def init(*devices: int) -> None:
        if library().HcclCommInitAll(2, (ctypes.c_int32 * 2)(*devices), (ctypes.c_void_p * 2)()):
            raise RuntimeError(message())

    absent = timed(lambda: init(0, 99))
    held = torch.empty(500 << 20, dtype=torch.uint8, device="npu:1")  # of 512 MiB
    full = timed(lambda: init(0, 1))
    del held
    return [absent, full]
