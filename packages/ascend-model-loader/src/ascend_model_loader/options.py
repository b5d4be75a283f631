# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Options of ``--model-loader-extra-config`` for load format ``ascend_peer``, and the shared
secret, which is not one of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from ascend_platform import extension
from ascend_transfer import secret

WHERE = "--model-loader-extra-config"
SECRET_ENV = "VLLM_ASCEND_WEIGHTS_SECRET"

Strategy = Literal["peer", "stream", "default"]
Transport = Literal["tcp", "hccl", "mooncake"]
Seconds = Annotated[float, extension.Range(0, unit="seconds", is_open=True)]
Rate = Annotated[float, extension.Range(0, unit="bytes per second", is_open=True)]


@dataclass(frozen=True)
class Options:
    """Options and their defaults, documented in docs/model-loader.md."""

    strategies: list[Strategy] = extension.option(
        ["peer", "stream", "default"], "where weights are loaded from, in this order"
    )
    peers: list[str] = extension.option([], "host:port of rank 0 of engines that serve weights")
    registry: str | None = extension.option(None, "shared directory that lists such engines")
    name: str | None = extension.option(None, "name of the weights; by default model and revision")
    transport: Transport | list[Transport] = extension.option("tcp", "transports by preference")
    mooncake_protocol: Literal["tcp", "ascend"] = extension.option("tcp", "protocol of Mooncake")
    connections: Annotated[int, extension.Range(1, 64)] = extension.option(4, "of a rank to a peer")
    connect_timeout: Seconds = extension.option(5.0, "limit to connect")
    timeout: Seconds = extension.option(30.0, "limit without a byte")
    deadline: Seconds = extension.option(1800.0, "limit for all weights from all peers")
    min_bytes_per_second: Rate = extension.option(1e6, "rate below which a peer is left")
    busy_timeout: Seconds = extension.option(60.0, "limit of retries while all peers are busy")
    secret_file: str | None = extension.option(None, "file with the shared secret")
    stream: Literal["auto", "runai_streamer", "multithread"] = extension.option(
        "auto", "reader of strategy stream; by default the one that is installed"
    )
    stream_threads: Annotated[int, extension.Range(1, 256)] = extension.option(8, "of the reader")
    stream_pinned: bool = extension.option(
        False, "copies to pinned memory by a thread of their own"
    )
    serve_weights: bool = extension.option(False, "whether this engine serves its weights")
    host: str = extension.option("127.0.0.1", "address of the weight server")
    port: Annotated[int, extension.Range(0, 65535)] = extension.option(28500, "of rank 0's server")
    max_connections: Annotated[int, extension.Range(1, 4096)] = extension.option(16, "of a server")
    max_bytes_per_second: Rate | None = extension.option(None, "limit of a server")
    checksum: Literal["xxh3", "blake3"] = extension.option("xxh3", "of each chunk")

    @property
    def transports(self) -> tuple[Transport, ...]:
        return (self.transport,) if isinstance(self.transport, str) else tuple(self.transport)


def parse_options(values: object) -> Options:
    """Validate ``--model-loader-extra-config``.

    Raises:
        RefusedError: an unknown key, an invalid value or a missing secret, in one line.
    """
    if isinstance(values, Mapping) and "secret" in values:
        raise extension.RefusedError(
            f"{WHERE} has no key 'secret'; fix: put the secret into a file named by secret_file, or into"
            f" {SECRET_ENV}"
        )
    options = extension.parse_options(Options, values, WHERE)
    if not options.strategies or len({*options.strategies}) < len(options.strategies):
        raise extension.RefusedError(
            f"{WHERE}.strategies is {[*options.strategies]}; supported: peer, stream and default, each at"
            " most once; fix: name each once"
        )
    if not options.transports or len({*options.transports}) < len(options.transports):
        raise extension.RefusedError(
            f"{WHERE}.transport is {[*options.transports]}; supported: tcp, hccl and mooncake, each at most"
            " once; fix: name each once"
        )
    for peer in options.peers:
        parse_address(peer)
    if options.peers and "peer" not in options.strategies:
        raise extension.RefusedError(
            f"{WHERE}.peers is {options.peers}, and strategies is {options.strategies}, without peer; fix:"
            " add peer to strategies, or remove peers"
        )
    if options.registry and "peer" not in options.strategies and not options.serve_weights:
        raise extension.RefusedError(
            f"{WHERE}.registry is {options.registry!r}, and strategies is {options.strategies}, without"
            " peer, and serve_weights is off; fix: add peer to strategies, set serve_weights, or remove"
            " registry"
        )
    if options.serve_weights or options.peers or options.registry:
        read_secret(options)
    return options


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``.

    Raises:
        RefusedError: the text has another form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise extension.RefusedError(f"{WHERE}.peers has {text!r}; fix: write host:port")
    return host.strip("[]"), int(port)


def read_secret(options: Options) -> bytes:
    """The shared secret: content of ``secret_file``, otherwise of the environment variable.

    Raises:
        RefusedError: there is none, or it is shorter than 16 bytes.
    """
    if not (shared := secret.read_secret(options.secret_file, SECRET_ENV, f"{WHERE}.secret_file")):
        raise extension.RefusedError(
            f"{WHERE} needs a secret of at least {secret.MIN_SECRET_BYTES} bytes; fix: set secret_file or"
            f" {SECRET_ENV}"
        )
    return shared
