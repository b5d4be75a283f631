# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
"""Options of AscendP2PConnector in ``kv_connector_extra_config`` of vLLM's
``--kv-transfer-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ascend_platform import extension

from ascend_kv_connector.p2p.states import LAST_STATE

IGNORED_KEYS = ("prefill", "decode", "use_ascend_direct")
"""Options of vllm-ascend's connectors for facts that ranks exchange in the handshake here; ignored.
"""

Positive = Annotated[int, extension.Range(1)]
Seconds = Annotated[float, extension.Range(0, unit="seconds", is_open=True)]


@dataclass(frozen=True)
class Options:
    """Options and their defaults, documented in docs/kv-connector.md. Times are in seconds."""

    transport: str = extension.option("mooncake", "transport of the KV cache: mooncake or hccl")
    protocol: str = extension.option("tcp", "protocol of Mooncake: tcp or ascend")
    host: str = extension.option("", "address for the other instances; by default vLLM's")
    transfer_timeout: Seconds = extension.option(120.0, "limit of the transfer of a request")
    answer_timeout: Seconds = extension.option(10.0, "limit of a peer's reply to one message")
    lease: Seconds = extension.option(30.0, "time for which blocks of a finished prompt are kept")
    chunk_mib: Positive = extension.option(16, "size of a send or receive buffer in MiB")
    slots: Positive = extension.option(4, "send buffers of a rank")
    lanes: Positive = extension.option(2, "requests received concurrently from an instance")
    verify: bool = extension.option(False, "checksums of all chunks, with staging buffers")
    expose_cache: bool = extension.option(True, "transfers without staging buffers")
    secret_file: str = extension.option("", "file with the secret that all instances share")
    insecure: bool = extension.option(False, "an instance without a secret, for closed networks")
    ports: str = extension.option("", 'first and last port to listen on, such as "20000-20099"')
    peers: str | list[str] = extension.option("", "hosts and networks of the other instances")
    mode: Literal["pull", "push"] = extension.option(
        "pull", "what is done for a prompt without a source: prefill here, or ask `metaserver`"
    )
    metaserver: str | list[str] = extension.option("", "URLs of routers that may be contacted")

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_mib << 20

    @property
    def metaservers(self) -> list[str]:
        """URLs of routers that may be contacted; with mode push, the first one by default."""
        return _names(self.metaserver)

    @property
    def port_range(self) -> range | None:
        """Ports to choose from, None if any."""
        first, _, last = self.ports.partition("-")
        return range(int(first), int(last) + 1) if self.ports else None

    @property
    def peer_hosts(self) -> list[str]:
        return _names(self.peers)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Options:
        """Validate ``kv_connector_extra_config``.

        Raises:
            RefusedError: an unknown key, with the closest known one, or an invalid value, in one
                line.
        """
        values = {key: value for key, value in config.items() if key not in IGNORED_KEYS}
        options = extension.parse_options(cls, values, "kv_connector_extra_config")
        first, _, last = options.ports.partition("-")
        if options.ports and not (
            first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536
        ):
            raise extension.RefusedError(
                f"kv_connector_extra_config.ports is {options.ports!r}; fix: give the first and"
                ' the last port, such as "20000-20099"'
            )
        for url in options.metaservers:
            if not url.startswith(("http://", "https://")):
                raise extension.RefusedError(
                    f"kv_connector_extra_config.metaserver is {url!r}; fix: give a URL"
                )
        return options


def _names(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) and value else list(value)


def sliding_windows(name: str, groups: list[Any], states: bool = False) -> tuple[int, ...]:
    """Tokens that each KV cache group (vLLM's KVCacheGroupSpec) retains; 0 means all,
    ``LAST_STATE`` that it has ``states``.

    Raises:
        RefusedError: KV caches other than full attention and sliding window, or several block
            sizes, in one line.
    """
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        iter_layer_specs,
    )

    specs = [list(iter_layer_specs(group.kv_cache_spec)) for group in groups]
    paged = [spec for group in specs for spec in group if not (states and type(spec) is MambaSpec)]
    kinds = sorted({type(spec).__name__ for spec in paged})
    sizes = sorted({spec.block_size for spec in paged})
    supported = {each.__name__ for each in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)}
    if not {*kinds} <= supported or len(sizes) != 1:
        raise extension.RefusedError(
            f"{name} supports KV caches of full, latent and sliding-window attention with one block"
            f" size; the model has {', '.join(kinds) or 'only states'} with blocks of"
            f" {', '.join(map(str, sizes))} tokens; fix: remove the connector"
        )
    # A group's specs are equal (vllm/v1/kv_cache_interface.py, UniformTypeKVCacheSpecs).
    firsts = [group[0] for group in specs]
    if states and len(paged) < sum(map(len, specs)):
        return tuple(LAST_STATE if type(first) is MambaSpec else 0 for first in firsts)
    return tuple(
        (
            first.sliding_window + getattr(first, "extra_retained_tokens", 0)
            if type(first) is SlidingWindowSpec
            else 0
        )
        for first in firsts
    )


def paged_block_size(groups: list[Any]) -> int:
    """Tokens of a block of attention layers, whose groups have one size."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return next(
        group.kv_cache_spec.block_size
        for group in groups
        if type(group.kv_cache_spec) is not MambaSpec
    )
