# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Shared secret: clients with another secret or none are refused at once."""

import hashlib
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest
import zmq
from ascend_kv_connector.auth import SECRET_ENV, read_secret, require_secret, warn_of_open_ports
from ascend_kv_connector.p2p.protocol import CODEC, Ack, Finish
from ascend_kv_connector.p2p.transfers import Done
from ascend_platform import extension
from ascend_transfer import rpc
from ascend_transfer.auth import CurveKeys, is_loopback
from ascend_transfer.errors import TransferError
from ascend_transfer.rpc import RpcClient, RpcServer

OURS, THEIRS = CurveKeys(b"sixteen bytes or more"), CurveKeys(b"sixteen bytes, or more")


@pytest.mark.parametrize("pause", [0.0, 0.3], ids=["at once", "after the handshake"])
@pytest.mark.parametrize("ours", [OURS, None], ids=["secret", "none"])
@pytest.mark.parametrize("theirs", [OURS, THEIRS, None], ids=["secret", "another", "none"])
def test_client_with_a_different_secret_is_refused(
    ours: CurveKeys | None, theirs: CurveKeys | None, pause: float
) -> None:
    """Also if the handshake fails before the first query: ZMQ then has no connection, and does not
    try again."""
    asked = []
    server = RpcServer(
        CODEC, lambda question: asked.append(question) or Ack(), "127.0.0.1", keys=theirs
    )
    context = zmq.Context()
    client = RpcClient(CODEC, context, "127.0.0.1", server.port, 30.0, ours)
    sleep(pause)
    began = monotonic()
    try:
        if ours is theirs:
            assert client.call(Finish("r", "d", 0, 1), began + 30) == Ack()
        else:
            with pytest.raises(
                TransferError,
                match="authentication failed: the secrets differ or only one instance has one",
            ):
                client.call(Finish("r", "d", 0, 1), began + 30)
            assert asked == []
        assert monotonic() - began < 10
    finally:
        client.close()
        context.destroy(linger=0)
        server.close()


def test_send_to_a_peer_that_reads_nothing_ends() -> None:
    """Once ZMQ's queue is full, a send waits for the peer, which has accepted the connection."""
    causes = []

    def send(port: int) -> None:
        context = zmq.Context()
        client = RpcClient(CODEC, context, "127.0.0.1", port, 0.3)
        try:
            for _ in range(3000):
                client.post(Finish("r", "d", 0, 1))
        except TransferError as error:
            causes.append(str(error))
        client.close()
        context.destroy(linger=0)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        thread = threading.Thread(target=send, args=[silent.getsockname()[1]], daemon=True)
        thread.start()
        thread.join(60.0)
    assert causes == ["it took no message in 0.3 s"]


def test_port_above_the_last_is_refused() -> None:
    with pytest.raises(
        extension.RefusedError, match=r"listen on 127\.0\.0\.1:70000; .* up to 65535"
    ):
        RpcServer(CODEC, lambda question: Ack(), "127.0.0.1", 70000)


def test_server_takes_the_first_free_port_of_a_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(
            extension.RefusedError,
            match=rf"cannot listen on 127\.0\.0\.1:{port} .*change kv_port, or host or ports",
        ):
            RpcServer(CODEC, lambda question: Ack(), "127.0.0.1", port)
        server = RpcServer(
            CODEC, lambda question: Ack(), "127.0.0.1", range(port, min(port + 200, 65536))
        )
        assert port < server.port
        server.close()


def test_connections_without_a_handshake_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers' connections would take all files that the process may open."""
    assert 1000 <= rpc.HANDSHAKE_MS <= 10_000  # ZMQ keeps them forever with 0.
    monkeypatch.setattr("ascend_transfer.rpc.HANDSHAKE_MS", 200)
    server = RpcServer(CODEC, lambda question: Ack(), "127.0.0.1", keys=OURS)
    with socket.create_connection(("127.0.0.1", server.port), 20) as stranger:
        while stranger.recv(64):  # ZMQ's greeting, and then the end
            pass
    server.close()


def test_client_with_only_the_public_keys_is_refused() -> None:
    server = RpcServer(CODEC, lambda question: Ack(), "127.0.0.1", keys=OURS)
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
    client.curve_serverkey = OURS._server_keys[0]
    client.connect(f"tcp://127.0.0.1:{server.port}")
    client.send_multipart([b"1", b""])
    assert not client.poll(300)
    context.destroy(linger=0)
    server.close()


def test_tokens_are_transferred(instances: Callable) -> None:
    producer, consumer = instances("p", keys=OURS).produce(), instances("d", keys=OURS).consume()
    source, _ = producer.fill("r", 17)
    blocks = consumer.take(17)
    consumer.consumers[0].start("r", source, blocks, 0, 17)
    assert isinstance(consumer.wait()[0][0], Done)
    assert consumer.holds("r", blocks, 0, 17)
    assert producer.all_free("r")


def test_secret_file_takes_precedence_over_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_ENV, raising=False)
    assert read_secret("") == b""
    file = tmp_path / "secret"
    file.write_text("of the file, in a line\n")
    of_file = read_secret(str(file))
    assert len(of_file) == 32
    monkeypatch.setenv(SECRET_ENV, "of the environment")
    assert read_secret("") not in (of_file, b"of the environment")
    assert read_secret(str(file)) == of_file
    monkeypatch.setenv(SECRET_ENV, "of the file, in a line")
    assert read_secret("") == of_file
    monkeypatch.setenv(SECRET_ENV, "short")
    with pytest.raises(
        extension.RefusedError,
        match=f"{SECRET_ENV} has a secret of 5 bytes; fix: use one of at least 16",
    ):
        read_secret("")
    file.write_text("")
    with pytest.raises(extension.RefusedError, match="secret has a secret of 0 bytes"):
        read_secret(str(file))
    with pytest.raises(
        extension.RefusedError, match=r"secret_file .*none cannot be read: No such file"
    ):
        read_secret(str(tmp_path / "none"))


def test_key_is_derived_at_a_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret that a person has chosen must not be found by guesses on what its holders sign."""
    monkeypatch.setenv(SECRET_ENV, "of the environment")
    n, r = 1 << 15, 8  # 32 MiB
    expected = hashlib.scrypt(
        b"of the environment",
        salt=b"ascend_platform.transfer",
        n=n,
        r=r,
        p=1,
        maxmem=129 * n * r,
        dklen=32,
    )
    assert read_secret("") == expected


def test_secret_is_required_where_others_can_connect() -> None:
    require_secret(b"", False, "127.0.0.1", "hccl")
    for transport in ("mooncake", "hccl"):
        require_secret(b"", True, "10.0.0.1", transport)
        require_secret(b"sixteen bytes or more", False, "10.0.0.1", transport)
    with pytest.raises(
        extension.RefusedError,
        match=r"can reach 10\.0\.0\.1, .*set secret_file .*VLLM_ASCEND_KV_SECRET .*insecure",
    ):
        require_secret(b"", False, "10.0.0.1", "hccl")
    with pytest.raises(
        extension.RefusedError,
        match=r"Mooncake listens on all addresses .*fix: set secret_file .*insecure",
    ):
        require_secret(b"", False, "127.0.0.1", "mooncake")


def test_open_ports_are_named_with_a_secret_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    monkeypatch.setattr(
        extension.logger, "warning", lambda line, *values: lines.append(line % values)
    )
    warn_of_open_ports(True, "mooncake", "10.0.0.1:15000")
    warn_of_open_ports(False, "hccl", "10.0.0.1:15000")
    assert lines == []
    warn_of_open_ports(False, "mooncake", "10.0.0.1:15000")
    assert re.search(
        r"Mooncake does not authenticate its peers: .*10\.0\.0\.1:15000.*fix: admit the other"
        r" instances only",
        lines[0],
    )


def test_is_loopback() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("no such host!")
