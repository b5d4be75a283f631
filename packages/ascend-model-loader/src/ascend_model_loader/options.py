# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Options of ``--model-loader-extra-config`` for load format ``ascend_peer``, and the shared
secret, which is not one of them."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from ascend_platform import extension
from ascend_platform.transfer import secret

SECRET_ENV = "VLLM_ASCEND_WEIGHTS_SECRET"

Positive = Annotated[float, msgspec.Meta(gt=0)]
Strategy = Literal["peer", "stream", "default"]
Transport = Literal["tcp", "hccl", "mooncake"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options and their defaults, documented in docs/model-loader.md. Times are in seconds, sizes
    in bytes."""

    strategies: tuple[Strategy, ...] = ("peer", "stream", "default")
    peers: tuple[str, ...] = ()
    registry: str | None = None
    name: str | None = None
    transport: Transport | tuple[Transport, ...] = "tcp"
    mooncake_protocol: Literal["tcp", "ascend"] = "tcp"
    connections: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    connect_timeout: Positive = 5.0
    timeout: Positive = 30.0
    deadline: Positive = 1800.0
    min_bytes_per_second: Positive = 1e6
    busy_timeout: Positive = 60.0
    secret_file: str | None = None
    stream: Literal["auto", "runai_streamer", "multithread"] = "auto"
    stream_threads: Annotated[int, msgspec.Meta(ge=1, le=256)] = 8
    stream_pinned: bool = False
    serve_weights: bool = False
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 28500
    max_connections: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 16
    max_bytes_per_second: Positive | None = None
    checksum: Literal["xxh3", "blake3"] = "xxh3"

    @property
    def transports(self) -> tuple[Transport, ...]:
        return (self.transport,) if isinstance(self.transport, str) else self.transport


def parse_options(given: object) -> Options:
    """Validate ``--model-loader-extra-config``.

    Raises:
        RefusedError: an unknown key, an invalid value or a missing secret, in one line.
    """
    if not isinstance(given, Mapping):
        raise _refusal(f"is {given!r}; it must be a JSON object")
    known = Options.__struct_fields__
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            if key == "secret":
                hint = f"put the secret into a file named by secret_file, or into {SECRET_ENV}"
            raise _refusal(f"has no key {key!r}; {hint}")
    try:
        options = msgspec.convert(dict(given), Options)
    except msgspec.ValidationError as error:
        raise _refusal(f"is invalid: {error}") from None
    if not options.strategies or len({*options.strategies}) < len(options.strategies):
        raise _refusal(
            f"strategies is {[*options.strategies]}; supported: peer, stream and default, each at"
            " most once"
        )
    if not options.transports or len({*options.transports}) < len(options.transports):
        raise _refusal(
            f"transport is {[*options.transports]}; supported: tcp, hccl and mooncake, each at most"
            " once"
        )
    for peer in options.peers:
        parse_address(peer)
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
        raise _refusal(f"peers has {text!r}; it must be host:port")
    return host.strip("[]"), int(port)


def read_secret(options: Options) -> bytes:
    """The shared secret: content of ``secret_file``, otherwise of the environment variable.

    Raises:
        RefusedError: there is none, or it is shorter than 16 bytes.
    """
    if not (
        found := secret.read_secret(
            options.secret_file, SECRET_ENV, "--model-loader-extra-config secret_file"
        )
    ):
        raise _refusal(
            f"needs a secret of at least {secret.MIN_SECRET_BYTES} bytes; set secret_file or"
            f" {SECRET_ENV}"
        )
    return found


def _refusal(what: str) -> extension.RefusedError:
    return extension.RefusedError(f"--model-loader-extra-config {what}")


def defaults() -> dict[str, Any]:
    """Default of each option."""
    return msgspec.structs.asdict(Options())
