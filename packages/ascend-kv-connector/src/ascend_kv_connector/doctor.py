# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Check of ``vllm-ascend doctor kv --peer HOST:PORT``, an entry point of group
``vllm_ascend.checks``: two instances can talk."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from contextlib import suppress
from time import monotonic

from ascend_platform.extension import RefusedError
from ascend_transfer.auth import is_loopback

SECONDS = 10.0

Finding = tuple[str, str, str, str]
"""Title, level, what was found, and the fix; as of ``ascend_cli.result.Result``."""


def check(options: argparse.Namespace) -> Iterator[Finding]:
    """Contact the port of a prefill instance's rank as a decode instance here would."""
    peer = getattr(options, "peer", None)
    if not peer:
        if getattr(options, "category", None) == "kv":
            fix = "vllm-ascend doctor kv --peer HOST:PORT, with its kv_port"
            yield "prefill instance", "warn", "none was named", fix
        return
    host, _, port = peer.rpartition(":")
    number = int(port) if port.isdecimal() and len(port) < 6 else 0
    if not (host := host.strip("[]")) or not 0 < number < 65536:
        fix = "name the host and kv_port of a prefill instance's rank; ports are 1 to 65535"
        yield "prefill instance", "fail", f"{peer!r} is no HOST:PORT", fix
        return
    # Imported here, because not every check of the doctor needs a peer.
    from ascend_kv_connector.auth import read_secret

    try:
        secret = read_secret("")
    except RefusedError as error:
        found, _, fix = str(error).partition("; fix: ")
        yield "secret", "fail", found, fix
        return
    yield from check_peer(host, number, secret)


def check_peer(host: str, port: int, secret: bytes) -> Iterator[Finding]:
    """Connection, secret, protocol version and data port of a rank."""
    import zmq
    from ascend_transfer.auth import CurveKeys
    from ascend_transfer.errors import TransferError, printable
    from ascend_transfer.rpc import RpcClient, make_context

    from ascend_kv_connector.p2p import protocol
    from ascend_kv_connector.p2p.protocol import CacheInfo, Handshake
    from ascend_kv_connector.p2p.transfers import hint

    context = make_context()
    try:
        client = RpcClient(
            protocol.CODEC, context, host, port, SECONDS, CurveKeys(secret) if secret else None
        )
        reply = client.call(Handshake(protocol.VERSION, ""), monotonic() + SECONDS)
        client.close()
    except zmq.ZMQError:
        fix = "name the host and kv_port of a prefill instance's rank"
        yield "control port", "fail", f"{printable(host)}:{port} is no address", fix
        return
    except TransferError as error:
        fix = (
            f"{hint(error)}; the secret is VLLM_ASCEND_KV_SECRET, here"
            f" {'set' if secret else 'not set'}"
        )
        yield "control port", "fail", f"{host}:{port}: {printable(str(error))}", fix
        return
    finally:
        context.destroy(linger=0)
    answers = f"{host}:{port} answers, {'with this secret' if secret else 'without a secret'}"
    yield "control port", "ok", answers, ""
    if not isinstance(reply, CacheInfo):
        fix = "name the port of a prefill instance"
        yield "prefill instance", "fail", f"unexpected reply {type(reply).__name__}", fix
        return
    size = sum(region.size for region in reply.regions) * reply.heads
    exposed = "read directly" if reply.memory else "staged"
    weights = printable(reply.weights) or "of unknown fingerprint"
    model = (
        f"{printable(reply.model)}, weights {weights}; {len(reply.regions)} regions of"
        f" {reply.dtype}, {size} elements a token, {exposed}"
    )
    yield "model", "ok", model, ""
    address = reply.session.partition("/")[0]
    where = f"{printable(address)} by {printable(reply.transport)}"
    yield _check_data_port(where, *address.rpartition(":")[::2])


def _check_data_port(where: str, host: str, port: str) -> Finding:
    """The port of the KV cache's transport, which ``where`` describes."""
    if cause := _connection_error(host := host.strip("[]"), port):
        fix = "admit it in the firewalls between both machines (option ports)"
        return "data port", "fail", f"{where}: {cause}", fix
    if is_loopback(host) and (
        open_at := [each for each in other_addresses() if not _connection_error(each, port)]
    ):
        fix = "close it to other machines in this machine's firewall"
        state = f"{where} accepts connections at {open_at[0]} too, without the secret"
        return "data port", "warn", state, fix
    state = f"{where} accepts connections; on a machine that is no instance this check has to fail"
    return "data port", "ok", state, ""


def other_addresses() -> list[str]:
    """Addresses of this machine that others can reach."""
    addresses = set[str]()
    with suppress(OSError):  # A container's name may have no address.
        addresses = {str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None)}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        # This sends nothing, and selects the address of the default route.
        probe.connect(("192.0.2.1", 9))
        addresses.add(str(probe.getsockname()[0]))
    return sorted(each for each in addresses if not is_loopback(each))


def _connection_error(host: str, port: str) -> str:
    """Why a TCP connection cannot be opened; "" if it can."""
    try:
        socket.create_connection((host, int(port)), SECONDS).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""
